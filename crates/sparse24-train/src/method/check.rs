//! Checks of methods. A backend's capabilities are compared in [`crate::trainer::Recipe::check`].

use sparse24_core::MaskKind;

use super::{DgradOperand, Ends, KeptValues, Method, Phase, Until, WeightOperand};
use crate::{Error, optim::AdamVariant};

const ROW_WISE: WeightOperand = WeightOperand::Pruned(MaskKind::RowWise, KeptValues::Identity);

impl Method {
    /// Checks that a run of `steps` can be trained.
    ///
    /// # Errors
    /// [`Error::Setting`] names the key of the first invalid choice.
    pub fn check(&self, steps: u32) -> Result<(), Error> {
        /// Steps of a long run, to compare fractions.
        const ALL: u32 = 1 << 24;
        let refuse = |key: &str, problem: &str| Err(Error::setting(key, problem));
        let ends: Vec<u32> = self.phases.iter().map(|phase| phase.last_step(ALL)).collect();
        let whole = |phase: &Phase| {
            matches!(phase.until, Until::Fraction(_)) && phase.last_step(ALL) == ALL
        };
        if !ends.is_sorted() || !self.phases.last().is_some_and(whole) {
            return refuse(
                "method.phases",
                "expected phases that follow each other, the last one to the end of the run",
            );
        }
        let mut pruned =
            self.phases.iter().filter(|phase| phase.mask().is_some()).map(|phase| phase.forward);
        let first = pruned.next();
        // A weight has one mask, which a phase of another kind would inherit until the next
        // refresh.
        if pruned.any(|forward| Some(forward) != first) {
            return refuse(
                "method.forward",
                "expected all sparse phases to prune the forward's operand alike",
            );
        }
        if self
            .phases
            .iter()
            .any(|phase| phase.dgrad == DgradOperand::Permuted && phase.forward != ROW_WISE)
        {
            return refuse(
                "method.dgrad",
                "expected a row-wise forward beside \"permuted\" (method.forward = \"row-wise\")",
            );
        }
        let starts_at_once = |index: usize| {
            index
                .checked_sub(1)
                .is_none_or(|before| self.last_step(before, steps, &Ends::new()) == 0)
        };
        if self.phases.iter().enumerate().any(|(index, phase)| {
            phase.optimizer == AdamVariant::FrozenVariance && starts_at_once(index)
        }) {
            return refuse(
                "method.phases",
                "expected at least one step before a frozen variance, found none",
            );
        }
        Ok(())
    }
}
