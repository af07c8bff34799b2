//! Checks of methods. A backend's capabilities are compared in [`crate::trainer::Recipe::check`].

use sparse24_core::MaskKind;

use super::{DgradOperand, Ends, KeptValues, Method, Phase, WeightOperand};
use crate::{Error, Result, optim::AdamVariant};

const ROW_WISE: WeightOperand = WeightOperand::Pruned(MaskKind::RowWise, KeptValues::Identity);

impl Method {
    /// Checks that a run of `steps` can be trained.
    ///
    /// # Errors
    /// [`Error::Setting`] names the key of the first invalid choice.
    pub fn check(&self, steps: u32) -> Result {
        /// Steps of a long run, to compare fractions.
        const ALL: u32 = 1 << 24;
        let refuse = |key: &str, problem: &str| Err(Error::setting(key, problem));
        let ends: Vec<u32> = self.phases.iter().map(|phase| phase.last_step(ALL)).collect();
        let whole = |phase: &Phase| !phase.watches() && phase.last_step(ALL) == ALL;
        if !ends.is_sorted() || !self.phases.last().is_some_and(whole) {
            return refuse(
                "method.phases",
                "expected phases that follow each other, the last one to the end of the run",
            );
        }
        let mut pruned = self.phases.iter().filter(|phase| phase.mask().is_some());
        let first = pruned.clone().next();
        let is_other = |phase: &Phase| first.is_some_and(|first| phase.forward != first.forward);
        // A weight has one mask, which a phase of another kind would inherit until the next
        // refresh. Groups lie within rows of W: the product sums along a row.
        if pruned.any(is_other) || first.and_then(Phase::mask) == Some(MaskKind::ColumnWise) {
            return refuse(
                "method.forward",
                "expected all sparse phases to prune the forward's operand alike, along its rows",
            );
        }
        let is_unlike = |of: &Phase| of.dgrad == DgradOperand::Permuted && of.forward != ROW_WISE;
        if self.phases.iter().any(is_unlike) {
            return refuse(
                "method.dgrad",
                "expected a row-wise forward beside \"permuted\" (method.forward = \"row-wise\")",
            );
        }
        let is_frozen = |phase: &Phase| phase.optimizer == AdamVariant::FrozenVariance;
        let last_step = |phase: usize| self.last_step(phase, steps, &Ends::new());
        let first = self.phases.iter().position(is_frozen);
        if first.is_some_and(|first| first == 0 || last_step(first - 1) == 0) {
            return refuse(
                "method.phases",
                "expected at least one step before a frozen variance, found none",
            );
        }
        Ok(())
    }
}
