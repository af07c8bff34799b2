//! Detects masked decay that is too weak to calm the masks.
//!
//! mu needs the flips of a dense run. But decay that hardly moves the pruned weights hardly changes
//! a mask, and leaves mu where it is without decay: at about 1 or above.

use super::{MetricsLog, Provenance, Run};
use sparse24_train::{
    method::PhaseKind,
    optim::{MaskedDecay, UpdateRule},
};

/// The first step after which the decay is judged, if the warm-up is shorter.
const FEWEST_JUDGED: u32 = 100;

/// Less until then is too weak; in the searches of `docs/accuracy.md`, mu is then 0.99 or more.
const WEAK: f64 = 0.1;

impl Run {
    /// The share of its size by which decay alone moved a pruned weight in the sparse steps so far,
    /// if that is too little: the sum of lr lambda / r. On weights r is 1; on gradients it is about
    /// their root mean square after clipping, by which Adam and Lion divide, and for SGD one less
    /// the momentum.
    ///
    /// It is judged after one step, the last of the warm-up; never in a run that ends before.
    pub(super) fn weak_decay(&self, step: u32) -> Option<f64> {
        let is_cut = self.config.optimizer.warmup_steps > self.config.steps;
        if is_cut || step != self.config.warmup_end().max(FEWEST_JUDGED) {
            return None;
        }
        let lambda = self.config.lambda()?;
        // A search has measured mu.
        let starts = Provenance::readable(&self.directory.provenance()).ok()?;
        if starts.first()?.lambda.is_some() {
            return None;
        }
        let recipe = self.trainer.recipe();
        let is_on_gradients = matches!(recipe.method.decay, MaskedDecay::OnGradients(_));
        let parameters: usize =
            self.trainer.parameters().iter().map(|parameter| parameter.weight.elements()).sum();
        let mut share = 0.0;
        // If the directory is gone, the next save says so.
        for metrics in MetricsLog::steps(&self.directory.metrics()).ok()? {
            let metrics = metrics.ok()?;
            let norm = f64::from(metrics.grad_norm.min(recipe.optimizer.clip));
            let r = match recipe.optimizer.rule {
                _ if !is_on_gradients => 1.0,
                UpdateRule::Sgd { momentum } => 1.0 - f64::from(momentum),
                _ => norm / (parameters as f64).sqrt(),
            };
            if metrics.phase == PhaseKind::Sparse && metrics.skipped.is_none() && r > 0.0 {
                share += f64::from(metrics.lr) * f64::from(lambda) / r;
            }
        }
        (0.0 < share && share < WEAK).then_some(share)
    }
}
