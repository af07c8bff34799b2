//! A training method is a value: phases, each with its operands; what the masks do between steps; how wide the feed-forward is.
//!
//! Every method of the paper is a composition of these choices, so no other file asks which method runs. Adding a method is adding a row
//! to [`PRESETS`], and at most one variant to one choice. Deliberately absent: how an operand is multiplied (a backend's matter).

use core::num::NonZeroU32;

use sparse24_core::{
    MaskKind,
    mvue::Estimator,
    phase::{Fraction, Refresh},
};

use crate::optim::{AdamVariant, MaskedDecay};

mod check;

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
    pub dgrad: WeightOperand,
    /// The gradient operand of dW = dZ^T X.
    pub wgrad: GradientOperand,
}

/// What the forward of a phase multiplies by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "run", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
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

    /// Sparse when the forward is pruned.
    #[must_use]
    pub fn kind(&self) -> PhaseKind {
        if self.forward == WeightOperand::Dense { PhaseKind::Dense } else { PhaseKind::Sparse }
    }
}

/// A row of the table of methods.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// The method, with this factor of masked decay where it has one.
    pub build: fn(f32) -> Method,
}

/// The table of methods.
pub const PRESETS: &[Preset] = &[
    Preset { name: "dense", source: "the baseline", build: |_| Method::dense() },
    Preset { name: "fst", source: "Hu et al. 2024, arXiv 2404.01847", build: Method::fst },
];

impl Method {
    /// A row of [`PRESETS`]; `lambda` is its decay factor, where it has one.
    #[must_use]
    pub fn preset(name: &str, lambda: f32) -> Option<Self> {
        PRESETS.iter().find(|preset| preset.name == name).map(|preset| (preset.build)(lambda))
    }

    /// No sparsity.
    #[must_use]
    pub fn dense() -> Self {
        Self { name: "dense", width: Fraction::ONE, refresh: Refresh::EachStep, decay: MaskedDecay::None, phases: vec![Phase::DENSE] }
    }

    /// Fully sparse training: transposable masks in forward and dgrad, MVUE in wgrad, masked decay on the gradients, a dense finish.
    #[must_use]
    pub fn fst(lambda: f32) -> Self {
        const REFRESH: NonZeroU32 = NonZeroU32::new(40).unwrap();
        let transposable = WeightOperand::Pruned(Pruner::Mask(MaskKind::Transposable), KeptValues::Identity);
        Self {
            name: "fst",
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
    use sparse24_core::{MaskKind, mvue::Estimator, phase::Fraction};

    use super::*;

    #[test]
    fn fst_turns_dense_after_five_sixths() {
        let method = Method::fst(0.0);
        let kinds = [0, 1, 83, 84, 100].map(|t| method.phases[method.phase_at(t, 100)].kind());
        assert_eq!(kinds, [PhaseKind::Sparse, PhaseKind::Sparse, PhaseKind::Sparse, PhaseKind::Dense, PhaseKind::Dense]);
    }

    #[test]
    fn every_preset_has_its_own_name() {
        for preset in PRESETS {
            assert_eq!(Method::preset(preset.name, 0.0).map(|method| method.name), Some(preset.name));
        }
        assert_eq!(Method::preset("fts", 0.0), None);
    }

    /// The methods of the paper's comparison, and S-STE, are values of the type; which of them the trainer runs is `check`'s answer.
    #[test]
    fn the_other_methods_are_values_too() {
        let row = WeightOperand::Pruned(Pruner::Mask(MaskKind::RowWise), KeptValues::Identity);
        let whole = |forward, dgrad, wgrad| Phase { forward, dgrad, wgrad, ..Phase::DENSE };
        let ste = Method {
            name: "ste",
            refresh: Refresh::EachStep,
            phases: vec![whole(row, WeightOperand::Dense, GradientOperand::Dense)],
            ..Method::dense()
        };
        let half = Method { name: "half", width: Fraction::new(1, 2).unwrap(), ..Method::dense() };
        let sr_ste = Method { name: "sr-ste", decay: MaskedDecay::OnWeights(2e-4), ..ste.clone() };
        let tenth_to_half = Until::VarianceSettled { earliest: Fraction::new(1, 10).unwrap(), latest: Fraction::new(1, 2).unwrap() };
        let frozen = Phase { optimizer: AdamVariant::FrozenVariance, ..ste.phases[0] };
        let step = Method { name: "step", phases: vec![Phase { until: tenth_to_half, ..Phase::DENSE }, frozen], ..ste.clone() };
        let permuted = WeightOperand::Pruned(Pruner::ColumnWisePermuted, KeptValues::Identity);
        let bi_mask = Method { name: "bi-mask", phases: vec![whole(row, permuted, GradientOperand::Dense)], ..ste.clone() };
        let soft = WeightOperand::Pruned(Pruner::Mask(MaskKind::RowWise), KeptValues::SoftThreshold);
        let sampled = GradientOperand::Mvue(Estimator::Exact);
        let s_ste = Method { name: "s-ste", phases: vec![whole(soft, WeightOperand::Dense, sampled)], ..ste.clone() };

        let refusal = |method: &Method| method.check().err().map(|error| error.to_string());
        assert_eq!([&ste, &half, &sr_ste].map(refusal), [None, None, None]);
        let refusals = [&step, &bi_mask, &s_ste].map(|method| refusal(method).unwrap());
        assert_eq!(
            refusals,
            [
                "method step: a phase that watches or freezes Adam's variance is not supported yet",
                "method bi-mask: a dgrad operand pruned otherwise than the forward's is not supported yet",
                "method s-ste: the soft threshold is not supported yet",
            ]
        );
    }
}
