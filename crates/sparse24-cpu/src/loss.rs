//! Softmax cross-entropy over a vocabulary, with its gradient in place.

use ndarray::{ArrayView2, ArrayViewMut2};
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
/// With q = softmax(logits) and t = (1 - smoothing) * one-hot(target) + smoothing / V: loss =
/// -sum(t * ln q), dlogits = scale * (q - t). A row whose target is `ignore` costs nothing and gets
/// zeros. logits `[p, V]`, row-major; p targets. A NaN or an infinite logit makes its row's loss
/// NaN or infinite.
///
/// # Errors
/// [`Error::Shape`] unless there is one target a row; [`Error::Token`] for a target outside of V
/// that is not `ignore`; [`Error::Layout`] if the logits have gaps.
pub fn head_loss(
    logits: ArrayViewMut2<'_, f32>,
    targets: &[u32],
    ignore: Option<u32>,
    smoothing: f32,
    scale: f32,
) -> Result<Loss, Error> {
    let [_, v] = check("head_loss", shape::of(&logits), targets, ignore)?;
    let rows = shape::elements_mut("head_loss", "logits", logits)?.par_chunks_mut(ROWS * v.max(1));
    let losses = rows.zip(targets.par_chunks(ROWS)).map(|(rows, targets)| {
        let mut loss = Loss::default();
        math::vectorised(
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
    Ok(total(losses.collect()))
}

/// The loss of [`head_loss`] without the gradient.
///
/// # Errors
/// As [`head_loss`].
pub fn loss_forward(
    logits: ArrayView2<'_, f32>,
    targets: &[u32],
    ignore: Option<u32>,
    smoothing: f32,
) -> Result<Loss, Error> {
    let [_, v] = check("loss_forward", shape::of(&logits), targets, ignore)?;
    let rows = shape::elements("loss_forward", "logits", logits)?.par_chunks(ROWS * v.max(1));
    let losses = rows.zip(targets.par_chunks(ROWS)).map(|(rows, targets)| {
        let mut loss = Loss::default();
        math::vectorised(
            #[inline(always)]
            || {
                for (row, &target) in rows.chunks_exact(v).zip(targets) {
                    if Some(target) != ignore {
                        loss.add(terms(row), row[target as usize], smoothing, v);
                    }
                }
            },
        );
        loss
    });
    Ok(total(losses.collect()))
}

/// The shape of the logits, which the targets fit.
fn check(
    operation: &'static str,
    [p, v]: [usize; 2],
    targets: &[u32],
    ignore: Option<u32>,
) -> Result<[usize; 2], Error> {
    shape::check(operation, "targets", [p, 1], [targets.len(), 1])?;
    shape::check_tokens(operation, targets, ignore, v)?;
    Ok([p, v])
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
        let expected = (1.0 - smoothing) * f64::from(target - terms.maximum)
            + smoothing * f64::from(terms.below) / vocabulary as f64;
        self.sum += f64::from(terms.sum).ln() - expected;
        self.count += 1;
    }
}

fn total(losses: Vec<Loss>) -> Loss {
    losses
        .into_iter()
        .fold(Loss::default(), |a, b| Loss { sum: a.sum + b.sum, count: a.count + b.count })
}
