//! Activations: layouts and saturation. The conformance suite checks their values.

use ndarray::{Array2, Axis, arr2, concatenate, s};
use sparse24_core::op::Activation;
use sparse24_cpu::activation::{activation_backward, activation_forward};

use crate::input::{assert_close, column_major, poison, random};

const SHAPES: [[usize; 2]; 5] = [[1, 1], [7, 13], [300, 70], [1, 20_000], [0, 4]];

#[test]
fn the_layout_changes_no_bit() {
    type Layout = fn(&Array2<f32>) -> Array2<f32>;
    let row_major: Layout = Array2::clone;
    for (activation, [p, f]) in Activation::ALL.into_iter().flat_map(|a| SHAPES.map(|s| (a, s))) {
        let width = f * activation.columns_in();
        let (z, dh) = (random([p, width], 3, 6.0), random([p, f], 4, 1.0));
        let run = |layouts: [Layout; 3]| {
            let [of_z, of_dh, of_outputs] = layouts;
            let (z, dh) = (of_z(&z), of_dh(&dh));
            let mut outputs = [poison([p, f]), poison([p, width])].map(|x| of_outputs(&x));
            activation_forward(activation, z.view(), outputs[0].view_mut()).unwrap();
            activation_backward(activation, dh.view(), z.view(), outputs[1].view_mut()).unwrap();
            outputs.map(|x| x.mapv(f32::to_bits))
        };
        let expected = run([row_major; 3]);
        assert_eq!(run([column_major; 3]), expected);
        assert_eq!(run([column_major, row_major, column_major]), expected);
    }
}

#[test]
fn huge_and_non_finite_inputs() {
    let z = arr2(&[[f32::NEG_INFINITY, f32::MIN, -1e20, 0.0, 1e20, f32::MAX, f32::INFINITY]]);
    for activation in Activation::ALL {
        let gated = |x: &Array2<f32>| match activation.columns_in() {
            1 => x.clone(),
            _ => concatenate![Axis(1), x.view(), Array2::<f32>::ones(x.dim())],
        };
        let run = |z: &Array2<f32>| {
            let (z, shape) = (gated(z), [1, z.ncols()]);
            let (mut h, mut dz) = (poison(shape), poison([1, z.ncols()]));
            activation_forward(activation, z.view(), h.view_mut()).unwrap();
            let dh = Array2::ones(shape);
            activation_backward(activation, dh.view(), z.view(), dz.view_mut()).unwrap();
            (h, dz.slice(s![.., ..shape[1]]).to_owned())
        };
        let (h, dz) = run(&z);
        let saturates = activation == Activation::Tanh;
        let (low, slopes) = match saturates {
            true => (-1.0, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
            false if activation == Activation::Relu => (0.0, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
            false => (0.0, [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]),
        };
        let high = |z: f32| if saturates { 1.0 } else { f64::from(z) };
        let expected = arr2(&[[low, low, low, 0.0, high(1e20), high(f32::MAX)]]);
        assert_close("h", h.slice(s![.., ..6]), &expected, &Array2::from_elem([1, 6], 1e-34));
        assert_eq!(h[[0, 6]], if saturates { 1.0 } else { f32::INFINITY });
        let expected = arr2(&[slopes]);
        assert_close("dz", dz.view(), &expected, &Array2::from_elem([1, 7], 1e-32));
        let (h, dz) = run(&poison([1, 1]));
        assert!(h[[0, 0]].is_nan() && dz[[0, 0]].is_nan());
    }
}
