//! Observations of a step: its masks, and the noise of its sampled gradients. They read downloads,
//! which every backend has, and change nothing that a run remembers.

use sparse24_core::{
    Mask, mvue,
    philox::{Purpose, Site},
};

use super::{Allocated, Trainer};
use crate::{
    Error,
    backend::{
        Backend, Op,
        op::{MvueCompress, SparseOp},
    },
    method::GradientOperand,
    nn::Pass,
    objective::Objective,
};

/// The masks of one weight before and after a step, searched in the weights themselves: what
/// pruning would keep, whatever the phase.
pub struct MaskChange<'a> {
    /// Name of the parameter.
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

/// The noise that sampling adds to one layer's output gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientNoise {
    /// Name of the layer's weight.
    pub name: String,
    /// E|MVUE(dZ) - dZ|^2.
    pub variance: f64,
    /// |dZ|^2.
    pub square: f64,
}

/// Groups that are examined per gradient, evenly spaced: with a million, a mean of ratios is known
/// to a few thousandths.
const GROUPS: usize = 1 << 20;

impl Trainer {
    /// Number of 4x4 tiles of all sparsifiable weights.
    #[must_use]
    pub fn tiles(&self) -> usize {
        self.parameters().sparsifiable().map(|parameter| parameter.weight.elements() / 16).sum()
    }

    /// Passes every sparsifiable weight, with its masks around the last step, to `look`; the flips
    /// of that step must have been sampled.
    pub fn visit_masks(&mut self, mut look: impl FnMut(MaskChange<'_>)) -> Result<(), Error> {
        let Self { backend, allocated: Allocated { parameters, flip_masks, .. }, .. } = self;
        for (parameter, &mut [before, after]) in parameters.sparsifiable().zip(flip_masks) {
            let weight = backend.download(parameter.weight)?;
            let (before, after) = (backend.download_mask(before)?, backend.download_mask(after)?);
            look(MaskChange {
                name: &parameter.spec.name,
                shape: parameter.weight.shape,
                weight: &weight,
                before: &before,
                after: &after,
            });
        }
        Ok(())
    }

    /// The noise of the gradients that the next step will sample in its first micro-batch, by the
    /// estimator's variance (not by a draw); empty if that step samples none. Costs that
    /// micro-batch once more.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; errors from the backend.
    pub fn gradient_noise(
        &mut self,
        objective: &dyn Objective,
    ) -> Result<Vec<GradientNoise>, Error> {
        let step = self.step() + 1;
        let phase = *self.phase_of(step);
        let mut noise = Vec::new();
        if !matches!(phase.wgrad, GradientOperand::Mvue(_)) {
            return Ok(noise);
        }
        self.check_interrupt()?;
        let shape = self.prepare_batch(objective, self.step_state(step))?;
        let Self { backend, allocated: Allocated { model, parameters, .. }, recipe, .. } = self;
        let mut watch = |backend: &mut dyn Backend, op: &Op<'_>| {
            let &Op::Sparse(SparseOp::MvueCompress(MvueCompress { dz, site, estimator, .. })) = op
            else {
                return Ok(());
            };
            let values = backend.download(dz)?;
            let mut numbered = (0..).zip(parameters.iter());
            let of = numbered.find(|&(number, _)| Site::new(Purpose::Mvue, number) == site);
            let name = of.map_or(String::new(), |(_, parameter)| parameter.spec.name.clone());
            let (variance, square) = noise_of(&values, dz.shape, estimator);
            noise.push(GradientNoise { name, variance, square });
            Ok(())
        };
        let pass = recipe.pass(&mut **backend, &phase, shape);
        model.train(&mut Pass { watch: Some(&mut watch), ..pass })?;
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
        let value = |at| if first + at < p { dz[(first + at) * r + column] } else { 0.0 };
        let x = core::array::from_fn(value);
        sums.0 += mvue::variance(x, estimator);
        sums.1 += x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    }
    sums
}
