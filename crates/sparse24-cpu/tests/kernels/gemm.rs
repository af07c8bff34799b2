//! Products in every layout, within a bound.

use ndarray::{Array2, s};
use sparse24_core::op::Accumulate;
use sparse24_cpu::{
    bias::bias_forward,
    gemm::{matmul, matmul_bias},
};

use crate::input::{assert_close, column_major, poison, random};

/// Unit roundoff of f32.
const U: f64 = 1.0 / (1_u64 << 24) as f64;

fn wide(x: &Array2<f32>) -> Array2<f64> {
    x.mapv(f64::from)
}

#[test]
fn every_layout_is_within_the_bound() {
    for [m, k, n] in [
        [1, 1, 1],
        [1, 300, 200],
        [200, 300, 1],
        [65, 33, 129],
        [31, 600, 67],
        [768, 128, 65],
        [513, 40, 100],
        [3, 1100, 5],
    ] {
        let (a, b, c) = (random([m, k], 1, 1.0), random([k, n], 2, 1.0), random([m, n], 3, 1.0));
        let expected = wide(&a).dot(&wide(&b));
        // k products and k sums, each rounded, and the multiplication by alpha = 1.
        let bound = wide(&a).mapv(f64::abs).dot(&wide(&b).mapv(f64::abs)) * ((k + 2) as f64 * U);
        let sum = wide(&c) + &expected;
        let added_bound = &bound
            + &((sum.mapv(f64::abs) + &wide(&c).mapv(f64::abs)) * (k as f64 / 256.0 + 2.0) * U);
        let layouts = [Array2::clone, column_major];
        for (a, b) in layouts.into_iter().flat_map(|of_a| layouts.map(|of_b| (of_a(&a), of_b(&b))))
        {
            let [mut overwritten, mut added] = [poison([m, n]), c.clone()];
            matmul(a.view(), b.view(), overwritten.view_mut(), Accumulate::Overwrite).unwrap();
            matmul(a.view(), b.view(), added.view_mut(), Accumulate::Add).unwrap();
            assert_close("overwritten", overwritten.view(), &expected, &bound);
            assert_close("added", added.view(), &sum, &added_bound);
            let (bias, mut biased) = (c.row(0), poison([m, n]));
            matmul_bias(a.view(), b.view(), bias, biased.view_mut()).unwrap();
            bias_forward(overwritten.view_mut(), bias).unwrap();
            assert_eq!(biased, overwritten);
        }
    }
}

#[test]
fn scattered_operands_are_copied() {
    let (a, b) = (random([40, 60], 6, 1.0), random([60, 80], 7, 1.0));
    let mut c = poison([40, 80]);
    let (a, b) = (a.slice(s![..;2, 5..25]), b.slice(s![10..30, ..;-3]));
    matmul(a, b, c.slice_mut(s![..20, 3..30]), Accumulate::Overwrite).unwrap();
    let mut contiguous = poison([20, 27]);
    let [a, b] = [a, b].map(|x| x.as_standard_layout().into_owned());
    matmul(a.view(), b.view(), contiguous.view_mut(), Accumulate::Overwrite).unwrap();
    assert_eq!(c.slice(s![..20, 3..30]), contiguous);
    let unwritten = c.iter().filter(|x| x.is_nan()).count();
    assert_eq!(unwritten, 40 * 80 - 20 * 27, "only the slice is written");
}

#[test]
fn nan_reaches_its_row_only() {
    let (mut a, b) = (random([70, 20], 8, 1.0), random([20, 30], 9, 1.0));
    a[[65, 3]] = f32::NAN;
    let mut c = poison([70, 30]);
    matmul(a.view(), b.view(), c.view_mut(), Accumulate::Overwrite).unwrap();
    assert!(c.indexed_iter().all(|((row, _), x)| x.is_nan() == (row == 65)));
}
