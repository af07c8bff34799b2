//! Where a loss or a gradient that is not finite began. Asked once training cannot go on, so that
//! no step pays for the answer.
//!
//! Invariant: nothing that a run remembers changes. Deliberately absent: what is done about it.

use super::{Batches, Trainer};
use crate::{
    Error,
    backend::{Backend, Beta, NonFinite, StepState, Tensor},
    nn::Pass,
};

impl Trainer {
    /// What was not finite in the step under way, in words, and the layer where it began.
    pub(super) fn divergence(
        &mut self,
        batches: &dyn Batches,
        culprit: NonFinite,
    ) -> Result<String, Error> {
        Ok(match culprit {
            NonFinite::Loss => match self.first_output(batches)? {
                Some(layer) => {
                    format!("the loss is not finite, beginning with the output of {layer}")
                }
                None => "the loss is not finite, beginning with the logits".to_owned(),
            },
            NonFinite::Gradient(row) => format!(
                "a gradient is not finite, beginning with that of {}",
                self.first_gradient(row)?
            ),
            NonFinite::Norm => "the norm of the gradients is not finite".to_owned(),
        })
    }

    /// The first output, in the order of the forward pass, of any micro-batch.
    fn first_output(&mut self, batches: &dyn Batches) -> Result<Option<String>, Error> {
        let step = self.step() + 1;
        let phase = self.recipe.method.phases[self.phase_index(step)];
        for micro_step in 0..self.recipe.accumulation.get() {
            batches.fill(step, micro_step, &mut self.inputs, &mut self.targets);
            self.backend.set_step(StepState {
                seed: self.recipe.seed,
                step,
                micro_step,
                learning_rate: 0.0,
                bias_corrections: [1.0; 2],
                loss_scale: 1.0,
            })?;
            let mut pass = Pass {
                backend: &mut *self.backend,
                phase: &phase,
                sequences: self.recipe.batch.sequences,
                context: self.recipe.batch.context,
                dropout: self.recipe.dropout,
                beta: Beta::Overwrite,
                watch: None,
            };
            self.model.upload(pass.backend, &self.inputs, &self.targets)?;
            let first = self
                .model
                .first_output(&mut pass, |backend, output| Ok(!is_finite(backend, output)?))?;
            if first.is_some() {
                return Ok(first);
            }
        }
        Ok(None)
    }

    /// The first gradient in the order of the backward pass, which is the reverse of the
    /// parameters' order; tied embeddings come last.
    fn first_gradient(&mut self, any: usize) -> Result<String, Error> {
        let gradients: Vec<_> = self
            .parameters
            .iter()
            .map(|parameter| (parameter.name.clone(), parameter.gradient))
            .collect();
        for (name, gradient) in gradients.iter().rev() {
            if !is_finite(&mut *self.backend, *gradient)? {
                return Ok(name.clone());
            }
        }
        // The sum of its squares overflows, though each element is finite.
        Ok(gradients[any].0.clone())
    }
}

fn is_finite(backend: &mut dyn Backend, tensor: Tensor) -> Result<bool, Error> {
    Ok(backend.download(tensor)?.iter().all(|value| value.is_finite()))
}
