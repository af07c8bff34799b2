//! Cross-entropy against f64 and its gradient against the f64 softmax.

use ndarray::Array2;
use sparse24_cpu::{
    Error,
    loss::{Loss, head_loss, loss_forward},
};

use crate::check::{NUMERIC, U, any_threads, assert_close, numeric_gradient, random, tokens, wide};

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
fn loss_and_gradient_lie_within_their_bounds() {
    for [p, v] in [[1, 1], [7, 5], [40, 65], [3, 1000]] {
        for (ignore, smoothing) in [(None, 0.0), (Some(2), 0.1), (Some(u32::MAX), 0.0)] {
            let (logits, mut targets, scale) =
                (random([p, v], 1, 4.0), tokens(p, 2, v as u32), 0.25);
            if ignore == Some(u32::MAX) {
                targets[0] = u32::MAX;
            }
            let [gradient, sums] = any_threads(|| {
                let mut gradient = logits.clone();
                let loss =
                    head_loss(gradient.view_mut(), &targets, ignore, smoothing, scale).unwrap();
                let forward = loss_forward(logits.view(), &targets, ignore, smoothing).unwrap();
                assert_eq!(loss, forward);
                let bits = loss.sum.to_bits();
                [
                    gradient,
                    ndarray::arr2(&[[
                        f32::from_bits(bits as u32),
                        f32::from_bits((bits >> 32) as u32),
                    ]]),
                ]
            });
            let loss = Loss {
                sum: f64::from_bits(
                    u64::from(sums[[0, 0]].to_bits()) | u64::from(sums[[0, 1]].to_bits()) << 32,
                ),
                count: targets.iter().filter(|&&target| Some(target) != ignore).count() as u64,
            };
            let again = loss_forward(logits.view(), &targets, ignore, smoothing).unwrap();
            assert_eq!(again, loss);
            let (wide_logits, smoothing) = (wide(&logits), f64::from(smoothing));
            // A row: differences of logits round by 8u, exponentials relatively by that and 4u,
            // their sum by v/16 + 6 more, as does the sum of differences, which are below 8.
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
fn hostile_logits_show_in_the_loss() {
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
fn bad_targets_are_named() {
    let error = loss_forward(Array2::zeros([3, 5]).view(), &[1, 5, 2], Some(2), 0.0).unwrap_err();
    assert_eq!(
        error,
        Error::Token { operation: "loss_forward", token: 5, position: 1, vocabulary: 5 }
    );
    assert_eq!(
        error.to_string(),
        "loss_forward: token 5 at position 1 is outside of the vocabulary of 5"
    );
    let error = loss_forward(Array2::zeros([3, 5]).view(), &[1], None, 0.0).unwrap_err();
    assert_eq!(
        error,
        Error::Shape {
            operation: "loss_forward",
            operand: "targets",
            expected: [3, 1],
            found: [1, 1]
        }
    );
    let error =
        loss_forward(Array2::zeros([3, 5]).slice(ndarray::s![.., 1..]), &[1, 0, 1], None, 0.0)
            .unwrap_err();
    assert_eq!(error.to_string(), "loss_forward: logits is not row-major contiguous");
}
