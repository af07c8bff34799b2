//! AdamW with masked decay on gradients or on weights, and the norm for clipping.
//!
//! Elementwise over flat row-major parameters, so the bits depend on no thread count. Source:
//! Loshchilov and Hutter, arXiv 1711.05101; masked decay: the paper's equations for gradients and
//! for SR-STE.

use rayon::prelude::*;
use sparse24_core::Mask;

use crate::{Error, math, shape};

/// One step's scalars, the same for every parameter but `weight_decay`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay; 0 for parameters that are not matrices.
    pub weight_decay: f32,
    /// 1 - beta1^t, t = 1 in the first step.
    pub bias_correction1: f32,
    /// 1 - beta2^t.
    pub bias_correction2: f32,
    /// Multiplies every gradient: clipping and unscaling.
    pub gradient_scale: f32,
}

/// Where pruned weights are pulled to zero.
#[derive(Debug, Clone, Copy)]
pub enum Decay<'a> {
    /// Nowhere.
    None,
    /// g + lambda * (not m) * w, after scaling and before the moments.
    OnGradients {
        /// The decay factor.
        lambda: f32,
        /// The mask of the forward.
        mask: &'a Mask,
    },
    /// w - learning rate * lambda * (not m) * w, beside Adam's step.
    OnWeights {
        /// The decay factor, on another scale than that on gradients.
        lambda: f32,
        /// The mask of the forward.
        mask: &'a Mask,
    },
}

/// Elements of one task, a multiple of what a stack buffer holds.
const TASK: usize = 16 * 1024;

/// One optimizer step over a matrix of `columns` columns (any divisor of the length if there is no
/// mask), in this order, every operation rounded:
///
/// ```text
/// g' = g * gradient_scale                      g' = g' + decay_g * w        decay_g = lambda where pruned (on gradients), else 0
/// m  = beta1 * m + (1 - beta1) * g'            v  = beta2 * v + (1 - beta2) * g' * g'
/// u  = (m * (1 / bias_correction1)) / (sqrt(v * (1 / bias_correction2)) + epsilon)
/// w  = w - learning_rate * (u + decay_w * w)   decay_w = weight_decay + lambda where pruned (on weights), else weight_decay
/// ```
///
/// # Errors
/// [`Error::Shape`] unless g, m and v are as long as w, and the mask, if any, covers it.
pub fn adamw_step(
    w: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    columns: usize,
    rule: &AdamW,
    decay: Decay<'_>,
) -> Result<(), Error> {
    const OPERATION: &str = "adamw_step";
    let length = w.len();
    for (operand, found) in [("g", g.len()), ("m", m.len()), ("v", v.len())] {
        shape::check(OPERATION, operand, [1, length], [1, found])?;
    }
    let (mask, on_gradients, on_weights) = match decay {
        Decay::None => (None, 0.0, 0.0),
        Decay::OnGradients { lambda, mask } => (Some(mask), lambda, 0.0),
        Decay::OnWeights { lambda, mask } => (Some(mask), 0.0, lambda),
    };
    if let Some(mask) = mask {
        shape::check(OPERATION, "mask", [length / columns.max(1), columns], mask.shape())?;
    }
    let rows = w
        .par_chunks_mut(TASK)
        .zip(g.par_chunks(TASK))
        .zip(m.par_chunks_mut(TASK).zip(v.par_chunks_mut(TASK)));
    rows.enumerate().for_each(|(i, ((w, g), (m, v)))| {
        math::vectorised(
            #[inline(always)]
            || match mask {
                None => update(w, g, m, v, rule, |_| (0.0, rule.weight_decay)),
                Some(mask) => {
                    const PIECE: usize = 256;
                    let pieces = w
                        .chunks_mut(PIECE)
                        .zip(g.chunks(PIECE))
                        .zip(m.chunks_mut(PIECE).zip(v.chunks_mut(PIECE)));
                    for (j, ((w, g), (m, v))) in pieces.enumerate() {
                        let pruned = pruned::<PIECE>(mask, i * TASK + j * PIECE, w.len());
                        update(w, g, m, v, rule, |at| {
                            (on_gradients * pruned[at], rule.weight_decay + on_weights * pruned[at])
                        });
                    }
                }
            },
        );
    });
    Ok(())
}

/// The step on a run of elements; `decay` gives the two factors of an element.
#[inline(always)]
fn update(
    w: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    rule: &AdamW,
    decay: impl Fn(usize) -> (f32, f32),
) {
    let (inverse1, inverse2) = (1.0 / rule.bias_correction1, 1.0 / rule.bias_correction2);
    for (at, (((w, &g), m), v)) in w.iter_mut().zip(g).zip(m).zip(v).enumerate() {
        let (on_gradient, on_weight) = decay(at);
        let g = g * rule.gradient_scale + on_gradient * *w;
        *m = rule.beta1 * *m + (1.0 - rule.beta1) * g;
        *v = rule.beta2 * *v + (1.0 - rule.beta2) * g * g;
        let step = (*m * inverse1) / ((*v * inverse2).sqrt() + rule.epsilon);
        *w -= rule.learning_rate * (step + on_weight * *w);
    }
}

/// 1 for pruned elements from flat index `first` on, 0 for kept ones; `first` and `length` are
/// multiples of 4.
#[inline(always)]
fn pruned<const N: usize>(mask: &Mask, first: usize, length: usize) -> [f32; N] {
    /// The factors of four mask bits.
    const GROUPS: [[f32; 4]; 16] = {
        let mut groups = [[0.0; 4]; 16];
        let mut i = 0;
        while i < 64 {
            groups[i / 4][i % 4] = if (i / 4) >> (i % 4) & 1 == 1 { 0.0 } else { 1.0 };
            i += 1;
        }
        groups
    };
    let mut factors = [0.0; N];
    let columns = mask.columns();
    let (mut row, mut column) = (first / columns, first % columns);
    for group in factors[..length].as_chunks_mut::<4>().0 {
        let bits = mask.tiles()[row / 4 * (columns / 4) + column / 4] >> (row % 4 * 4) & 15;
        *group = GROUPS[usize::from(bits)];
        column += 4;
        if column == columns {
            (row, column) = (row + 1, 0);
        }
    }
    factors
}

/// The sum of squares, in f64: each square exact, 16 running sums within blocks of 16384 elements,
/// the blocks in order.
#[must_use]
pub fn squared_norm(g: &[f32]) -> f64 {
    let blocks: Vec<f64> = g
        .par_chunks(TASK)
        .map(|block| {
            math::vectorised(
                #[inline(always)]
                || squares(block),
            )
        })
        .collect();
    blocks.into_iter().sum()
}

#[inline(always)]
fn squares(block: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 16];
    let (whole, rest) = block.as_chunks::<16>();
    for chunk in whole {
        for (lane, &g) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(g) * f64::from(g);
        }
    }
    for (lane, &g) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(g) * f64::from(g);
    }
    lanes.iter().sum()
}

/// sum |a - b|, in f64: each difference exact to 2^-53, summed as [`squared_norm`] sums.
///
/// # Errors
/// [`Error::Shape`] unless they are of one length.
pub fn l1_distance(a: &[f32], b: &[f32]) -> Result<f64, Error> {
    shape::check("l1 distance", "b", [1, a.len()], [1, b.len()])?;
    let blocks: Vec<f64> = (a.par_chunks(TASK).zip(b.par_chunks(TASK)))
        .map(|(a, b)| {
            math::vectorised(
                #[inline(always)]
                || differences(a, b),
            )
        })
        .collect();
    Ok(blocks.into_iter().sum())
}

#[inline(always)]
fn differences(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 16];
    for (a, b) in a.chunks(16).zip(b.chunks(16)) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += (f64::from(a) - f64::from(b)).abs();
        }
    }
    lanes.iter().sum()
}
