//! Products in every layout: exact where the arithmetic is, otherwise within a bound.

use ndarray::{Array2, s};
use sparse24_core::op::Accumulate;
use sparse24_cpu::{Error, gemm::matmul};

use crate::check::{U, any_threads, assert_close, column_major, poison, random, wide};

const SHAPES: [[usize; 3]; 14] = [
    [1, 1, 1],
    [1, 300, 200],
    [200, 300, 1],
    [2, 3, 4],
    [5, 1, 7],
    [64, 64, 64],
    [65, 33, 129],
    [130, 17, 65],
    [31, 600, 67],
    [768, 128, 65],
    [65, 768, 128],
    [513, 40, 100],
    [3, 1100, 5],
    [300, 30, 300],
];

#[test]
fn every_layout_is_within_the_bound() {
    for [m, k, n] in SHAPES {
        let (a, b, c) = (random([m, k], 1, 1.0), random([k, n], 2, 1.0), random([m, n], 3, 1.0));
        let expected = wide(&a).dot(&wide(&b));
        // k products and k sums, each rounded, and the multiplication by alpha = 1.
        let bound = wide(&a).mapv(f64::abs).dot(&wide(&b).mapv(f64::abs)) * ((k + 2) as f64 * U);
        for (a, b) in [
            (a.clone(), b.clone()),
            (column_major(&a), b.clone()),
            (a.clone(), column_major(&b)),
            (column_major(&a), column_major(&b)),
        ] {
            let [overwritten, added] = any_threads(|| {
                let mut outputs = [poison([m, n]), c.clone()];
                matmul(a.view(), b.view(), outputs[0].view_mut(), Accumulate::Overwrite).unwrap();
                matmul(a.view(), b.view(), outputs[1].view_mut(), Accumulate::Add).unwrap();
                outputs
            });
            assert_close("overwritten", overwritten.view(), &expected, &bound);
            let sum = wide(&c) + &expected;
            let bound = &bound
                + &((sum.mapv(f64::abs) + &wide(&c).mapv(f64::abs)) * (k as f64 / 256.0 + 2.0) * U);
            assert_close("added", added.view(), &sum, &bound);
        }
    }
}

#[test]
fn small_integers_and_the_identity_are_exact() {
    for [m, k, n] in SHAPES {
        let a = random([m, k], 4, 8.0).mapv(f32::round);
        let b = random([k, n], 5, 8.0).mapv(f32::round);
        let mut c = poison([m, n]);
        matmul(a.view(), b.view(), c.view_mut(), Accumulate::Overwrite).unwrap();
        assert_eq!(c, a.dot(&b));
        let mut same = poison([m, k]);
        matmul(a.view(), Array2::eye(k).view(), same.view_mut(), Accumulate::Overwrite).unwrap();
        assert_eq!(same, a);
    }
}

#[test]
fn scattered_operands_are_copied() {
    let (a, b) = (random([40, 60], 6, 1.0), random([60, 80], 7, 1.0));
    let mut c = poison([40, 80]);
    let (a, b) = (a.slice(s![..;2, 5..25]), b.slice(s![10..30, ..;-3]));
    matmul(a, b, c.slice_mut(s![..20, 3..30]), Accumulate::Overwrite).unwrap();
    let mut contiguous = poison([20, 27]);
    let owned = (a.as_standard_layout().into_owned(), b.as_standard_layout().into_owned());
    matmul(owned.0.view(), owned.1.view(), contiguous.view_mut(), Accumulate::Overwrite).unwrap();
    assert_eq!(c.slice(s![..20, 3..30]), contiguous);
    assert_eq!(
        c.iter().filter(|x| x.is_nan()).count(),
        40 * 80 - 20 * 27,
        "only the slice is written"
    );
}

#[test]
fn empty_products() {
    for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
        for [m, k, n] in [[0, 3, 4], [4, 3, 0], [0, 0, 0], [3, 0, 4], [1, 0, 1]] {
            let mut c = Array2::from_elem([m, n], 7.0);
            matmul(
                Array2::zeros([m, k]).view(),
                Array2::zeros([k, n]).view(),
                c.view_mut(),
                accumulate,
            )
            .unwrap();
            let expected = if k == 0 && accumulate == Accumulate::Overwrite { 0.0 } else { 7.0 };
            assert!(c.iter().all(|&x| x == expected), "[{m}, {k}, {n}]");
        }
    }
}

#[test]
fn nan_reaches_its_row_only() {
    let (mut a, b) = (random([70, 20], 8, 1.0), random([20, 30], 9, 1.0));
    a[[65, 3]] = f32::NAN;
    let mut c = poison([70, 30]);
    matmul(a.view(), b.view(), c.view_mut(), Accumulate::Overwrite).unwrap();
    assert!(c.indexed_iter().all(|((row, _), x)| x.is_nan() == (row == 65)));
}

#[test]
fn shape_errors_name_the_operand() {
    for (b, c, operand, expected, found) in
        [([4, 5], [2, 5], "b", [3, 5], [4, 5]), ([3, 5], [5, 2], "c", [2, 5], [5, 2])]
    {
        let (a, b, mut c) = (Array2::zeros([2, 3]), Array2::zeros(b), Array2::zeros(c));
        let error = matmul(a.view(), b.view(), c.view_mut(), Accumulate::Overwrite).unwrap_err();
        assert_eq!(error, Error::Shape { operation: "matmul", operand, expected, found });
        let message = error.to_string();
        assert!(message.contains(operand) && message.contains(&format!("{found:?}")), "{message}");
    }
}
