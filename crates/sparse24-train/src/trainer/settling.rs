//! Adam's second moment over phases: whether it has settled, and how a phase that freezes it
//! changes a step. The criterion is [`sparse24_core::phase::has_settled`].

use sparse24_core::phase::{has_settled, settling_window};

use super::{Recipe, Trainer};
use crate::{
    Result,
    backend::{Backend, Region, Tensor, op::Copy},
    method::{Method, Until},
    nn::{Parameter, Parameters},
    optim::{Adam, AdamVariant, Optimizer, UpdateRule, bias_corrections},
};

/// Copies of the second moments before an update, for a method that watches them.
#[derive(Debug)]
pub(super) struct Variances(Vec<Tensor>);

impl Variances {
    pub(super) fn new(
        backend: &mut dyn Backend,
        parameters: &Parameters,
        method: &Method,
    ) -> Result<Self> {
        let mut before = || parameters.beside(backend, "second moment before", Region::Moments);
        Ok(Self(if method.watches_variance() { before()? } else { Vec::new() }))
    }

    /// Copies the present second moments.
    pub(super) fn keep(&self, backend: &mut dyn Backend, parameters: &Parameters) -> Result {
        let mut all = parameters.iter().zip(&self.0);
        all.try_for_each(|(parameter, &to)| backend.run(Copy { from: watched(parameter), to }))
    }

    /// Z: the mean distance, over all weights, from the copies.
    pub(super) fn change(&self, backend: &mut dyn Backend, parameters: &Parameters) -> Result<f32> {
        let (mut sum, mut weights) = (0.0, 0);
        for (parameter, &copy) in parameters.iter().zip(&self.0) {
            sum += backend.l1_distance(watched(parameter), copy)?;
            weights += copy.elements();
        }
        Ok((sum / weights as f64) as f32)
    }
}

fn watched(parameter: &Parameter) -> Tensor {
    parameter.second_moment.expect("Recipe::check wants Adam")
}

impl Trainer {
    /// Ends the last step's phase if its variance has settled or the next step's phase freezes it.
    pub(super) fn settle(&mut self, phase: usize) {
        let (step, Recipe { method, steps, optimizer, .. }) = (self.progress.step, &self.recipe);
        let next = method.phases[self.phase_index(step + 1)].optimizer;
        let mut is_over = next == AdamVariant::FrozenVariance && method.keeps_end(phase);
        let changes = &mut self.progress.variance_changes;
        if let Until::VarianceSettled { earliest, .. } = method.phases[phase].until {
            let Adam { beta2, epsilon, .. } =
                optimizer.rule.adam().expect("Recipe::check wants it");
            changes.drain(..changes.len().saturating_sub(settling_window(beta2)));
            is_over |= step >= method.phases[phase].last_step(*steps)
                || step >= earliest.of(*steps) && has_settled(changes, beta2, epsilon);
        }
        if is_over {
            changes.clear();
            self.progress.ends.insert(phase, step);
        }
    }

    /// The optimizer of a step of this phase, and its bias corrections.
    ///
    /// With b2 = 1 the update leaves v as it is, to the bit: 1 v + (0 g) g. Its correction is that
    /// of the last step that changed it.
    pub(super) fn optimizer(&self, phase: usize, step: u32) -> (Optimizer, [f32; 2]) {
        let (Recipe { method, steps, .. }, ends) = (&self.recipe, &self.progress.ends);
        let mut optimizer = self.recipe.optimizer;
        let mut corrections = bias_corrections(&optimizer.rule, step);
        if method.phases[phase].optimizer == AdamVariant::Standard {
            return (optimizer, corrections);
        }
        // A phase without steps does not change v.
        let changes = |&phase: &usize| {
            method.phases[phase].optimizer == AdamVariant::Standard
                && method.has_steps(phase, *steps, ends)
        };
        let thawed = (0..phase).rev().find(changes).expect("Method::check wants a step before");
        let frozen_after = method.last_step(thawed, *steps, ends);
        corrections[1] = bias_corrections(&optimizer.rule, frozen_after)[1];
        if let UpdateRule::AdamW(adam) | UpdateRule::Adam(adam) = &mut optimizer.rule {
            adam.beta2 = 1.0;
        }
        (optimizer, corrections)
    }
}
