//! Softmax cross-entropy over a vocabulary, with its gradient in place.

use ndarray::ArrayViewMut2;
use rayon::prelude::*;

use crate::{Error, check, math, simd::vectorised};

/// The loss of a batch, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// Sum over the rows that count, in row order.
    pub sum: f64,
    /// Number of rows whose target is not ignored.
    pub count: u64,
}

/// Rows per task.
const ROWS: usize = 16;

/// The summed loss of all rows; overwrites the logits with their gradient.
///
/// With q = softmax(logits) and t = (1 - smoothing) * one-hot(target) + smoothing / V: loss =
/// -sum(t * ln q), dlogits = scale * (q - t). A row whose target is `ignore` adds no loss and gets
/// zeros. logits `[p, V]`, row-major; p targets. A NaN or infinite logit makes its row's loss NaN
/// or infinite.
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
) -> Result<Loss, Error> {
    let (p, v) = logits.dim();
    check::shape("head_loss", "targets", [p, 1], [targets.len(), 1])?;
    check::tokens("head_loss", targets, ignore, v)?;
    let rows = check::elements_mut("head_loss", "logits", logits)?.par_chunks_mut(ROWS * v.max(1));
    let losses = rows.zip(targets.par_chunks(ROWS)).map(|(rows, targets)| {
        let mut loss = Loss::default();
        vectorised(
            #[inline(always)]
            || {
                for (row, &target) in rows.chunks_exact_mut(v).zip(targets) {
                    if Some(target) == ignore {
                        row.fill(0.0);
                        continue;
                    }
                    let terms = terms(row);
                    loss.add(terms, row[target as usize], smoothing, v);
                    let (inverse, floor) = (scale / terms.sum, scale * smoothing / v as f32);
                    for value in row.iter_mut() {
                        *value = math::exp(*value - terms.maximum) * inverse - floor;
                    }
                    row[target as usize] -= scale * (1.0 - smoothing);
                }
            },
        );
        loss
    });
    // In the order of the rows, whatever the threads.
    let losses: Vec<Loss> = losses.collect();
    Ok(losses
        .into_iter()
        .fold(Loss::default(), |a, b| Loss { sum: a.sum + b.sum, count: a.count + b.count }))
}

/// The terms of a row's loss.
#[derive(Clone, Copy)]
struct Terms {
    maximum: f32,
    /// The sum of e^(logit - maximum).
    sum: f32,
    /// The sum of logit - maximum.
    below: f32,
}

#[inline(always)]
fn terms(row: &[f32]) -> Terms {
    let maximum = math::maximum(row);
    let sum = math::sum(row, |x| math::exp(x - maximum));
    Terms { maximum, sum, below: math::sum(row, |x| x - maximum) }
}

impl Loss {
    #[inline(always)]
    fn add(&mut self, terms: Terms, target: f32, smoothing: f32, vocabulary: usize) {
        let smoothing = f64::from(smoothing);
        let expected = (1.0 - smoothing) * f64::from(target - terms.maximum)
            + smoothing * f64::from(terms.below) / vocabulary as f64;
        self.sum += f64::from(terms.sum).ln() - expected;
        self.count += 1;
    }
}
