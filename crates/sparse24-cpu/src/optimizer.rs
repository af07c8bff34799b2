//! The step of an optimizer with masked decay, and its norms.
//!
//! The step is elementwise over flat row-major parameters, so its bits depend on no number of
//! threads. Sources: [`UpdateRule`]; masked decay on gradients is the paper's equation 10, on
//! weights its reading of SR-STE.

use rayon::prelude::*;
use sparse24_core::{
    Mask,
    op::{Adam, MaskedDecay, Optimizer, StepState, UpdateRule},
};

use crate::{Error, check, simd::vectorized};

/// Elements per task, a multiple of [`PIECE`].
const TASK: usize = 16 * 1024;

/// Elements whose mask bits are expanded to factors at a time.
const PIECE: usize = 256;

/// One optimizer step of a parameter, in this order, with every operation rounded:
///
/// ```text
/// g' = g * gradient_scale + (coupled + decay_g) * w
/// u  = the rule's step, which updates the moments:
///      Adam:  m = beta1 * m + (1 - beta1) * g'
///             v = beta2 * v + (1 - beta2) * g' * g'
///             u = (m * (1 / bias_corrections[0]))
///                 / (sqrt(v * (1 / bias_corrections[1])) + epsilon)
///      SGD:   m = momentum * m + g'
///             u = m
///      Lion:  u = sign(beta1 * m + (1 - beta1) * g')
///             m = beta2 * m + (1 - beta2) * g'
/// w  = w - learning_rate * (u + (decoupled + decay_w) * w)
/// ```
///
/// `[coupled, decoupled]` is [`UpdateRule::placed`] of the weight decay, `[decay_g, decay_w]`
/// [`MaskedDecay::placed`] where the mask prunes, else 0. The sign of 0 or NaN is itself. Nothing
/// is pruned without a mask. v is empty for a rule without a second moment. `optimizer.clip` is not
/// read: the caller turns it into `gradient_scale` ([`Optimizer::gradient_scale`]).
///
/// # Errors
/// [`Error::Shape`] unless g, m, v and the mask have as many elements as w.
#[expect(clippy::too_many_arguments, reason = "an equation of ten operands")]
pub fn optimizer_step(
    w: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    optimizer: &Optimizer,
    state: &StepState,
    weight_decay: f32,
    gradient_scale: f32,
    decay: MaskedDecay,
    mask: Option<&Mask>,
) -> Result<(), Error> {
    const OPERATION: &str = "optimizer_step";
    let rule = &optimizer.rule;
    let v_length = if rule.adam().is_some() { w.len() } else { 0 };
    for (operand, found, expected) in
        [("g", g.len(), w.len()), ("m", m.len(), w.len()), ("v", v.len(), v_length)]
    {
        check::shape(OPERATION, operand, [1, expected], [1, found])?;
    }
    if let Some(mask) = mask {
        check::shape(OPERATION, "mask", [1, w.len()], [1, 16 * mask.tiles().len()])?;
    }
    let scalars = Scalars {
        weight_decay: rule.placed(weight_decay),
        masked_decay: decay.placed(),
        gradient_scale,
        learning_rate: state.learning_rate,
        mask: mask.filter(|_| decay != MaskedDecay::None),
    };
    match *rule {
        UpdateRule::AdamW(adam) | UpdateRule::Adam(adam) => {
            let Adam { beta1, beta2, epsilon } = adam;
            let inverses = state.bias_corrections.map(|correction| 1.0 / correction);
            let step = |g: f32, m: &mut f32, v: &mut f32| {
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                (*m * inverses[0]) / ((*v * inverses[1]).sqrt() + epsilon)
            };
            let rows = tasks(w, g, m).zip(v.par_chunks_mut(TASK)).enumerate();
            rows.for_each(|(i, (((w, g), m), v))| scalars.task(i, w, g, m, Some(v), step));
        }
        UpdateRule::Sgd { momentum } => {
            let step = |g: f32, m: &mut f32, _: &mut f32| {
                *m = momentum * *m + g;
                *m
            };
            let rows = tasks(w, g, m).enumerate();
            rows.for_each(|(i, ((w, g), m))| scalars.task(i, w, g, m, None, step));
        }
        UpdateRule::Lion { beta1, beta2 } => {
            let step = |g: f32, m: &mut f32, _: &mut f32| {
                let direction = beta1 * *m + (1.0 - beta1) * g;
                *m = beta2 * *m + (1.0 - beta2) * g;
                if direction.abs() > 0.0 { 1f32.copysign(direction) } else { direction }
            };
            let rows = tasks(w, g, m).enumerate();
            rows.for_each(|(i, ((w, g), m))| scalars.task(i, w, g, m, None, step));
        }
    }
    Ok(())
}

/// The parts of w, g and m that are updated together.
fn tasks<'a>(
    w: &'a mut [f32],
    g: &'a [f32],
    m: &'a mut [f32],
) -> impl IndexedParallelIterator<Item = ((&'a mut [f32], &'a [f32]), &'a mut [f32])> {
    w.par_chunks_mut(TASK).zip(g.par_chunks(TASK)).zip(m.par_chunks_mut(TASK))
}

struct Scalars<'a> {
    /// On the gradient and on the weight, of every element.
    weight_decay: [f32; 2],
    /// On the gradient and on the weight, of pruned elements.
    masked_decay: [f32; 2],
    gradient_scale: f32,
    learning_rate: f32,
    mask: Option<&'a Mask>,
}

impl Scalars<'_> {
    /// Updates the elements of task `i`; `step` is the rule's, of g', m and v.
    fn task(
        &self,
        i: usize,
        w: &mut [f32],
        g: &[f32],
        m: &mut [f32],
        mut v: Option<&mut [f32]>,
        step: impl Fn(f32, &mut f32, &mut f32) -> f32 + Copy,
    ) {
        let [on_gradient, on_weight] = self.weight_decay;
        let [masked_gradient, masked_weight] = self.masked_decay;
        vectorized(
            #[inline(always)]
            || {
                let pieces = w.chunks_mut(PIECE).zip(g.chunks(PIECE)).zip(m.chunks_mut(PIECE));
                let mut unused = [0.0; PIECE];
                for (j, ((w, g), m)) in pieces.enumerate() {
                    let (first, length) = (j * PIECE, w.len());
                    let v = match &mut v {
                        Some(v) => &mut v[first..first + length],
                        None => &mut unused[..length],
                    };
                    match self.mask {
                        None => self.update(w, g, m, v, |_| (on_gradient, on_weight), step),
                        Some(mask) => {
                            let pruned = pruned(mask, i * TASK + first, length);
                            let decay = |at: usize| {
                                (
                                    on_gradient + masked_gradient * pruned[at],
                                    on_weight + masked_weight * pruned[at],
                                )
                            };
                            self.update(w, g, m, v, decay, step);
                        }
                    }
                }
            },
        );
    }

    /// Updates consecutive elements; `decay` returns the factors of w in the gradient and beside
    /// the step.
    #[inline(always)]
    fn update(
        &self,
        w: &mut [f32],
        g: &[f32],
        m: &mut [f32],
        v: &mut [f32],
        decay: impl Fn(usize) -> (f32, f32),
        step: impl Fn(f32, &mut f32, &mut f32) -> f32,
    ) {
        let Self { gradient_scale, learning_rate, .. } = *self;
        for (at, (((w, &g), m), v)) in w.iter_mut().zip(g).zip(m).zip(v).enumerate() {
            let (on_gradient, on_weight) = decay(at);
            let step = step(g * gradient_scale + on_gradient * *w, m, v);
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
        vectorized(
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
