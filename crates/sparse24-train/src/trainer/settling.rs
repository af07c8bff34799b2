//! Adam's second moment over phases: whether it has settled, and how a phase that freezes it
//! changes a step. The criterion is [`sparse24_core::phase::has_settled`].

use sparse24_core::phase::{has_settled, settling_window};

use super::{Recipe, Trainer};
use crate::{
    Error,
    backend::{Backend, DType, Region, Tensor, op::Copy},
    method::{Method, Until},
    nn::Parameters,
    optim::{AdamVariant, AdamW, bias_corrections},
};

/// Copies of the second moments before an update, for a method that watches them.
#[derive(Debug)]
pub(super) struct Variances(Vec<Tensor>);

impl Variances {
    pub(super) fn new(
        backend: &mut dyn Backend,
        parameters: &Parameters,
        method: &Method,
    ) -> Result<Self, Error> {
        let watched = parameters.iter().filter(|_| method.watches_variance());
        let copies = watched.map(|parameter| {
            let name = format!("{} second moment before", parameter.spec.name);
            backend.alloc(&name, parameter.weight.shape, DType::F32, Region::Moments)
        });
        Ok(Self(copies.collect::<Result<_, _>>()?))
    }

    /// Copies the present second moments.
    pub(super) fn keep(
        &self,
        backend: &mut dyn Backend,
        parameters: &Parameters,
    ) -> Result<(), Error> {
        parameters.iter().zip(&self.0).try_for_each(|(parameter, &to)| {
            backend.run(Copy { from: parameter.second_moment, to })
        })
    }

    /// Z: the mean distance, over all weights, from the copies.
    pub(super) fn change(
        &self,
        backend: &mut dyn Backend,
        parameters: &Parameters,
    ) -> Result<f32, Error> {
        let (mut sum, mut weights) = (0.0, 0);
        for (parameter, &copy) in parameters.iter().zip(&self.0) {
            sum += backend.l1_distance(parameter.second_moment, copy)?;
            weights += copy.elements();
        }
        Ok((sum / weights as f64) as f32)
    }
}

impl Trainer {
    /// Ends the phase of the step done last, if it watches the variance and that has settled.
    pub(super) fn settle(&mut self, phase: usize) {
        let Until::VarianceSettled { earliest, .. } = self.recipe.method.phases[phase].until else {
            return;
        };
        let (step, steps) = (self.progress.step, self.recipe.steps);
        let AdamW { beta2, epsilon, .. } = self.recipe.optimizer;
        let changes = &mut self.progress.variance_changes;
        changes.drain(..changes.len().saturating_sub(settling_window(beta2)));
        let settled = step >= earliest.of(steps) && has_settled(changes, beta2, epsilon);
        if settled || step >= self.recipe.method.phases[phase].last_step(steps) {
            changes.clear();
            self.progress.ends.insert(phase, step);
        }
    }

    /// The optimizer of a step of this phase, and its bias corrections.
    ///
    /// With b2 = 1 the update leaves v as it is, to the bit: 1 v + (0 g) g. Its correction is that
    /// of the last step that changed it.
    pub(super) fn update_rule(&self, phase: usize, step: u32) -> (AdamW, [f32; 2]) {
        let rule = self.recipe.optimizer;
        let corrections = bias_corrections(&rule, step);
        match self.recipe.method.phases[phase].optimizer {
            AdamVariant::Standard => (rule, corrections),
            AdamVariant::FrozenVariance => {
                let Recipe { method, steps, .. } = &self.recipe;
                let ends = &self.progress.ends;
                // One without a step changes nothing.
                let changes = |&phase: &usize| {
                    method.phases[phase].optimizer == AdamVariant::Standard
                        && method.has_steps(phase, *steps, ends)
                };
                let thawed =
                    (0..phase).rev().find(changes).expect("Method::check wants a step before");
                let frozen_after = method.last_step(thawed, *steps, ends);
                (
                    AdamW { beta2: 1.0, ..rule },
                    [corrections[0], bias_corrections(&rule, frozen_after)[1]],
                )
            }
        }
    }
}
