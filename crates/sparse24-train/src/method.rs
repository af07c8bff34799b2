//! A training method is a value: phases, each with its operands; what the masks do between steps;
//! how wide the feed-forward is.
//!
//! Every method of the paper is a composition of these choices, so no other file asks which method
//! runs. Adding a method is adding a row to [`PRESETS`], and at most one variant to one choice.
//! Deliberately absent: how an operand is multiplied (a backend's matter).

use std::collections::BTreeMap;

use sparse24_core::{
    MaskKind,
    mvue::Estimator,
    phase::{Fraction, Refresh},
};

use crate::optim::{AdamVariant, MaskedDecay};

mod check;
mod preset;
pub mod words;

pub use preset::{PRESETS, Preset};

/// How a transformer is pre-trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Method {
    /// The row of the table it began as.
    pub name: &'static str,
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
    pub dgrad: DgradOperand,
    /// The gradient operand of dW = dZ^T X.
    pub wgrad: GradientOperand,
}

/// What the forward of a phase multiplies by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
pub enum PhaseKind {
    /// Pruned weights.
    Sparse,
    /// The weights as they are.
    Dense,
}

impl core::fmt::Display for PhaseKind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Sparse => "sparse",
            Self::Dense => "dense",
        })
    }
}

/// When a phase ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Until {
    /// After floor(fraction * steps) optimizer steps of the run.
    Fraction(Fraction),
    /// After the first step at which Adam's variance [has
    /// settled](sparse24_core::phase::has_settled), but within these bounds (STEP).
    VarianceSettled {
        /// Not before.
        earliest: Fraction,
        /// Not after.
        latest: Fraction,
    },
}

/// The weight operand of the forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOperand {
    /// W.
    Dense,
    /// S(W): W under the mask of this kind that is searched in it.
    Pruned(MaskKind, KeptValues),
}

/// What becomes of kept values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptValues {
    /// They stay.
    Identity,
    /// Soft-thresholded, with the tensor's scale fixed at the start (S-STE).
    SoftThreshold,
}

/// The weight operand of dgrad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DgradOperand {
    /// W.
    Dense,
    /// What the forward multiplies by. A product that contracts rows is 2:4 only where the mask is
    /// transposable; another is computed densely.
    AsForward,
    /// W under the forward's mask and a column-wise one in another order of rows (Bi-Mask), see
    /// [`sparse24_core::permute`].
    Permuted,
}

/// The gradient operand of the weight gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientOperand {
    /// dZ.
    Dense,
    /// An unbiased 2:4 sample of dZ^T.
    Mvue(Estimator),
}

/// Which operands of a sparsifiable weight a method multiplies by, besides the weight itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PrunedOperands {
    /// None.
    None = 0,
    /// One, for all products.
    One = 1,
    /// One for the forward, another for dgrad.
    Two = 2,
}

/// The last steps of phases that end by a criterion, by index, as far as that is decided.
pub type Ends = BTreeMap<usize, u32>;

impl Phase {
    /// Every operand dense, to the end of the run.
    pub const DENSE: Self = Self {
        until: Until::Fraction(Fraction::ONE),
        optimizer: AdamVariant::Standard,
        forward: WeightOperand::Dense,
        dgrad: DgradOperand::Dense,
        wgrad: GradientOperand::Dense,
    };

    /// The mask that the forward needs, if it is pruned.
    #[must_use]
    pub fn mask(&self) -> Option<MaskKind> {
        match self.forward {
            WeightOperand::Pruned(kind, _) => Some(kind),
            WeightOperand::Dense => None,
        }
    }

    /// Sparse when the forward is pruned.
    #[must_use]
    pub fn kind(&self) -> PhaseKind {
        if self.forward == WeightOperand::Dense { PhaseKind::Dense } else { PhaseKind::Sparse }
    }

    /// The last optimizer step of the phase at the latest.
    #[must_use]
    pub fn last_step(&self, steps: u32) -> u32 {
        match self.until {
            Until::Fraction(fraction) => fraction.of(steps),
            // Whatever the fraction, a variance must be seen once to have settled.
            Until::VarianceSettled { latest, .. } => latest.of(steps).max(1).min(steps),
        }
    }
}

impl Method {
    /// A row of [`PRESETS`]; `lambda` is its decay factor, where it has one.
    #[must_use]
    pub fn preset(name: &str, lambda: f32) -> Option<Self> {
        PRESETS.iter().find(|preset| preset.name == name).map(|preset| (preset.build)(lambda))
    }

    /// The last optimizer step of a phase, given the ends that are decided; one whose end is not
    /// ends as late as it may, and the last with the run.
    #[must_use]
    pub fn last_step(&self, phase: usize, steps: u32, ends: &Ends) -> u32 {
        if phase + 1 == self.phases.len() {
            return steps;
        }
        ends.get(&phase).copied().unwrap_or_else(|| self.phases[phase].last_step(steps))
    }

    /// Whether a phase has a step.
    #[must_use]
    pub fn has_steps(&self, phase: usize, steps: u32, ends: &Ends) -> bool {
        self.last_step(phase, steps, ends)
            > phase.checked_sub(1).map_or(0, |before| self.last_step(before, steps, ends))
    }

    /// The index of the phase that optimizer step `step` (1, 2, ...) of `steps` belongs to. Step 0,
    /// the initial weights, is the first's.
    #[must_use]
    pub fn phase_at(&self, step: u32, steps: u32, ends: &Ends) -> usize {
        let last = self.phases.len() - 1;
        (0..last).find(|&phase| step.max(1) <= self.last_step(phase, steps, ends)).unwrap_or(last)
    }

    /// The last step of each phase whose forward is pruned, in order: after it the weights under
    /// their masks are a 2:4 model. A phase without a step has none.
    #[must_use]
    pub fn last_sparse_steps(&self, steps: u32, ends: &Ends) -> Vec<u32> {
        let is_taken = |&phase: &usize| {
            self.phases[phase].kind() == PhaseKind::Sparse && self.has_steps(phase, steps, ends)
        };
        (0..self.phases.len())
            .filter(is_taken)
            .map(|phase| self.last_step(phase, steps, ends))
            .collect()
    }

    /// What must be kept of each sparsifiable weight.
    #[must_use]
    pub fn pruned_operands(&self) -> PrunedOperands {
        let has = |wanted: fn(&Phase) -> bool| self.phases.iter().any(wanted);
        match (
            has(|phase| phase.mask().is_some()),
            has(|phase| phase.dgrad == DgradOperand::Permuted),
        ) {
            (false, _) => PrunedOperands::None,
            (true, false) => PrunedOperands::One,
            (true, true) => PrunedOperands::Two,
        }
    }

    /// Whether any weight gradient is sampled.
    #[must_use]
    pub fn samples(&self) -> bool {
        self.phases.iter().any(|phase| matches!(phase.wgrad, GradientOperand::Mvue(_)))
    }

    /// Whether any phase watches Adam's variance.
    #[must_use]
    pub fn watches_variance(&self) -> bool {
        self.phases.iter().any(|phase| matches!(phase.until, Until::VarianceSettled { .. }))
    }
}

#[cfg(test)]
mod tests;
