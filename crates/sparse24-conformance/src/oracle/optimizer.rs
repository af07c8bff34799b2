//! The optimizers, with masked decay, as PyTorch and the papers write their recurrences.

use sparse24_core::op::{MaskedDecay, Optimizer, UpdateRule};

use super::arithmetic::{Arithmetic, Matrix, UNIT};

/// The scalars of an optimizer step.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// beta2 = 1 freezes the second moment.
    pub optimizer: Optimizer,
    /// Where pruned weights decay.
    pub decay: MaskedDecay,
    /// Learning rate.
    pub rate: f64,
    /// 1 - beta^t of the first and the second moment.
    pub corrections: [f64; 2],
}

impl Step {
    /// Updates w, m and v of every parameter, in order, given its gradient, its weight decay and
    /// whether an element is pruned. `norm` is that of all gradients. A rule without a second
    /// moment reads the shape of v alone.
    pub fn apply<'a, P: Fn(usize) -> bool>(
        &self,
        a: &mut Arithmetic,
        norm: f64,
        parameters: impl Iterator<Item = ([&'a mut Matrix; 3], &'a Matrix, f64, P)>,
    ) {
        let clip = f64::from(self.optimizer.clip);
        let scale = (clip / (norm + 1e-6)).min(1.0);
        let scale = a.rounded(scale, 3.0, if scale < 1.0 { scale } else { 0.0 });
        let is_coupled =
            matches!(self.optimizer.rule, UpdateRule::Adam(_) | UpdateRule::Sgd { .. });
        for ([w, m, v], gradient, weight_decay, pruned) in parameters {
            let elements = w.iter_mut().zip(m).zip(v).zip(gradient).enumerate();
            for (at, (((w, m), v), g)) in elements {
                let (on_gradient, on_weight) = match self.decay {
                    MaskedDecay::OnGradients(lambda) if pruned(at) => (f64::from(lambda), 0.0),
                    MaskedDecay::OnWeights(lambda) if pruned(at) => (0.0, f64::from(lambda)),
                    _ => (0.0, 0.0),
                };
                let (coupled, decoupled) =
                    if is_coupled { (weight_decay, 0.0) } else { (0.0, weight_decay) };
                let (g, pull) = (g * scale, (coupled + on_gradient) * *w);
                let units = if is_coupled { 3.0 } else { 2.0 };
                let g = a.rounded(g + pull, units, g.abs() + pull.abs());
                let step = self.step(a, g, m, v);
                let change = self.rate * (step + (decoupled + on_weight) * *w);
                *w = a.rounded(*w - change, 1.0, w.abs() + 3.0 * change.abs());
            }
        }
    }

    /// The step that the learning rate multiplies, without decay.
    fn step(&self, a: &mut Arithmetic, g: f64, m: &mut f64, v: &mut f64) -> f64 {
        let mut average = |m: f64, beta: f32, share: f64| {
            let (kept, new) = (f64::from(beta) * m, share * g);
            a.rounded(kept + new, 2.0, kept.abs() + new.abs())
        };
        match self.optimizer.rule {
            UpdateRule::AdamW(adam) | UpdateRule::Adam(adam) => {
                *m = average(*m, adam.beta1, 1.0 - f64::from(adam.beta1));
                let (beta2, epsilon) = (f64::from(adam.beta2), f64::from(adam.epsilon));
                if beta2 < 1.0 {
                    *v = beta2 * *v + (1.0 - beta2) * g * g;
                    *v = a.rounded(*v, 4.0, *v);
                }
                let [first, second] = self.corrections;
                let step = (*m / first) / ((*v / second).sqrt() + epsilon);
                a.rounded(step, 8.0, step)
            }
            UpdateRule::Sgd { momentum } => {
                *m = average(*m, momentum, 1.0);
                *m
            }
            UpdateRule::Lion { beta1, beta2 } => {
                let old = *m;
                let direction = average(old, beta1, 1.0 - f64::from(beta1));
                *m = average(old, beta2, 1.0 - f64::from(beta2));
                let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
                // g and the average are each rounded a few times: closer to 0 than that, f32 may
                // have any sign, at most 2 away.
                let magnitude = old.abs() + g.abs();
                let is_open = magnitude > 0.0 && direction.abs() <= 8.0 * UNIT * magnitude;
                a.rounded(sign, 1.0 / UNIT, if is_open { 2.0 } else { 0.0 })
            }
        }
    }
}
