//! Softmax cross-entropy over a vocabulary or a sequence and squared error, with their gradients in
//! place.

use ndarray::{ArrayViewMut1, ArrayViewMut2, s};
use rayon::prelude::*;

use crate::{Error, check, math, simd::vectorized};

/// Rows per task.
const ROWS: usize = 16;

/// The second target of each row, and the share of the first.
#[derive(Debug, Clone, Copy)]
pub struct Mixed<'a> {
    /// p ids.
    pub targets: &'a [u32],
    /// p shares in `[0, 1]`.
    pub shares: &'a [f32],
}

/// The summed loss of all rows, in nats; overwrites the logits with their gradient.
///
/// With q = softmax(logits) and t = (1 - smoothing) * one-hot(target) + smoothing / V: loss =
/// -sum(t * ln q), dlogits = scale * (q - t). In a row that is mixed, share * one-hot(target) +
/// (1 - share) * one-hot(second target) takes the place of one-hot(target). A row whose target is
/// `ignore` adds no loss and gets zeros. Rows are added in order. logits `[p, V]`, row-major; p
/// targets. A NaN or infinite logit makes its row's loss NaN or infinite.
///
/// # Errors
/// [`Error::Shape`] unless there is one target per row; [`Error::Token`] for a target outside V
/// that is not `ignore`; [`Error::Layout`] if the logits are not contiguous.
pub fn head_loss(
    logits: ArrayViewMut2<'_, f32>,
    targets: &[u32],
    ignore: Option<u32>,
    smoothing: f32,
    mixed: Option<Mixed<'_>>,
    scale: f32,
) -> Result<f64, Error> {
    let (p, v) = logits.dim();
    check::shape("head_loss", "targets", [p, 1], [targets.len(), 1])?;
    check::tokens("head_loss", targets, ignore, v)?;
    if let Some(Mixed { targets, shares }) = mixed {
        check::shape("head_loss", "second targets", [p, 1], [targets.len(), 1])?;
        check::shape("head_loss", "shares", [p, 1], [shares.len(), 1])?;
        check::tokens("head_loss", targets, None, v)?;
    }
    let rows = check::elements_mut("head_loss", "logits", logits)?.par_chunks_mut(ROWS * v.max(1));
    let losses = rows.zip(targets.par_chunks(ROWS)).enumerate().map(|(task, (rows, targets))| {
        let mut loss = 0.0;
        vectorized(
            #[inline(always)]
            || {
                for (i, (row, &target)) in rows.chunks_exact_mut(v).zip(targets).enumerate() {
                    if Some(target) == ignore {
                        row.fill(0.0);
                        continue;
                    }
                    let target = target as usize;
                    let (second, share) = mixed.map_or((target, 1.0), |mixed| {
                        let at = task * ROWS + i;
                        (mixed.targets[at] as usize, mixed.shares[at])
                    });
                    let maximum = math::maximum(row);
                    let sum = math::sum(row, |x| math::exp(x - maximum));
                    let below = math::sum(row, |x| x - maximum);
                    let even = f64::from(smoothing);
                    let of = f64::from(share);
                    let wanted = of * f64::from(row[target] - maximum)
                        + (1.0 - of) * f64::from(row[second] - maximum);
                    let expected = (1.0 - even) * wanted + even * f64::from(below) / v as f64;
                    loss += f64::from(sum).ln() - expected;
                    let (inverse, floor) = (scale / sum, scale * smoothing / v as f32);
                    for value in row.iter_mut() {
                        *value = math::exp(*value - maximum) * inverse - floor;
                    }
                    row[target] -= scale * (1.0 - smoothing) * share;
                    row[second] -= scale * (1.0 - smoothing) * (1.0 - share);
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

/// The summed loss of the spans of n sequences, in nats; overwrites the logits with their gradient.
///
/// With q = softmax over the first `lengths[i]` rows of sequence i, of column 0 and of column 1:
/// loss = -(ln q_0(first) + ln q_1(last)) / 2 and dz = scale / 2 * (q - one-hot). The first target
/// of a sequence that is not `ignore` is in row `first`, and is `last`. A sequence without one adds
/// no loss; it and the rows after a length get zeros. Sequences are added in order. z `[p, 2]`; p
/// targets; n lengths.
///
/// # Errors
/// [`Error::Shape`] unless there are two columns, one target per row and p / n rows per sequence;
/// [`Error::Token`] for a span that ends, or a length that is, beyond its sequence.
pub fn span_loss(
    mut z: ArrayViewMut2<'_, f32>,
    targets: &[u32],
    lengths: &[u32],
    ignore: Option<u32>,
    scale: f32,
) -> Result<f64, Error> {
    const NAME: &str = "span_loss";
    let rows = targets.len().checked_div(lengths.len()).unwrap_or(0);
    check::shape(NAME, "targets", [rows * lengths.len(), 1], [targets.len(), 1])?;
    check::shape(NAME, "z", [targets.len(), 2], z.dim().into())?;
    check::tokens(NAME, lengths, None, rows + 1)?;
    let spans = targets.chunks(rows.max(1)).map(|targets| {
        let first = targets.iter().position(|&target| Some(target) != ignore)?;
        Some([first as u32, targets[first]])
    });
    let spans: Vec<Option<[u32; 2]>> = spans.collect();
    for (span, &length) in spans.iter().zip(lengths) {
        check::tokens(NAME, span.as_slice().as_flattened(), None, length as usize)?;
    }
    let mut sum = 0.0;
    for (i, (span, &length)) in spans.iter().zip(lengths).enumerate() {
        let (start, end) = (i * rows, i * rows + length as usize);
        for column in 0..2 {
            let loss = span.map(|span| {
                let of_tokens = z.slice_mut(s![start..end, column]);
                column_loss(of_tokens, span[column] as usize, scale / 2.0)
            });
            sum += loss.unwrap_or(0.0) / 2.0;
        }
        let from = if span.is_some() { end } else { start };
        z.slice_mut(s![from..start + rows, ..]).fill(0.0);
    }
    Ok(sum)
}

/// The cross-entropy of the softmax of a column; overwrites it with `scale` times the gradient.
fn column_loss(mut z: ArrayViewMut1<'_, f32>, target: usize, scale: f32) -> f64 {
    let mut held = z.to_vec();
    let maximum = math::maximum(&held);
    let below = f64::from(held[target] - maximum);
    held.iter_mut().for_each(|x| *x = math::exp(*x - maximum));
    let sum = math::sum(&held, |x| x);
    z.iter_mut().zip(&held).for_each(|(z, x)| *z = x * (scale / sum));
    z[target] -= scale;
    f64::from(sum).ln() - below
}
