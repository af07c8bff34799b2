//! Activations against f64, gradients against central differences, in every pair of layouts.

use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, Zip, concatenate, s};
use sparse24_cpu::{Error, activation::*};

use crate::check::{
    NUMERIC, U, any_threads, assert_close, column_major, numeric_gradient, poison, random, wide,
};

const SHAPES: [[usize; 2]; 5] = [[1, 1], [7, 13], [300, 70], [1, 20_000], [0, 4]];
const SLOPE: f64 = 1.595_769_121_605_731;

fn gelu(z: f64) -> f64 {
    0.5 * z * (1.0 + (SLOPE / 2.0 * (z + 0.044715 * z * z * z)).tanh())
}

fn silu(z: f64) -> f64 {
    z / (1.0 + (-z).exp())
}

/// Bounds of value and slope of z sigmoid(y(z)), where y has relative error 4u and the sigmoid 4
/// ulps (8u): sigmoid absolute ds = s (8u + 4u |y| (1 - s)), value |z| ds + u |value|, slope ds +
/// |z y'| (ds + u + 8u s(1-s)) + 2u. Where the argument is held at its limit, s is off by less than
/// 1e-37.
fn bounds(z: f64, y: f64, dy: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + (-y).exp());
    let ds = s * (8.0 + 4.0 * y.abs() * (1.0 - s)) * U + 1e-36;
    let spread = ds * (1.0 - s).max(s) + U * s + 8.0 * U * s * (1.0 - s);
    (z.abs() * (ds + 2.0 * U * s), ds + (z * dy).abs() * spread + 2.0 * U)
}

fn gelu_bounds(z: f64) -> (f64, f64) {
    bounds(z, SLOPE * (z + 0.044715 * z * z * z), SLOPE * (1.0 + 0.134145 * z * z))
}

fn silu_bounds(z: f64) -> (f64, f64) {
    bounds(z, z, 1.0)
}

#[test]
fn gelu_forward_and_backward() {
    for shape in SHAPES {
        let (z, dh) = (random(shape, 1, 6.0), random(shape, 2, 1.0));
        let slope = wide(&z).mapv(|z| (gelu(z + 1e-5) - gelu(z - 1e-5)) / 2e-5);
        for (z, dh) in [
            (z.clone(), dh.clone()),
            (column_major(&z), column_major(&dh)),
            (column_major(&z), dh.clone()),
        ] {
            for layout in [|x: &Array2<f32>| x.clone(), column_major] {
                let [h, dz] = any_threads(|| {
                    let mut outputs = [poison(shape), poison(shape)].map(|x| layout(&x));
                    gelu_forward(z.view(), outputs[0].view_mut()).unwrap();
                    gelu_backward(dh.view(), z.view(), outputs[1].view_mut()).unwrap();
                    outputs
                });
                assert_close(
                    "h",
                    h.view(),
                    &wide(&z).mapv(gelu),
                    &wide(&z).mapv(|z| gelu_bounds(z).0),
                );
                let bound = Zip::from(&wide(&z))
                    .and(&wide(&dh))
                    .map_collect(|&z, dh| dh.abs() * (gelu_bounds(z).1 + NUMERIC));
                assert_close("dz", dz.view(), &(&wide(&dh) * &slope), &bound);
            }
        }
    }
}

type Forward = fn(ArrayView2<'_, f32>, ArrayViewMut2<'_, f32>) -> Result<(), Error>;
type Backward =
    fn(ArrayView2<'_, f32>, ArrayView2<'_, f32>, ArrayViewMut2<'_, f32>) -> Result<(), Error>;

fn gated(
    forward: Forward,
    backward: Backward,
    activation: fn(f64) -> f64,
    bounds: fn(f64) -> (f64, f64),
) {
    for [p, f] in SHAPES {
        let (z, dh) = (random([p, 2 * f], 3, 6.0), random([p, f], 4, 1.0));
        let (a, b) =
            (wide(&z).slice(s![.., ..f]).to_owned(), wide(&z).slice(s![.., f..]).to_owned());
        let slope = a.mapv(|z| (activation(z + 1e-5) - activation(z - 1e-5)) / 2e-5);
        for (z, dh) in [
            (z.clone(), dh.clone()),
            (column_major(&z), column_major(&dh)),
            (z.clone(), column_major(&dh)),
        ] {
            for layout in [|x: &Array2<f32>| x.clone(), column_major] {
                let [h, dz] = any_threads(|| {
                    let mut outputs = [poison([p, f]), poison([p, 2 * f])].map(|x| layout(&x));
                    forward(z.view(), outputs[0].view_mut()).unwrap();
                    backward(dh.view(), z.view(), outputs[1].view_mut()).unwrap();
                    outputs
                });
                let value = a.mapv(activation);
                let value_bound =
                    Zip::from(&a).and(&value).map_collect(|&a, h| bounds(a).0 + U * h.abs());
                assert_close("h", h.view(), &(&value * &b), &(&value_bound * &b.mapv(f64::abs)));
                let dh = wide(&dh);
                let bound =
                    Zip::from(&a).and(&b).and(&dh).and(&slope).map_collect(|&a, b, dh, slope| {
                        (dh * b).abs() * (bounds(a).1 + NUMERIC + 2.0 * U * slope.abs())
                    });
                assert_close("dz, first half", dz.slice(s![.., ..f]), &(&dh * &b * &slope), &bound);
                assert_close(
                    "dz, second half",
                    dz.slice(s![.., f..]),
                    &(&dh * &value),
                    &(dh.mapv(f64::abs) * &value_bound),
                );
            }
        }
    }
}

#[test]
fn geglu() {
    gated(geglu_forward, geglu_backward, gelu, gelu_bounds);
}

#[test]
fn swiglu() {
    gated(swiglu_forward, swiglu_backward, silu, silu_bounds);
}

#[test]
fn the_first_half_is_activated() {
    let z = ndarray::arr2(&[[-30.0f32, 30.0, 5.0, 7.0]]);
    let mut h = poison([1, 2]);
    geglu_forward(z.view(), h.view_mut()).unwrap();
    assert_close(
        "geglu",
        h.view(),
        &ndarray::arr2(&[[0.0, 210.0]]),
        &ndarray::arr2(&[[1e-34, 0.0]]),
    );
    swiglu_forward(z.mapv(|x| 4.0 * x).view(), h.view_mut()).unwrap();
    assert_close(
        "swiglu",
        h.view(),
        &ndarray::arr2(&[[0.0, 3360.0]]),
        &ndarray::arr2(&[[1e-34, 0.0]]),
    );
}

#[test]
fn far_out_and_not_a_number() {
    let z =
        ndarray::arr2(&[[f32::NEG_INFINITY, f32::MIN, -1e20, 0.0, 1e20, f32::MAX, f32::INFINITY]]);
    let ones = Array2::ones([1, 7]);
    let nan = poison([1, 1]);
    for (forward, backward) in
        [(gelu_forward as Forward, gelu_backward as Backward), (silu_forward, silu_backward)]
    {
        let [mut h, mut dz] = [poison([1, 7]), poison([1, 7])];
        forward(z.view(), h.view_mut()).unwrap();
        backward(ones.view(), z.view(), dz.view_mut()).unwrap();
        assert_close(
            "h",
            h.slice(s![.., ..6]),
            &ndarray::arr2(&[[0.0, 0.0, 0.0, 0.0, f64::from(1e20f32), f64::from(f32::MAX)]]),
            &Array2::from_elem([1, 6], 1e-34),
        );
        assert_eq!(h[[0, 6]], f32::INFINITY);
        assert_close(
            "dz",
            dz.view(),
            &ndarray::arr2(&[[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]]),
            &Array2::from_elem([1, 7], 1e-32),
        );
        forward(nan.view(), h.slice_mut(s![.., ..1])).unwrap();
        backward(ones.slice(s![.., ..1]), nan.view(), dz.slice_mut(s![.., ..1])).unwrap();
        assert!(h[[0, 0]].is_nan() && dz[[0, 0]].is_nan());
    }
}

/// SwiGLU with a second half of ones.
fn silu_forward(z: ArrayView2<'_, f32>, h: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    let ones = Array2::ones(z.dim());
    swiglu_forward(concatenate![Axis(1), z, ones].view(), h)
}

fn silu_backward(
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    mut dz: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    let ones = Array2::ones(z.dim());
    let mut both = poison([z.nrows(), 2 * z.ncols()]);
    swiglu_backward(dh, concatenate![Axis(1), z, ones].view(), both.view_mut())?;
    dz.assign(&both.slice(s![.., ..z.ncols()]));
    Ok(())
}

#[test]
fn gradients_agree_with_a_numeric_gradient_of_the_forward() {
    let (z, dh) = (random([3, 8], 5, 3.0), random([3, 4], 6, 1.0));
    let mut dz = poison([3, 8]);
    geglu_backward(dh.view(), z.view(), dz.view_mut()).unwrap();
    let expected = numeric_gradient(&wide(&z), |z| {
        (&wide(&dh) * &z.slice(s![.., ..4]).mapv(gelu) * z.slice(s![.., 4..])).sum()
    });
    assert_close("dz", dz.view(), &expected, &Array2::from_elem([3, 8], 3.0 * 40.0 * U + NUMERIC));
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let (z, mut h) = (Array2::zeros([3, 8]), Array2::zeros([3, 5]));
    let error = geglu_forward(z.view(), h.view_mut()).unwrap_err();
    assert_eq!(
        error,
        Error::Shape { operation: "geglu_forward", operand: "z", expected: [3, 10], found: [3, 8] }
    );
    let error = gelu_backward(h.view(), z.view(), Array2::zeros([3, 8]).view_mut()).unwrap_err();
    assert_eq!(
        error,
        Error::Shape { operation: "gelu_backward", operand: "dh", expected: [3, 8], found: [3, 5] }
    );
}
