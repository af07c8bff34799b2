//! A training method is a value: phases with their operands, the refresh of masks, masked decay,
//! and the width of the feed-forward network.
//!
//! Every method is a composition of these choices, so no other file asks for a method's name. A new
//! method is a row of [`PRESETS`] and at most one variant of one choice.

use std::collections::BTreeMap;

use sparse24_core::{
    MaskKind,
    mvue::Estimator,
    phase::{Fraction, Refresh},
};

use crate::{
    backend::op::Orientation,
    optim::{AdamVariant, MaskedDecay},
};

mod check;
mod preset;
pub mod words;

pub use preset::{PRESETS, Preset};

/// A pre-training method.
#[derive(Debug, Clone, PartialEq)]
pub struct Method {
    /// Name of its row in [`PRESETS`].
    pub name: &'static str,
    /// d_ff as a share of the model's. Whoever sizes the model applies it: a trainer takes the d_ff
    /// of its recipe's model as it is.
    pub width: Fraction,
    /// Steps between mask searches.
    pub refresh: Refresh,
    /// Masked decay in phases whose forward is pruned.
    pub decay: MaskedDecay,
    /// Phases in order; the last one ends with the run. Without one, [`Self::phase_at`] and
    /// [`Self::last_step`] panic; [`Self::check`] refuses it.
    pub phases: Vec<Phase>,
}

/// A phase of training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phase {
    /// End of the phase.
    pub until: Until,
    /// Variant of Adam.
    pub optimizer: AdamVariant,
    /// Weight operand of Z = X W^T.
    pub forward: WeightOperand,
    /// Weight operand of dX = dZ W.
    pub dgrad: DgradOperand,
    /// Gradient operand of dW = dZ^T X.
    pub wgrad: GradientOperand,
}

/// Whether the forward of a phase uses pruned weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
pub enum PhaseKind {
    /// Pruned weights.
    Sparse,
    /// Dense weights.
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

/// End of a phase.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Until {
    /// After floor(fraction * steps) optimizer steps of the run.
    Fraction(Fraction),
    /// After the first step at which Adam's variance [has
    /// settled](sparse24_core::phase::has_settled), but within these bounds (STEP).
    VarianceSettled {
        /// Earliest end, as a share of the run.
        earliest: Fraction,
        /// Latest end, as a share of the run.
        latest: Fraction,
    },
}

impl Until {
    /// Replaces each share of the run.
    #[must_use]
    pub fn map(self, share: impl Fn(Fraction) -> Fraction) -> Self {
        match self {
            Self::Fraction(fraction) => Self::Fraction(share(fraction)),
            Self::VarianceSettled { earliest, latest } => {
                Self::VarianceSettled { earliest: share(earliest), latest: share(latest) }
            }
        }
    }
}

/// The weight operand of the forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOperand {
    /// W.
    Dense,
    /// S(W): W under its mask of this kind.
    Pruned(MaskKind, KeptValues),
}

/// Map of kept values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptValues {
    /// Unchanged.
    Identity,
    /// Soft threshold with a scale per tensor, fixed at the start (S-STE).
    SoftThreshold,
}

/// The weight operand of dgrad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DgradOperand {
    /// W.
    Dense,
    /// The forward's operand. This product contracts rows, so it is 2:4 only under a transposable
    /// mask, and computed densely under another.
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

/// Last step, by index, of each phase that ended by a criterion or directly before v was frozen.
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

    /// Whether it watches Adam's variance.
    #[must_use]
    pub fn watches(&self) -> bool {
        matches!(self.until, Until::VarianceSettled { .. })
    }

    /// Kind of the forward's mask, if it is pruned.
    #[must_use]
    pub fn mask(&self) -> Option<MaskKind> {
        if let WeightOperand::Pruned(kind, _) = self.forward { Some(kind) } else { None }
    }

    /// Sparse when the forward is pruned.
    #[must_use]
    pub fn kind(&self) -> PhaseKind {
        if self.forward == WeightOperand::Dense { PhaseKind::Dense } else { PhaseKind::Sparse }
    }

    /// Whether dgrad's operand is 2:4. It contracts rows: a row-wise mask does not make it so, and
    /// a permuted one only in another order of rows; both are multiplied densely.
    #[must_use]
    pub fn has_sparse_dgrad(&self) -> bool {
        self.dgrad == DgradOperand::AsForward && self.mask() == Some(MaskKind::Transposable)
    }

    /// Latest possible last optimizer step of the phase.
    #[must_use]
    pub fn last_step(&self, steps: u32) -> u32 {
        match self.until {
            Until::Fraction(fraction) => fraction.of(steps),
            // At least one step is needed to see a settled variance.
            Until::VarianceSettled { latest, .. } => latest.of(steps).max(1).min(steps),
        }
    }
}

impl Method {
    /// A row of [`PRESETS`]; `lambda` is its decay factor, where it has one.
    #[must_use]
    pub fn preset(name: &str, lambda: f32) -> Option<Self> {
        PRESETS.iter().find(|preset| preset.name == name).map(|preset| preset.method(lambda))
    }

    /// Last optimizer step of a phase: decided, or else the latest possible; the last phase ends
    /// with the run.
    #[must_use]
    pub fn last_step(&self, phase: usize, steps: u32, ends: &Ends) -> u32 {
        if phase + 1 == self.phases.len() {
            return steps;
        }
        ends.get(&phase).copied().unwrap_or_else(|| self.phases[phase].last_step(steps))
    }

    /// Whether a phase has at least one step.
    #[must_use]
    pub fn has_steps(&self, phase: usize, steps: u32, ends: &Ends) -> bool {
        self.last_step(phase, steps, ends)
            > phase.checked_sub(1).map_or(0, |before| self.last_step(before, steps, ends))
    }

    /// Index of the phase of optimizer step `step` (1, 2, ...) of `steps`; for step 0, the initial
    /// weights, the phase of step 1.
    #[must_use]
    pub fn phase_at(&self, step: u32, steps: u32, ends: &Ends) -> usize {
        let last = self.phases.len() - 1;
        (0..last).find(|&phase| step.max(1) <= self.last_step(phase, steps, ends)).unwrap_or(last)
    }

    /// Last step of each phase whose forward is pruned and that has steps: after it the weights
    /// under their masks are a 2:4 model.
    #[must_use]
    pub fn last_sparse_steps(&self, steps: u32, ends: &Ends) -> Vec<u32> {
        let is_taken = |&phase: &usize| {
            self.phases[phase].kind() == PhaseKind::Sparse && self.has_steps(phase, steps, ends)
        };
        let taken = (0..self.phases.len()).filter(is_taken);
        taken.map(|phase| self.last_step(phase, steps, ends)).collect()
    }

    /// The pruned operands that a weight has, by the products that their masks make 2:4: the
    /// forward's, and one of dgrad's own.
    #[must_use]
    pub fn pruned_operands(&self) -> &'static [Orientation] {
        let masks = || self.phases.iter().filter_map(Phase::mask);
        let permuted = |phase: &Phase| phase.dgrad == DgradOperand::Permuted;
        let has_own = self.phases.iter().any(|phase| permuted(phase) && phase.mask().is_some());
        match (masks().next(), masks().all(|kind| kind == MaskKind::Transposable)) {
            (None, _) => &[],
            _ if has_own => &[Orientation::Forward, Orientation::Permuted],
            (Some(_), true) => &[Orientation::Both],
            (Some(_), false) => &[Orientation::Forward],
        }
    }

    /// Whether any weight gradient is sampled.
    #[must_use]
    pub fn samples(&self) -> bool {
        self.phases.iter().any(|phase| matches!(phase.wgrad, GradientOperand::Mvue(_)))
    }

    /// Whether a longer run may keep the phase's end: it watches v, or updates v before a freeze.
    #[must_use]
    pub fn keeps_end(&self, phase: usize) -> bool {
        let is_frozen = |of: &Phase| of.optimizer == AdamVariant::FrozenVariance;
        let thaws = |of: &Phase| !is_frozen(of) && self.phases[phase..].iter().any(is_frozen);
        self.phases.get(phase).is_some_and(|of| of.watches() || thaws(of))
    }

    /// Whether any phase watches Adam's variance.
    #[must_use]
    pub fn watches_variance(&self) -> bool {
        self.phases.iter().any(Phase::watches)
    }
}
