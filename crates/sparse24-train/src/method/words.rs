//! The words of a configuration for the choices of a method.

use core::{fmt, str::FromStr};

use sparse24_core::{
    MaskKind,
    mvue::Estimator,
    phase::{Fraction, Refresh},
};

use super::{DgradOperand, GradientOperand, KeptValues, Method, Phase, Until, WeightOperand};
use crate::optim::{AdamVariant, MaskedDecay};

/// A choice with a word for each of its values.
pub trait Choice: Copy + PartialEq + 'static {
    /// Each value with its word.
    const WORDS: &'static [(&'static str, Self)];

    /// The value of a word.
    #[must_use]
    fn of(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|&(_, value)| value)
    }

    /// The word of a value; `other` if it has none.
    #[must_use]
    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, value)| *value == self).map_or("other", |&(word, _)| word)
    }
}

/// Place of masked decay, without its factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecayPlace {
    /// No decay.
    None,
    /// [`MaskedDecay::OnGradients`].
    OnGradients,
    /// [`MaskedDecay::OnWeights`].
    OnWeights,
}

impl DecayPlace {
    /// Decay at this place, with this factor.
    #[must_use]
    pub fn with(self, lambda: f32) -> MaskedDecay {
        match self {
            Self::None => MaskedDecay::None,
            Self::OnGradients => MaskedDecay::OnGradients(lambda),
            Self::OnWeights => MaskedDecay::OnWeights(lambda),
        }
    }

    /// The place of a decay.
    #[must_use]
    pub fn of_decay(decay: MaskedDecay) -> Self {
        match decay {
            MaskedDecay::None => Self::None,
            MaskedDecay::OnGradients(_) => Self::OnGradients,
            MaskedDecay::OnWeights(_) => Self::OnWeights,
        }
    }
}

impl Choice for DecayPlace {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("none", Self::None),
        ("on-gradients", Self::OnGradients),
        ("on-weights", Self::OnWeights),
    ];
}

impl Choice for WeightOperand {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("dense", Self::Dense),
        ("transposable", Self::Pruned(MaskKind::Transposable, KeptValues::Identity)),
        ("row-wise", Self::Pruned(MaskKind::RowWise, KeptValues::Identity)),
        ("soft-threshold", Self::Pruned(MaskKind::RowWise, KeptValues::SoftThreshold)),
    ];
}

impl Choice for DgradOperand {
    const WORDS: &'static [(&'static str, Self)] =
        &[("dense", Self::Dense), ("as-forward", Self::AsForward), ("permuted", Self::Permuted)];
}

impl Choice for GradientOperand {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("dense", Self::Dense),
        ("mvue", Self::Mvue(Estimator::Exact)),
        ("mvue-approximate", Self::Mvue(Estimator::Approximate)),
    ];
}

/// A phase in words: `dense`, `sparse` (the method's operands) or `frozen` (the same, with Adam's
/// variance frozen), and after a colon the share of the run at which it ends (`5/6`) or `settled`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PhaseWord {
    /// Operands of the phase.
    pub operands: PhaseOperands,
    /// Variant of Adam.
    pub optimizer: AdamVariant,
    /// End of the phase; optional in the last one.
    pub until: Until,
}

/// Operands of a phase in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PhaseOperands {
    /// Dense operands.
    Dense,
    /// The method's operands.
    OfMethod,
}

impl Choice for (PhaseOperands, AdamVariant) {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("dense", (PhaseOperands::Dense, AdamVariant::Standard)),
        ("sparse", (PhaseOperands::OfMethod, AdamVariant::Standard)),
        ("frozen", (PhaseOperands::OfMethod, AdamVariant::FrozenVariance)),
    ];
}

impl PhaseWord {
    const SETTLED: &'static str = "settled";

    /// Describes a phase of a method.
    #[must_use]
    pub fn of(phase: &Phase) -> Self {
        let operands =
            if phase.is_dense() { PhaseOperands::Dense } else { PhaseOperands::OfMethod };
        Self { operands, optimizer: phase.optimizer, until: phase.until }
    }
}

impl FromStr for PhaseWord {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (kind, end) =
            text.split_once(':').map_or((text, None), |(kind, end)| (kind, Some(end)));
        let (operands, optimizer) = Choice::of(kind).ok_or(())?;
        let until = match end {
            None => Until::Fraction(Fraction::ONE),
            Some(Self::SETTLED) => Until::SETTLED,
            Some(fraction) => Until::Fraction(fraction.parse().map_err(drop)?),
        };
        Ok(Self { operands, optimizer, until })
    }
}

impl fmt::Display for PhaseWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str((self.operands, self.optimizer).word())?;
        match self.until {
            Until::Fraction(Fraction::ONE) => Ok(()),
            Until::Fraction(fraction) => write!(f, ":{fraction}"),
            Until::VarianceSettled { .. } => write!(f, ":{}", Self::SETTLED),
        }
    }
}

impl Phase {
    /// Whether all of its operands are dense.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        self.forward == WeightOperand::Dense
            && self.dgrad != DgradOperand::Permuted
            && self.wgrad == GradientOperand::Dense
    }

    /// The names of a linear layer's products with a 2:4 operand, and of the others.
    #[must_use]
    pub fn product_words(&self) -> [String; 2] {
        let products = [
            ("forward", self.mask().is_some()),
            ("dgrad", self.has_sparse_dgrad()),
            ("wgrad", self.wgrad != GradientOperand::Dense),
        ];
        [true, false].map(|sparse| {
            let names = products.iter().filter(|(_, is_sparse)| *is_sparse == sparse);
            names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
        })
    }
}

impl Method {
    /// The operands of the method's phases that are not dense, or dense ones.
    #[must_use]
    pub fn sparse_phase(&self) -> Phase {
        self.phases.iter().copied().find(|phase| !phase.is_dense()).unwrap_or(Phase::DENSE)
    }

    /// The refresh of masks in words; empty for a method without masks.
    #[must_use]
    pub fn refresh_words(&self) -> String {
        match self.refresh {
            _ if self.phases.iter().all(|phase| phase.mask().is_none()) => String::new(),
            Refresh::Every(interval) if interval.get() > 1 => format!("every {interval} steps"),
            _ => "each step".to_owned(),
        }
    }

    /// The phases as a configuration lists them.
    #[must_use]
    pub fn phase_words(&self) -> Vec<String> {
        self.phases.iter().map(|phase| PhaseWord::of(phase).to_string()).collect()
    }
}
