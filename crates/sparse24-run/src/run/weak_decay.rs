//! Detects masked decay that is too weak to calm the masks.
//!
//! mu, the measure of that, needs the flips of a dense run. But decay that hardly moves the pruned
//! weights hardly changes a mask, and mu is then that of training without decay: about 1 or more.

use super::StepMetrics;
use crate::Error;
use sparse24_train::{method::PhaseKind, optim::MaskedDecay, trainer::Recipe};

/// Decay of less in the warm-up is reported. In the searches of `docs/accuracy.md`, mu is above
/// 0.95 up to about 0.15.
pub(super) const WEAK: f64 = 0.1;

/// The share of its size by which decay alone moves a pruned weight in the sparse steps among
/// these: the sum of lr lambda / r over the steps, where r is what Adam divides a gradient by,
/// estimated as its root mean square after clipping, min(norm, clip) / sqrt(N) for N `parameters`.
/// Decay on weights is not divided. None without sparse steps, or with lambda 0.
pub(super) fn shrinkage(
    recipe: &Recipe,
    parameters: usize,
    steps: impl Iterator<Item = Result<StepMetrics, Error>>,
) -> Result<Option<f64>, Error> {
    let (lambda, is_divided) = match recipe.method.decay {
        MaskedDecay::None => return Ok(None),
        MaskedDecay::OnGradients(lambda) => (f64::from(lambda), true),
        MaskedDecay::OnWeights(lambda) => (f64::from(lambda), false),
    };
    let mut sum = 0.0;
    for metrics in steps {
        let StepMetrics { phase, lr, grad_norm: norm, .. } = metrics?;
        let norm = f64::from(norm.min(recipe.optimizer.clip));
        if phase == PhaseKind::Sparse && norm > 0.0 {
            let root = if is_divided { norm / (parameters as f64).sqrt() } else { 1.0 };
            sum += f64::from(lr) * lambda / root;
        }
    }
    Ok(Some(sum).filter(|&sum| sum > 0.0))
}
