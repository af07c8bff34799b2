//! Detects masked decay that is too weak to calm the masks.
//!
//! mu needs the flips of a dense run. But decay that hardly moves the pruned weights hardly changes
//! a mask, and leaves mu where it is without decay: at about 1 or above.

use super::StepMetrics;
use crate::Error;
use sparse24_train::{method::PhaseKind, optim::MaskedDecay, trainer::Recipe};

/// Less in the warm-up is too weak; in the searches of `docs/accuracy.md`, mu is then 0.99 or more.
pub(super) const WEAK: f64 = 0.1;

/// The share of its size by which decay alone moves a pruned weight in the sparse ones of these
/// steps: the sum of lr lambda / r. Adam divides by r, on weights 1, on gradients about their root
/// mean square after clipping, min(norm, clip) / sqrt(N) for N `parameters`.
pub(super) fn shrinkage(
    recipe: &Recipe,
    parameters: usize,
    mut steps: impl Iterator<Item = Result<StepMetrics, Error>>,
) -> Result<f64, Error> {
    let (lambda, parameters) = match recipe.method.decay {
        MaskedDecay::None => return Ok(0.0),
        MaskedDecay::OnGradients(lambda) => (lambda, Some(parameters as f64)),
        MaskedDecay::OnWeights(lambda) => (lambda, None),
    };
    steps.try_fold(0.0, |sum, metrics| {
        let StepMetrics { phase, lr, grad_norm, skipped, .. } = metrics?;
        let norm = f64::from(grad_norm.min(recipe.optimizer.clip));
        let divisor = parameters.map_or(1.0, |parameters| norm / parameters.sqrt());
        let is_counted = phase == PhaseKind::Sparse && skipped.is_none() && divisor > 0.0;
        Ok(if is_counted { sum + f64::from(lr) * f64::from(lambda) / divisor } else { sum })
    })
}
