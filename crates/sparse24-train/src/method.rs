//! A training method is a value: phases, each with its operands; what the masks do between steps; how wide the feed-forward is.
//!
//! Every method of the paper is a composition of these choices, so no other file asks which method runs. Adding a method is adding a row
//! to [`Method::PRESETS`], and at most one variant to one choice. Deliberately absent: how an operand is multiplied (a backend's matter).

use core::num::NonZeroU32;

use sparse24_core::{
    MaskKind,
    mvue::Estimator,
    phase::{Fraction, Refresh},
};

use crate::optim::{AdamVariant, MaskedDecay};

/// How a transformer is pre-trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Method {
    /// The row of the table it began as.
    pub name: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// The feed-forward width, as a share of the model's.
    pub width: Fraction,
    /// When masks are searched anew.
    pub refresh: Refresh,
    /// Where masked decay enters, in phases whose forward is pruned.
    pub decay: MaskedDecay,
    /// In order; the last one ends with the run.
    pub phases: Vec<Phase>,
}

/// One stretch of training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phase {
    /// When it ends.
    pub until: Until,
    /// What it does to Adam.
    pub optimizer: AdamVariant,
    /// The weight operand of Z = X W^T.
    pub forward: WeightOperand,
    /// The weight operand of dX = dZ W.
    pub dgrad: WeightOperand,
    /// The gradient operand of dW = dZ^T X.
    pub wgrad: GradientOperand,
}

/// When a phase ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Until {
    /// After floor(fraction * steps) optimizer steps of the run.
    Fraction(Fraction),
    /// When Adam's variance has settled, but within these bounds (STEP).
    VarianceSettled {
        /// Not before.
        earliest: Fraction,
        /// Not after.
        latest: Fraction,
    },
}

/// The weight operand of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOperand {
    /// W.
    Dense,
    /// S(W).
    Pruned(Pruner, KeptValues),
}

/// Which mask prunes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pruner {
    /// The mask of this kind, searched in W.
    Mask(MaskKind),
    /// A column-wise mask of the masked weights, their rows permuted first (Bi-Mask).
    ColumnWisePermuted,
}

/// What becomes of kept values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptValues {
    /// They stay.
    Identity,
    /// Soft-thresholded, with the tensor's scale fixed at the start (S-STE).
    SoftThreshold,
}

/// The gradient operand of the weight gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientOperand {
    /// dZ.
    Dense,
    /// An unbiased 2:4 sample of dZ^T.
    Mvue(Estimator),
}

impl Phase {
    const DENSE: Self = Self {
        until: Until::Fraction(Fraction::ONE),
        optimizer: AdamVariant::Standard,
        forward: WeightOperand::Dense,
        dgrad: WeightOperand::Dense,
        wgrad: GradientOperand::Dense,
    };

    /// The mask that the forward needs, if it is pruned.
    #[must_use]
    pub fn mask(&self) -> Option<MaskKind> {
        match self.forward {
            WeightOperand::Pruned(Pruner::Mask(kind), _) => Some(kind),
            _ => None,
        }
    }

    /// `sparse` when the forward is pruned, `dense` otherwise.
    #[must_use]
    pub fn label(&self) -> &'static str {
        if self.forward == WeightOperand::Dense { "dense" } else { "sparse" }
    }
}

impl Method {
    /// The names of the table's rows.
    pub const PRESETS: [&'static str; 2] = ["dense", "fst"];

    /// A row of the table; `lambda` is its decay factor, where it has one.
    #[must_use]
    pub fn preset(name: &str, lambda: f32) -> Option<Self> {
        match name {
            "dense" => Some(Self::dense()),
            "fst" => Some(Self::fst(lambda)),
            _ => None,
        }
    }

    /// No sparsity.
    #[must_use]
    pub fn dense() -> Self {
        Self {
            name: "dense",
            source: "the baseline",
            width: Fraction::ONE,
            refresh: Refresh::EachStep,
            decay: MaskedDecay::None,
            phases: vec![Phase::DENSE],
        }
    }

    /// Fully sparse training: transposable masks in forward and dgrad, MVUE in wgrad, masked decay on the gradients, a dense finish.
    #[must_use]
    pub fn fst(lambda: f32) -> Self {
        const REFRESH: NonZeroU32 = NonZeroU32::new(40).unwrap();
        let transposable = WeightOperand::Pruned(Pruner::Mask(MaskKind::Transposable), KeptValues::Identity);
        Self {
            name: "fst",
            source: "Hu et al. 2024, arXiv 2404.01847",
            width: Fraction::ONE,
            refresh: Refresh::Every(REFRESH),
            decay: MaskedDecay::OnGradients(lambda),
            phases: vec![
                Phase {
                    until: Until::Fraction(Fraction::FIVE_SIXTHS),
                    optimizer: AdamVariant::Standard,
                    forward: transposable,
                    dgrad: transposable,
                    wgrad: GradientOperand::Mvue(Estimator::Exact),
                },
                Phase::DENSE,
            ],
        }
    }

    /// The index of the phase that optimizer step `step` (1, 2, ...) of `steps` belongs to. Step 0, the initial weights, is the first's.
    #[must_use]
    pub fn phase_at(&self, step: u32, steps: u32) -> usize {
        let last = self.phases.len() - 1;
        self.phases[..last].iter().position(|phase| step.max(1) <= phase.last_step(steps)).unwrap_or(last)
    }
}

impl Phase {
    /// The last optimizer step of the phase at the latest.
    #[must_use]
    pub fn last_step(&self, steps: u32) -> u32 {
        match self.until {
            Until::Fraction(fraction) | Until::VarianceSettled { latest: fraction, .. } => fraction.of(steps),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Method;

    #[test]
    fn fst_turns_dense_after_five_sixths() {
        let method = Method::fst(0.0);
        let labels: Vec<_> = [0, 1, 83, 84, 100].iter().map(|&t| method.phases[method.phase_at(t, 100)].label()).collect();
        assert_eq!(labels, ["sparse", "sparse", "sparse", "dense", "dense"]);
    }

    #[test]
    fn every_preset_has_its_own_name() {
        for name in Method::PRESETS {
            assert_eq!(Method::preset(name, 0.0).map(|method| method.name), Some(name));
        }
        assert_eq!(Method::preset("fts", 0.0), None);
    }
}
