//! Where a non-finite loss or gradient first occurred. Searched for once training cannot go on, so
//! no step pays for the answer; the state of the run does not change.

use sparse24_core::op::{NonFinite, StepState};

use super::{Allocated, Trainer};
use crate::{
    Result,
    backend::{
        Backend, Op, Tensor,
        op::{DenseOp, Weight},
    },
    nn::{Parameters, Pass},
    objective::Objective,
};

impl Trainer {
    /// The non-finite value of the present step in words, with the layer where it first occurred.
    pub(super) fn divergence(
        &mut self,
        objective: &dyn Objective,
        culprit: NonFinite,
    ) -> Result<String> {
        Ok(match culprit {
            NonFinite::Loss => {
                let layer = self.first_output(objective)?;
                let layer =
                    layer.map_or("the logits".to_owned(), |name| format!("the output of {name}"));
                format!("the loss is not finite, first in {layer}")
            }
            NonFinite::Gradient(row) => {
                format!("a gradient is not finite, first that of {}", self.first_gradient(row)?)
            }
            NonFinite::Norm => "the norm of the gradients is not finite".to_owned(),
        })
    }

    /// The first layer with a non-finite output, in the order of the forward pass of any
    /// micro-batch.
    fn first_output(&mut self, objective: &dyn Objective) -> Result<Option<String>> {
        let step = self.step() + 1;
        let phase = *self.phase_of(step);
        for micro_step in 0..self.recipe.gradient_accumulation.of(step) {
            let shape =
                self.prepare_batch(objective, StepState { micro_step, ..self.step_state(step) })?;
            let Self { backend, allocated: Allocated { model, parameters, .. }, recipe, .. } = self;
            let (mut found, mut layer) = (None, "the embedding".to_owned());
            let mut watch = |backend: &mut dyn Backend, op: &Op<'_>| {
                let Op::Dense(op) = op else { return Ok(()) };
                layer = name_of(op, parameters).unwrap_or_else(|| layer.clone());
                let Some(output) = op.forward_output().filter(|_| found.is_none()) else {
                    return Ok(());
                };
                if !is_finite(backend, output)? {
                    found = Some(match op {
                        DenseOp::AttentionForward(_) => format!("the attention after {layer}"),
                        DenseOp::ActivationForward(_) => format!("the activation after {layer}"),
                        _ => layer.clone(),
                    });
                }
                Ok(())
            };
            let pass = recipe.pass(&mut **backend, &phase, shape);
            model.evaluate(&mut Pass { watch: Some(&mut watch), ..pass })?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The first non-finite gradient in the order of the backward pass, the reverse of the
    /// parameters' order; tied embeddings come last.
    fn first_gradient(&mut self, row: usize) -> Result<String> {
        let Self { backend, allocated: Allocated { parameters, .. }, .. } = self;
        let all: Vec<_> = parameters.iter().collect();
        for parameter in all.iter().rev() {
            if !is_finite(&mut **backend, parameter.gradient)? {
                return Ok(parameter.spec.name.clone());
            }
        }
        // The sum of its squares overflows, though each element is finite.
        Ok(all[row].spec.name.clone())
    }
}

/// The layer whose parameters the operation uses.
fn name_of(op: &DenseOp, parameters: &Parameters) -> Option<String> {
    let parameter = match op {
        DenseOp::LinearForward(op) => parameters.iter().find(|parameter| match op.weight {
            Weight::Dense(w) => parameter.weight == w,
            Weight::Pruned(id) => parameter.pruned.is_some_and(|pruned| pruned.weight == id),
        }),
        DenseOp::NormForward(op) => {
            parameters.iter().find(|parameter| parameter.weight == op.gamma)
        }
        _ => None,
    }?;
    let name = &parameter.spec.name;
    Some(name.strip_suffix(".weight").unwrap_or(name).to_owned())
}

fn is_finite(backend: &mut dyn Backend, tensor: Tensor) -> Result<bool> {
    Ok(backend.download(tensor)?.iter().all(|value| value.is_finite()))
}
