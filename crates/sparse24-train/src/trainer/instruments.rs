//! What can be seen of a step without taking part in it: its masks, and the noise of its sampled
//! gradients.
//!
//! Invariant: nothing that a run remembers changes. Everything goes through downloads, which every
//! backend has; steps that are not looked at pay nothing. Deliberately absent: when to look, and
//! what is made of it.

use sparse24_core::{Mask, mvue};

use super::{Batches, Trainer, go_on, sparsifiable};
use crate::{
    Error,
    backend::{Backend, Beta, StepState},
    method::GradientOperand,
    nn::{Pass, SampledGradient},
};

/// The masks of one weight before and after a step, searched in the weights as they are: what
/// pruning would keep, whatever the phase.
pub struct MaskChange<'a> {
    /// The parameter.
    pub name: &'a str,
    /// `[rows, columns]`.
    pub shape: [usize; 2],
    /// w_t, row-major.
    pub weight: &'a [f32],
    /// m(w_{t-1}).
    pub before: &'a Mask,
    /// m(w_t).
    pub after: &'a Mask,
}

/// What the sampling of one layer's output gradient adds to it.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientNoise {
    /// The layer's weight.
    pub name: String,
    /// E|MVUE(dZ) - dZ|^2.
    pub variance: f64,
    /// |dZ|^2.
    pub square: f64,
}

/// Groups that are looked at in one gradient, evenly spaced: a million tell a mean of ratios to a
/// few thousandths.
const GROUPS: usize = 1 << 20;

impl Trainer {
    /// Tiles of all sparsifiable weights.
    #[must_use]
    pub fn tiles(&self) -> usize {
        sparsifiable(&self.parameters).map(|parameter| parameter.weight.elements() / 16).sum()
    }

    /// Looks at every sparsifiable weight and its masks around the step done last, whose flips were
    /// sampled.
    ///
    /// # Errors
    /// Those of the downloads.
    pub fn look_at_masks(&mut self, mut look: impl FnMut(MaskChange<'_>)) -> Result<(), Error> {
        let Self { backend, parameters, flip_masks, .. } = self;
        for (parameter, [before, after]) in sparsifiable(parameters).zip(&*flip_masks) {
            let weight = backend.download(parameter.weight)?;
            let (before, after) = (backend.download_mask(*before)?, backend.download_mask(*after)?);
            look(MaskChange {
                name: &parameter.name,
                shape: parameter.weight.shape,
                weight: &weight,
                before: &before,
                after: &after,
            });
        }
        Ok(())
    }

    /// The noise of the gradients that the next step will sample in its first micro-batch, by the
    /// estimator's variance (not by a draw); empty where that step samples none. It costs that
    /// micro-batch once more.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; those of the operations.
    pub fn gradient_noise(&mut self, batches: &dyn Batches) -> Result<Vec<GradientNoise>, Error> {
        let step = self.step() + 1;
        let phase = self.recipe.method.phases[self.phase_index(step)];
        let mut noise = Vec::new();
        if !matches!(phase.wgrad, GradientOperand::Mvue(_)) {
            return Ok(noise);
        }
        go_on(&self.interrupt)?;
        let tokens = self.recipe.tokens_per_step() as f64;
        let Self { backend, model, parameters, recipe, inputs, targets, .. } = self;
        batches.fill(step, 0, inputs, targets);
        backend.set_step(StepState {
            seed: recipe.seed,
            step,
            micro_step: 0,
            learning_rate: 0.0,
            bias_corrections: [1.0; 2],
            loss_scale: (1.0 / tokens) as f32,
        })?;
        model.upload(&mut **backend, inputs, targets)?;
        let mut watch = |backend: &mut dyn Backend, seen: SampledGradient| {
            let dz = backend.download(seen.dz)?;
            let name = parameters
                .iter()
                .find(|parameter| parameter.weight == seen.weight)
                .map_or("", |parameter| &parameter.name);
            let (variance, square) = noise_of(&dz, seen.dz.shape, seen.estimator);
            noise.push(GradientNoise { name: name.to_owned(), variance, square });
            Ok(())
        };
        let mut pass = Pass {
            backend: &mut **backend,
            phase: &phase,
            sequences: recipe.batch.sequences,
            context: recipe.batch.context,
            dropout: recipe.dropout,
            beta: Beta::Overwrite,
            watch: Some(&mut watch),
        };
        model.train(&mut pass, (1.0 / tokens) as f32)?;
        Ok(noise)
    }
}

/// E|MVUE(dz^T) - dz^T|^2 and |dz|^2 over groups of four tokens, of `[p, r]` values; a short last
/// group is filled with zeros.
fn noise_of(dz: &[f32], [p, r]: [usize; 2], estimator: mvue::Estimator) -> (f64, f64) {
    let groups = p.div_ceil(4) * r;
    let mut sums = (0.0, 0.0);
    for group in (0..groups).step_by(groups.div_ceil(GROUPS).max(1)) {
        let (first, column) = (group / r * 4, group % r);
        let x =
            core::array::from_fn(
                |at| if first + at < p { dz[(first + at) * r + column] } else { 0.0 },
            );
        sums.0 += mvue::variance(x, estimator);
        sums.1 += x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    }
    sums
}
