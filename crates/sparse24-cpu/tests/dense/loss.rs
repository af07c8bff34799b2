//! Cross-entropy against f64 and its gradient against the f64 softmax.

use ndarray::Array2;
use sparse24_cpu::{
    Error,
    loss::{Loss, head_loss, loss_forward},
};

use crate::check::{
    NUMERIC, U, any_threads, assert_close, numeric_gradient, one_number, random, tokens, wide,
};

fn naive(logits: &Array2<f64>, targets: &[u32], ignore: Option<u32>, smoothing: f64) -> f64 {
    let rows =
        logits.rows().into_iter().zip(targets).filter(|&(_, &target)| Some(target) != ignore);
    rows.map(|(row, &target)| {
        let lse = row.mapv(f64::exp).sum().ln();
        lse - (1.0 - smoothing) * row[target as usize] - smoothing * row.mean().unwrap()
    })
    .sum()
}

#[test]
fn loss_and_gradient_are_within_their_bounds() {
    for [p, v] in [[1, 1], [7, 5], [40, 65], [3, 1000]] {
        for (ignore, smoothing) in [(None, 0.0), (Some(2), 0.1), (Some(u32::MAX), 0.0)] {
            let (logits, mut targets, scale) =
                (random([p, v], 1, 4.0), tokens(p, 2, v as u32), 0.25);
            if ignore == Some(u32::MAX) {
                targets[0] = u32::MAX;
            }
            let loss = loss_forward(logits.view(), &targets, ignore, smoothing).unwrap();
            let [gradient, sum] = any_threads(|| {
                let mut gradient = logits.clone();
                let loss =
                    head_loss(gradient.view_mut(), &targets, ignore, smoothing, scale).unwrap();
                [gradient, one_number(loss.sum)]
            });
            assert_eq!(sum.mapv(f32::to_bits), one_number(loss.sum).mapv(f32::to_bits));
            let counted = targets.iter().filter(|&&target| Some(target) != ignore).count();
            assert_eq!(loss.count, counted as u64);
            let (wide_logits, smoothing) = (wide(&logits), f64::from(smoothing));
            // In a row, differences of logits have error 8u, exponentials relatively that and 4u,
            // their sum v/16 + 6 more, and so has the sum of differences, which are below 8.
            let sum_error = (v as f64 / 16.0 + 18.0) * U;
            let expected = naive(&wide_logits, &targets, ignore, smoothing);
            assert!(
                (loss.sum - expected).abs() <= p as f64 * (9.0 * sum_error + 8.0 * U),
                "{} and {expected}",
                loss.sum
            );
            let expected = numeric_gradient(&wide_logits, |logits| {
                f64::from(scale) * naive(logits, &targets, ignore, smoothing)
            });
            assert_close(
                "dlogits",
                gradient.view(),
                &expected,
                &expected.mapv(|_| f64::from(scale) * (sum_error + 16.0 * U) + NUMERIC * p as f64),
            );
        }
    }
}

#[test]
fn huge_and_non_finite_logits() {
    let mut logits = ndarray::arr2(&[[1e30f32, -1e30, 0.0]]);
    let loss = head_loss(logits.view_mut(), &[0], None, 0.0, 1.0).unwrap();
    assert_eq!((loss.sum, logits), (0.0, Array2::zeros([1, 3])));
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = ndarray::arr2(&[[bad, 0.0, 0.0]]);
        let loss = head_loss(logits.view_mut(), &[1], None, 0.0, 1.0).unwrap();
        assert!(
            !loss.sum.is_finite() && logits.iter().any(|x| !x.is_finite()),
            "{bad}: {loss:?} {logits}"
        );
    }
    assert_eq!(
        head_loss(Array2::zeros([2, 0]).view_mut(), &[7, 7], Some(7), 0.0, 1.0).unwrap(),
        Loss::default()
    );
    assert_eq!(
        head_loss(Array2::zeros([0, 3]).view_mut(), &[], None, 0.0, 1.0).unwrap(),
        Loss::default()
    );
}

#[test]
fn bad_targets_are_errors() {
    let logits = Array2::zeros([3, 5]);
    let error = loss_forward(logits.view(), &[1, 5, 2], Some(2), 0.0).unwrap_err();
    assert!(matches!(error, Error::Token { token: 5, position: 1, vocabulary: 5, .. }), "{error}");
    assert!(error.to_string().contains("token 5 at position 1"), "{error}");
    let error = loss_forward(logits.view(), &[1], None, 0.0).unwrap_err();
    assert!(matches!(error, Error::Shape { operand: "targets", expected: [3, 1], .. }), "{error}");
    let gaps = logits.slice(ndarray::s![.., 1..]);
    let error = loss_forward(gaps, &[1, 0, 1], None, 0.0).unwrap_err();
    assert!(matches!(error, Error::Layout { operand: "logits", .. }), "{error}");
}
