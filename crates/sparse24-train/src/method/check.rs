//! Which methods the trainer runs.

use super::{GradientOperand, KeptValues, Method, Phase, Pruner, Until, WeightOperand};
use crate::{Error, optim::AdamVariant};

impl Method {
    /// Whether this trainer runs every choice of the method.
    ///
    /// # Errors
    /// [`Error::Setting`] names the first choice that it does not run.
    pub fn check(&self) -> Result<(), Error> {
        /// Steps of a long run, in which phases of any fraction are told apart.
        const ALL: u32 = 1 << 24;
        let refuse =
            |choice: &str| Err(Error::Setting { key: format!("method {}", self.name), problem: format!("{choice} is not supported yet") });
        if self.phases.is_empty() {
            return refuse("a method without phases");
        }
        let ends: Vec<u32> = self.phases.iter().map(|phase| phase.last_step(ALL)).collect();
        if !ends.is_sorted() || ends.last() != Some(&ALL) {
            let problem = "phases must follow each other, and the last one end with the run".to_owned();
            return Err(Error::Setting { key: format!("method {}", self.name), problem });
        }
        for phase in &self.phases {
            match phase.forward {
                WeightOperand::Pruned(Pruner::ColumnWisePermuted, _) => return refuse("a permuted column-wise mask"),
                WeightOperand::Pruned(_, KeptValues::SoftThreshold) => return refuse("the soft threshold"),
                _ => {}
            }
            if phase.dgrad != WeightOperand::Dense && phase.dgrad != phase.forward {
                return refuse("a dgrad operand pruned otherwise than the forward's");
            }
            if matches!(phase.until, Until::VarianceSettled { .. }) || phase.optimizer == AdamVariant::FrozenVariance {
                return refuse("a phase that watches or freezes Adam's variance");
            }
            if phase.forward == WeightOperand::Dense && matches!(phase.wgrad, GradientOperand::Mvue(_)) {
                return refuse("a sampled gradient beside dense weights");
            }
        }
        let mut kinds = self.phases.iter().filter_map(Phase::mask);
        let first = kinds.next();
        // A weight has one mask, which a new kind of phase would inherit until the next refresh.
        if kinds.any(|kind| Some(kind) != first) { refuse("a second kind of mask") } else { Ok(()) }
    }
}
