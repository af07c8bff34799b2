//! AdamW with masked decay.

use sparse24_core::op::{AdamW, MaskedDecay};

use super::arithmetic::{Arithmetic, Matrix};

/// The scalars of an optimizer step.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// beta2 = 1 freezes the second moment.
    pub rule: AdamW,
    /// Where pruned weights decay.
    pub decay: MaskedDecay,
    /// Learning rate.
    pub rate: f64,
    /// 1 - beta^t of the first and the second moment.
    pub corrections: [f64; 2],
}

impl Step {
    /// Updates w, m and v of every parameter, in order, given its gradient, its weight decay and
    /// whether an element is pruned. `norm` is that of all gradients.
    pub fn apply<'a, P: Fn(usize) -> bool>(
        &self,
        a: &mut Arithmetic,
        norm: f64,
        parameters: impl Iterator<Item = ([&'a mut Matrix; 3], &'a Matrix, f64, P)>,
    ) {
        let AdamW { beta1, beta2, epsilon, clip } = self.rule;
        let [beta1, beta2, epsilon, clip] = [beta1, beta2, epsilon, clip].map(f64::from);
        let scale = (clip / (norm + 1e-6)).min(1.0);
        let scale = a.rounded(scale, 3.0, if scale < 1.0 { scale } else { 0.0 });
        for ([w, m, v], gradient, weight_decay, pruned) in parameters {
            let elements = w.iter_mut().zip(m).zip(v).zip(gradient).enumerate();
            for (at, (((w, m), v), g)) in elements {
                let (on_gradient, on_weight) = match self.decay {
                    MaskedDecay::OnGradients(lambda) if pruned(at) => (f64::from(lambda), 0.0),
                    MaskedDecay::OnWeights(lambda) if pruned(at) => (0.0, f64::from(lambda)),
                    _ => (0.0, 0.0),
                };
                let (g, pull) = (g * scale, on_gradient * *w);
                let g = a.rounded(g + pull, 2.0, g.abs() + pull.abs());
                let (kept, new) = (beta1 * *m, (1.0 - beta1) * g);
                *m = a.rounded(kept + new, 2.0, kept.abs() + new.abs());
                if beta2 < 1.0 {
                    *v = beta2 * *v + (1.0 - beta2) * g * g;
                    *v = a.rounded(*v, 4.0, *v);
                }
                let [first, second] = self.corrections;
                let step = (*m / first) / ((*v / second).sqrt() + epsilon);
                let change =
                    self.rate * (a.rounded(step, 8.0, step) + (weight_decay + on_weight) * *w);
                *w = a.rounded(*w - change, 1.0, w.abs() + 3.0 * change.abs());
            }
        }
    }
}
