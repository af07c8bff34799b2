//! Softmax cross-entropy over a vocabulary, with its gradient in place.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::{Error, math, shape};

/// The sum of the losses of the rows that count, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// Sum over rows, in row order.
    pub sum: f64,
    /// Rows whose target is not ignored.
    pub count: u64,
}

/// Rows of one task.
const ROWS: usize = 16;

/// The loss of each row against its target, and its gradient over the logits, which it overwrites.
///
/// With q = softmax(logits) and t = (1 - smoothing) * one-hot(target) + smoothing / V: loss = -sum(t * ln q), dlogits = scale * (q - t).
/// A row whose target is `ignore` costs nothing and gets zeros. logits `[p, V]`, row-major; p targets. A NaN or an infinite
/// logit makes its row's loss NaN or infinite.
///
/// # Errors
/// [`Error::Shape`] unless there is one target a row; [`Error::Token`] for a target outside of V that is not `ignore`.
pub fn head_loss(
    mut logits: ArrayViewMut2<'_, f32>,
    targets: &[u32],
    ignore: Option<u32>,
    smoothing: f32,
    scale: f32,
) -> Result<Loss, Error> {
    check("head_loss", shape::of(&logits), targets, ignore)?;
    let tasks: Vec<_> = logits.axis_chunks_iter_mut(Axis(0), ROWS).zip(targets.chunks(ROWS)).collect();
    Ok(total(
        tasks
            .into_par_iter()
            .map(|(mut logits, targets)| {
                math::vectorised(
                    #[inline(always)]
                    || {
                        let mut loss = Loss::default();
                        for (mut row, &target) in logits.rows_mut().into_iter().zip(targets) {
                            let row = row.as_slice_mut().expect("row-major");
                            if Some(target) == ignore {
                                row.fill(0.0);
                                continue;
                            }
                            let terms = terms(row);
                            loss.add(terms, row[target as usize], smoothing, row.len());
                            let (inverse, floor) = (scale / terms.sum, scale * smoothing / row.len() as f32);
                            for value in row.iter_mut() {
                                *value = math::exp(*value - terms.maximum) * inverse - floor;
                            }
                            row[target as usize] -= scale * (1.0 - smoothing);
                        }
                        loss
                    },
                )
            })
            .collect(),
    ))
}

/// The loss of [`head_loss`] without the gradient.
///
/// # Errors
/// As [`head_loss`].
pub fn loss_forward(logits: ArrayView2<'_, f32>, targets: &[u32], ignore: Option<u32>, smoothing: f32) -> Result<Loss, Error> {
    check("loss_forward", shape::of(&logits), targets, ignore)?;
    let tasks: Vec<_> = logits.axis_chunks_iter(Axis(0), ROWS).zip(targets.chunks(ROWS)).collect();
    Ok(total(
        tasks
            .into_par_iter()
            .map(|(logits, targets)| {
                math::vectorised(
                    #[inline(always)]
                    || {
                        let mut loss = Loss::default();
                        for (row, &target) in logits.rows().into_iter().zip(targets) {
                            if Some(target) != ignore {
                                let row = row.as_slice().expect("row-major");
                                loss.add(terms(row), row[target as usize], smoothing, row.len());
                            }
                        }
                        loss
                    },
                )
            })
            .collect(),
    ))
}

fn check(operation: &'static str, [p, v]: [usize; 2], targets: &[u32], ignore: Option<u32>) -> Result<(), Error> {
    shape::check(operation, "targets", [p, 1], [targets.len(), 1])?;
    shape::check_tokens(operation, targets, ignore, v)
}

/// What a row's loss is made of.
#[derive(Clone, Copy)]
struct Terms {
    maximum: f32,
    /// Sum of e^(logit - maximum).
    sum: f32,
    /// Sum of logit - maximum.
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
        let expected = (1.0 - smoothing) * f64::from(target - terms.maximum) + smoothing * f64::from(terms.below) / vocabulary as f64;
        self.sum += f64::from(terms.sum).ln() - expected;
        self.count += 1;
    }
}

fn total(losses: Vec<Loss>) -> Loss {
    losses.into_iter().fold(Loss::default(), |a, b| Loss { sum: a.sum + b.sum, count: a.count + b.count })
}
