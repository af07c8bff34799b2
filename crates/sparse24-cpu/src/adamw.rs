//! AdamW with masked decay, and the norms of an optimizer step.
//!
//! The step is elementwise over flat row-major parameters, so its bits depend on no number of
//! threads. Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019;
//! masked decay on gradients is the paper's equation 10, on weights its reading of SR-STE.

use rayon::prelude::*;
use sparse24_core::{
    Mask,
    op::{AdamW, MaskedDecay, StepState},
};

use crate::{Error, check, simd::vectorised};

/// Elements per task, a multiple of [`PIECE`].
const TASK: usize = 16 * 1024;

/// Elements whose mask bits are expanded to factors at a time.
const PIECE: usize = 256;

/// One optimizer step of a parameter, in this order, with every operation rounded:
///
/// ```text
/// g' = g * gradient_scale + decay_g * w    decay_g = lambda where pruned (on gradients), else 0
/// m  = beta1 * m + (1 - beta1) * g'
/// v  = beta2 * v + (1 - beta2) * g' * g'
/// u  = (m * (1 / bias_corrections[0])) / (sqrt(v * (1 / bias_corrections[1])) + epsilon)
/// w  = w - learning_rate * (u + decay_w * w)
///      decay_w = weight_decay + lambda where pruned (on weights), else weight_decay
/// ```
///
/// Nothing is pruned without a mask. `rule.clip` is not read: the caller turns it into
/// `gradient_scale` ([`AdamW::gradient_scale`]).
///
/// # Errors
/// [`Error::Shape`] unless g, m, v and the mask have as many elements as w.
#[expect(clippy::too_many_arguments, reason = "an equation of ten operands")]
pub fn adamw_step(
    w: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    rule: &AdamW,
    state: &StepState,
    weight_decay: f32,
    gradient_scale: f32,
    decay: MaskedDecay,
    mask: Option<&Mask>,
) -> Result<(), Error> {
    const OPERATION: &str = "adamw_step";
    for (operand, found) in [("g", g.len()), ("m", m.len()), ("v", v.len())] {
        check::shape(OPERATION, operand, [1, w.len()], [1, found])?;
    }
    if let Some(mask) = mask {
        check::shape(OPERATION, "mask", [1, w.len()], [1, 16 * mask.tiles().len()])?;
    }
    let (on_gradients, on_weights) = match decay {
        MaskedDecay::None => (0.0, 0.0),
        MaskedDecay::OnGradients(lambda) => (lambda, 0.0),
        MaskedDecay::OnWeights(lambda) => (0.0, lambda),
    };
    let mask = mask.filter(|_| decay != MaskedDecay::None);
    let scalars = Scalars {
        rule,
        gradient_scale,
        learning_rate: state.learning_rate,
        inverses: state.bias_corrections.map(|correction| 1.0 / correction),
    };
    let rows = w
        .par_chunks_mut(TASK)
        .zip(g.par_chunks(TASK))
        .zip(m.par_chunks_mut(TASK).zip(v.par_chunks_mut(TASK)));
    rows.enumerate().for_each(|(i, ((w, g), (m, v)))| {
        vectorised(
            #[inline(always)]
            || match mask {
                None => scalars.update(w, g, m, v, |_| (0.0, weight_decay)),
                Some(mask) => {
                    let pieces = w
                        .chunks_mut(PIECE)
                        .zip(g.chunks(PIECE))
                        .zip(m.chunks_mut(PIECE).zip(v.chunks_mut(PIECE)));
                    for (j, ((w, g), (m, v))) in pieces.enumerate() {
                        let pruned = pruned(mask, i * TASK + j * PIECE, w.len());
                        scalars.update(w, g, m, v, |at| {
                            (on_gradients * pruned[at], weight_decay + on_weights * pruned[at])
                        });
                    }
                }
            },
        );
    });
    Ok(())
}

struct Scalars<'a> {
    rule: &'a AdamW,
    gradient_scale: f32,
    learning_rate: f32,
    inverses: [f32; 2],
}

impl Scalars<'_> {
    /// Updates consecutive elements; `decay` returns decay_g and decay_w of an element.
    #[inline(always)]
    fn update(
        &self,
        w: &mut [f32],
        g: &[f32],
        m: &mut [f32],
        v: &mut [f32],
        decay: impl Fn(usize) -> (f32, f32),
    ) {
        let Self { rule: &AdamW { beta1, beta2, epsilon, .. }, .. } = *self;
        let Self { gradient_scale, learning_rate, inverses, .. } = *self;
        for (at, (((w, &g), m), v)) in w.iter_mut().zip(g).zip(m).zip(v).enumerate() {
            let (on_gradient, on_weight) = decay(at);
            let g = g * gradient_scale + on_gradient * *w;
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * g * g;
            let step = (*m * inverses[0]) / ((*v * inverses[1]).sqrt() + epsilon);
            *w -= learning_rate * (step + on_weight * *w);
        }
    }
}

/// 1 for pruned elements and 0 for kept ones, from flat index `first` on; `first` and `length` are
/// multiples of 4.
#[inline(always)]
fn pruned(mask: &Mask, first: usize, length: usize) -> [f32; PIECE] {
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
    let mut factors = [0.0; PIECE];
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

/// The sum of squares in f64: each square is exact, blocks of 16384 elements have 16 running sums,
/// and blocks are added in order.
#[must_use]
pub fn squared_norm(g: &[f32]) -> f64 {
    sum(g, g, |g, _| f64::from(g) * f64::from(g))
}

/// sum |a - b| in f64: each difference is exact to 2^-53, and sums are ordered as in
/// [`squared_norm`].
///
/// # Errors
/// [`Error::Shape`] unless the lengths agree.
pub fn l1_distance(a: &[f32], b: &[f32]) -> Result<f64, Error> {
    check::shape("l1 distance", "b", [1, a.len()], [1, b.len()])?;
    Ok(sum(a, b, |a, b| (f64::from(a) - f64::from(b)).abs()))
}

/// The sum of `term` over matching elements, in the order of [`squared_norm`].
fn sum(a: &[f32], b: &[f32], term: impl Fn(f32, f32) -> f64 + Sync) -> f64 {
    let blocks = a.par_chunks(TASK).zip(b.par_chunks(TASK)).map(|(a, b)| {
        vectorised(
            #[inline(always)]
            || {
                let mut lanes = [0.0f64; 16];
                let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
                for (a, b) in a.iter().zip(b) {
                    for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
                        *lane += term(a, b);
                    }
                }
                for ((lane, &a), &b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
                    *lane += term(a, b);
                }
                lanes.iter().sum()
            },
        )
    });
    blocks.collect::<Vec<f64>>().into_iter().sum()
}
