//! Activations against f64 in every pair of layouts, and their gradients against central
//! differences.

use ndarray::{Array2, Axis, Zip, arr2, concatenate, s};
use sparse24_core::op::Activation::{self, Geglu, Gelu, Swiglu};
use sparse24_cpu::{
    Error,
    activation::{activation_backward, activation_forward},
};

use crate::check::{NUMERIC, U, any_threads, assert_close, column_major, poison, random, wide};

const SHAPES: [[usize; 2]; 5] = [[1, 1], [7, 13], [300, 70], [1, 20_000], [0, 4]];
const SLOPE: f64 = 1.595_769_121_605_731;

/// The nonlinearity of an activation, without its gate.
fn value(activation: Activation, z: f64) -> f64 {
    match activation {
        Swiglu => z / (1.0 + (-z).exp()),
        _ => 0.5 * z * (1.0 + (SLOPE / 2.0 * (z + 0.044715 * z * z * z)).tanh()),
    }
}

fn slope(activation: Activation, z: f64) -> f64 {
    (value(activation, z + 1e-5) - value(activation, z - 1e-5)) / 2e-5
}

/// Bounds of value and slope of z sigmoid(y(z)), where y has relative error 4u and the sigmoid 4
/// ulps (8u): sigmoid absolute ds = s (8u + 4u |y| (1 - s)), value |z| ds + u |value|, slope ds +
/// |z y'| (ds + u + 8u s(1-s)) + 2u. Where the argument is held at its limit, s is off by less than
/// 1e-37.
fn bounds(activation: Activation, z: f64) -> (f64, f64) {
    let (y, dy) = match activation {
        Swiglu => (z, 1.0),
        _ => (SLOPE * (z + 0.044715 * z * z * z), SLOPE * (1.0 + 0.134145 * z * z)),
    };
    let s = 1.0 / (1.0 + (-y).exp());
    let ds = s * (8.0 + 4.0 * y.abs() * (1.0 - s)) * U + 1e-36;
    let spread = ds * (1.0 - s).max(s) + U * s + 8.0 * U * s * (1.0 - s);
    (z.abs() * (ds + 2.0 * U * s), ds + (z * dy).abs() * spread + 2.0 * U)
}

#[test]
fn values_and_gradients_are_within_their_bounds() {
    let row_major: fn(&Array2<f32>) -> Array2<f32> = Array2::clone;
    for (activation, [p, f]) in Activation::ALL.into_iter().flat_map(|a| SHAPES.map(|s| (a, s))) {
        let width = f * activation.columns_in();
        let (z, dh) = (random([p, width], 3, 6.0), random([p, f], 4, 1.0));
        let a = wide(&z).slice(s![.., ..f]).to_owned();
        // Without a gate, the second factor is 1.
        let b = if activation == Gelu {
            Array2::ones([p, f])
        } else {
            wide(&z).slice(s![.., f..]).to_owned()
        };
        for (of_z, of_dh) in
            [(row_major, row_major), (column_major, column_major), (column_major, row_major)]
        {
            let (z, dh) = (of_z(&z), of_dh(&dh));
            for layout in [row_major, column_major] {
                let [h, dz] = any_threads(|| {
                    let mut outputs = [poison([p, f]), poison([p, width])].map(|x| layout(&x));
                    activation_forward(activation, z.view(), outputs[0].view_mut()).unwrap();
                    let dz = outputs[1].view_mut();
                    activation_backward(activation, dh.view(), z.view(), dz).unwrap();
                    outputs
                });
                let h_expected = a.mapv(|a| value(activation, a));
                let h_bound = Zip::from(&a)
                    .and(&h_expected)
                    .map_collect(|&a, h| bounds(activation, a).0 + U * h.abs());
                assert_close("h", h.view(), &(&h_expected * &b), &(&h_bound * &b.mapv(f64::abs)));
                let dh = wide(&dh);
                let slope = a.mapv(|a| slope(activation, a));
                let bound =
                    Zip::from(&a).and(&b).and(&dh).and(&slope).map_collect(|&a, b, dh, slope| {
                        (dh * b).abs() * (bounds(activation, a).1 + NUMERIC + 2.0 * U * slope.abs())
                    });
                assert_close("dz", dz.slice(s![.., ..f]), &(&dh * &b * &slope), &bound);
                if activation != Gelu {
                    let (db, bound) = (&dh * &h_expected, dh.mapv(f64::abs) * &h_bound);
                    assert_close("dz of the gate", dz.slice(s![.., f..]), &db, &bound);
                }
            }
        }
    }
}

#[test]
fn gates_activate_the_first_half() {
    let z = arr2(&[[-30.0f32, 30.0, 5.0, 7.0]]);
    for (activation, scale, expected) in [(Geglu, 1.0, 210.0), (Swiglu, 4.0, 3360.0)] {
        let mut h = poison([1, 2]);
        activation_forward(activation, z.mapv(|x| scale * x).view(), h.view_mut()).unwrap();
        assert_close("h", h.view(), &arr2(&[[0.0, expected]]), &arr2(&[[1e-34, 0.0]]));
    }
}

#[test]
fn huge_and_non_finite_inputs() {
    let z = arr2(&[[f32::NEG_INFINITY, f32::MIN, -1e20, 0.0, 1e20, f32::MAX, f32::INFINITY]]);
    for activation in Activation::ALL {
        let gated = |x: &Array2<f32>| match activation {
            Gelu => x.clone(),
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
        let expected = arr2(&[[0.0, 0.0, 0.0, 0.0, f64::from(1e20f32), f64::from(f32::MAX)]]);
        assert_close("h", h.slice(s![.., ..6]), &expected, &Array2::from_elem([1, 6], 1e-34));
        assert_eq!(h[[0, 6]], f32::INFINITY);
        let expected = arr2(&[[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]]);
        assert_close("dz", dz.view(), &expected, &Array2::from_elem([1, 7], 1e-32));
        let (h, dz) = run(&poison([1, 1]));
        assert!(h[[0, 0]].is_nan() && dz[[0, 0]].is_nan());
    }
}

#[test]
fn shape_errors_name_the_operand() {
    let (z, mut h) = (Array2::zeros([3, 8]), Array2::zeros([3, 5]));
    let error = activation_forward(Geglu, z.view(), h.view_mut()).unwrap_err();
    assert!(
        matches!(error, Error::Shape { operand: "z", expected: [3, 10], found: [3, 8], .. }),
        "{error}"
    );
    let dz = Array2::zeros([3, 4]);
    let error = activation_backward(Gelu, z.view(), z.view(), dz.clone().view_mut()).unwrap_err();
    assert!(matches!(error, Error::Shape { operand: "dz", expected: [3, 8], .. }), "{error}");
}
