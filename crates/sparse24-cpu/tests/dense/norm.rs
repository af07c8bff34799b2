//! The residual sum and LayerNorm against f64, and their gradient against central differences.

use ndarray::{Array1, Array2, Axis};
use sparse24_core::op::Accumulate;
use sparse24_cpu::{
    Error,
    norm::{EPSILON, norm_backward, norm_forward},
};

use crate::check::{NUMERIC, U, any_threads, assert_close, numeric_gradient, poison, random, wide};

fn naive(x: &Array2<f64>, gamma: &Array1<f64>, beta: &Array1<f64>) -> Array2<f64> {
    let mean = x.mean_axis(Axis(1)).unwrap().insert_axis(Axis(1));
    let centered = x - &mean;
    let variance = centered.mapv(|x| x * x).mean_axis(Axis(1)).unwrap().insert_axis(Axis(1));
    centered / variance.mapv(|v| (v + f64::from(EPSILON)).sqrt()) * gamma + beta
}

fn vector(length: usize, seed: u64) -> Array1<f32> {
    random([1, length], seed, 1.0).row(0).to_owned()
}

#[test]
fn forward_is_within_the_bound() {
    for [p, c] in [[1, 1], [5, 7], [100, 128], [33, 1000]] {
        let (x, delta) = (random([p, c], 1, 2.0), random([p, c], 2, 2.0));
        let (gamma, beta) = (vector(c, 3), vector(c, 4));
        for (delta, beta) in [(Some(&delta), Some(&beta)), (None, None)] {
            let [residual, y, stats] = any_threads(|| {
                let mut outputs = [poison([p, c]), poison([p, c]), poison([p, 2])];
                let [residual, y, stats] = outputs.each_mut().map(|x| x.view_mut());
                norm_forward(
                    x.view(),
                    delta.map(|d| d.view()),
                    gamma.view(),
                    beta.map(|b| b.view()),
                    residual,
                    y,
                    stats,
                )
                .unwrap();
                outputs
            });
            assert_eq!(residual, delta.map_or(x.clone(), |delta| &x + delta));
            let zero = Array1::zeros(c);
            let expected = naive(
                &wide(&residual),
                &gamma.mapv(f64::from),
                &beta.unwrap_or(&zero).mapv(f64::from),
            );
            // Values below 4. Mean: e = (c/16 + 8) u * 4. Deviation: e + 8u. Variance: relative
            // (c/16 + 12) u and 2 e sd, so rstd half of it and 3u more. y: gamma, rstd and two
            // products.
            let bound = Array2::from_shape_fn([p, c], |(row, column)| {
                let rstd = f64::from(stats[[row, 1]]);
                let sum = (c as f64 / 16.0 + 12.0) * U;
                let (deviation, gamma) = (4.0 * sum + 8.0 * U, f64::from(gamma[column]).abs());
                let normal = (f64::from(residual[[row, column]] - stats[[row, 0]]) * rstd).abs();
                gamma * (rstd * deviation + normal * (sum + rstd * deviation + 4.0 * U))
                    + 2.0 * U * (1.0 + gamma * normal)
                    + 1e-30
            });
            assert_close("y", y.view(), &expected, &bound);
        }
    }
}

#[test]
fn backward_is_the_gradient_of_the_forward() {
    for [p, c] in [[1, 4], [5, 7], [3, 40], [70, 3]] {
        let (x, dy, above) =
            (random([p, c], 5, 1.0), random([p, c], 6, 1.0), random([p, c], 7, 1.0));
        let (gamma, held) = (vector(c, 8), random([1, c], 9, 1.0));
        let (mut y, mut stats, mut residual) = (poison([p, c]), poison([p, 2]), poison([p, c]));
        norm_forward(
            x.view(),
            None,
            gamma.view(),
            None,
            residual.view_mut(),
            y.view_mut(),
            stats.view_mut(),
        )
        .unwrap();
        let run = |into: [Array2<f32>; 3], accumulate_dx, accumulate| {
            any_threads(|| {
                let mut outputs = into.clone();
                let [dx, dgamma, dbeta] = &mut outputs;
                norm_backward(
                    dy.view(),
                    x.view(),
                    stats.view(),
                    gamma.view(),
                    dx.view_mut(),
                    accumulate_dx,
                    dgamma.row_mut(0),
                    Some(dbeta.row_mut(0)),
                    accumulate,
                )
                .unwrap();
                outputs
            })
        };
        let (add, overwrite) = (Accumulate::Add, Accumulate::Overwrite);
        let [dx_added, dgamma, dbeta] =
            run([above.clone(), poison([1, c]), poison([1, c])], add, overwrite);
        let [dx_alone, dgamma_added, dbeta_added] =
            run([poison([p, c]), held.clone(), held.clone()], overwrite, add);
        let (dy, wide_gamma) = (wide(&dy), gamma.mapv(f64::from));
        let zero = Array1::zeros(c);
        let loss = |x: &Array2<f64>, gamma: &Array1<f64>, beta: &Array1<f64>| {
            (naive(x, gamma, beta) * &dy).sum()
        };
        let dx = numeric_gradient(&wide(&x), |x| loss(x, &wide_gamma, &zero));
        let matrix = wide_gamma.clone().insert_axis(Axis(0));
        let expected_gamma =
            numeric_gradient(&matrix, |gamma| loss(&wide(&x), &gamma.row(0).to_owned(), &zero));
        let expected_beta = dy.sum_axis(Axis(0)).insert_axis(Axis(0));
        // Inputs and dy are below 1, so normals are below sqrt(c) and every one of the at most c/16
        // + 24 operations errs by u times rstd (1 + |n| + n^2), twice where the normal itself is
        // off.
        let bound = Array2::from_shape_fn([p, c], |(row, column)| {
            let rstd = f64::from(stats[[row, 1]]);
            let normal = (f64::from(x[[row, column]] - stats[[row, 0]]) * rstd).abs();
            (c as f64 / 16.0 + 24.0) * U * rstd * (1.0 + rstd) * (1.0 + normal) * 2.0
                + NUMERIC * (1.0 + rstd.powi(3))
                + U
        });
        assert_close("dx", dx_alone.view(), &dx, &bound);
        assert_close("dx, added", dx_added.view(), &(wide(&above) + dx), &bound);
        let largest = stats.column(1).iter().fold(1.0, |a: f64, &b| a.max(f64::from(b)));
        let bound = Array2::from_elem(
            [1, c],
            (p as f64 + 16.0) * p as f64 * U * 2.0 * largest + NUMERIC * p as f64,
        );
        assert_close("dgamma", dgamma.view(), &expected_gamma, &bound);
        assert_close("dbeta", dbeta.view(), &expected_beta, &bound);
        assert_close("dgamma, added", dgamma_added.view(), &(wide(&held) + expected_gamma), &bound);
        assert_close("dbeta, added", dbeta_added.view(), &(wide(&held) + expected_beta), &bound);
    }
}

#[test]
fn no_rows_give_no_gradient() {
    let (empty, stats, mut dgamma) = (Array2::zeros([0, 3]), Array2::zeros([0, 2]), vector(3, 1));
    let gamma = vector(3, 2);
    norm_backward(
        empty.view(),
        empty.view(),
        stats.view(),
        gamma.view(),
        empty.clone().view_mut(),
        Accumulate::Add,
        dgamma.view_mut(),
        None,
        Accumulate::Overwrite,
    )
    .unwrap();
    assert_eq!(dgamma, Array1::<f32>::zeros(3));
}

#[test]
fn shape_errors_name_the_operand() {
    let (x, gamma) = (Array2::zeros([2, 3]), vector(4, 1));
    let [mut residual, mut y, mut stats] = [poison([2, 3]), poison([2, 3]), poison([2, 2])];
    let error = norm_forward(
        x.view(),
        None,
        gamma.view(),
        None,
        residual.view_mut(),
        y.view_mut(),
        stats.view_mut(),
    )
    .unwrap_err();
    assert!(matches!(error, Error::Shape { operand: "gamma", expected: [1, 3], .. }), "{error}");
}
