//! Softmax cross-entropy over a vocabulary and squared error, with their gradients in place.

use ndarray::ArrayViewMut2;
use rayon::prelude::*;

use crate::{Error, check, math, simd::vectorised};

/// Rows per task.
const ROWS: usize = 16;

/// The summed loss of all rows, in nats; overwrites the logits with their gradient.
///
/// With q = softmax(logits) and t = (1 - smoothing) * one-hot(target) + smoothing / V: loss =
/// -sum(t * ln q), dlogits = scale * (q - t). A row whose target is `ignore` adds no loss and gets
/// zeros. Rows are added in order. logits `[p, V]`, row-major; p targets. A NaN or infinite logit
/// makes its row's loss NaN or infinite.
///
/// # Errors
/// [`Error::Shape`] unless there is one target per row; [`Error::Token`] for a target outside V
/// that is not `ignore`; [`Error::Layout`] if the logits are not contiguous.
pub fn head_loss(
    logits: ArrayViewMut2<'_, f32>,
    targets: &[u32],
    ignore: Option<u32>,
    smoothing: f32,
    scale: f32,
) -> Result<f64, Error> {
    let (p, v) = logits.dim();
    check::shape("head_loss", "targets", [p, 1], [targets.len(), 1])?;
    check::tokens("head_loss", targets, ignore, v)?;
    let rows = check::elements_mut("head_loss", "logits", logits)?.par_chunks_mut(ROWS * v.max(1));
    let losses = rows.zip(targets.par_chunks(ROWS)).map(|(rows, targets)| {
        let mut loss = 0.0;
        vectorised(
            #[inline(always)]
            || {
                for (row, &target) in rows.chunks_exact_mut(v).zip(targets) {
                    if Some(target) == ignore {
                        row.fill(0.0);
                        continue;
                    }
                    let target = target as usize;
                    let maximum = math::maximum(row);
                    let sum = math::sum(row, |x| math::exp(x - maximum));
                    let below = math::sum(row, |x| x - maximum);
                    let even = f64::from(smoothing);
                    let expected = (1.0 - even) * f64::from(row[target] - maximum)
                        + even * f64::from(below) / v as f64;
                    loss += f64::from(sum).ln() - expected;
                    let (inverse, floor) = (scale / sum, scale * smoothing / v as f32);
                    for value in row.iter_mut() {
                        *value = math::exp(*value - maximum) * inverse - floor;
                    }
                    row[target] -= scale * (1.0 - smoothing);
                }
            },
        );
        loss
    });
    let losses: Vec<f64> = losses.collect();
    Ok(losses.into_iter().fold(0.0, |sum, loss| sum + loss))
}

/// The summed squared error of one column of outputs; overwrites them with their gradient.
///
/// loss = sum (z - t)^2 and dz = 2 scale (z - t), where a target has the bits of t. A row whose
/// target is `ignore` adds no loss and gets zero. Rows are added in order. z `[p, 1]`.
///
/// # Errors
/// [`Error::Shape`] unless there are one column and one target per row; [`Error::Layout`] if the
/// outputs are not contiguous.
pub fn squared_error(
    z: ArrayViewMut2<'_, f32>,
    targets: &[u32],
    ignore: Option<u32>,
    scale: f32,
) -> Result<f64, Error> {
    check::shape("squared_error", "z", [targets.len(), 1], z.dim().into())?;
    let mut sum = 0.0;
    for (z, &target) in check::elements_mut("squared_error", "z", z)?.iter_mut().zip(targets) {
        let difference = if Some(target) == ignore { 0.0 } else { *z - f32::from_bits(target) };
        sum += f64::from(difference) * f64::from(difference);
        *z = 2.0 * scale * difference;
    }
    Ok(sum)
}
