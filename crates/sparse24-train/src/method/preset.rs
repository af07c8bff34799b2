//! The table of methods.

use core::num::NonZeroU32;

use sparse24_core::{
    MaskKind,
    mvue::Estimator,
    phase::{Fraction, Refresh},
};

use super::{DgradOperand, GradientOperand, KeptValues, Method, Phase, Until, WeightOperand};
use crate::optim::{AdamVariant, MaskedDecay};

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
    Preset {
        name: "half",
        source: "the baseline of Hu et al. 2024, arXiv 2404.01847: as many multiply-adds as a 2:4 feed-forward",
        build: |_| Method { name: "half", width: HALF, ..Method::dense() },
    },
    Preset {
        name: "ste",
        source: "Bengio et al. 2013, arXiv 1308.3432, as Hu et al. 2024 compare it",
        build: |_| Method { name: "ste", phases: vec![ROW_WISE], ..Method::dense() },
    },
    Preset {
        name: "sr-ste",
        source: "Zhou et al. 2021, arXiv 2102.04010 (its lambda: 2e-4)",
        build: |lambda| Method {
            name: "sr-ste",
            decay: MaskedDecay::OnWeights(lambda),
            phases: vec![ROW_WISE],
            ..Method::dense()
        },
    },
    Preset { name: "fst", source: "Hu et al. 2024, arXiv 2404.01847", build: Method::fst },
    Preset {
        name: "step",
        source: "Lu et al. 2023, arXiv 2302.01172",
        build: |_| Method {
            name: "step",
            phases: vec![
                Phase { until: Until::SETTLED, ..Phase::DENSE },
                Phase { optimizer: AdamVariant::FrozenVariance, ..ROW_WISE },
            ],
            ..Method::dense()
        },
    },
    Preset {
        name: "bi-mask",
        source: "Zhang et al. 2023, arXiv 2302.06058 (its lambda: 2e-4)",
        build: |lambda| Method {
            name: "bi-mask",
            decay: MaskedDecay::OnWeights(lambda),
            phases: vec![Phase { dgrad: DgradOperand::Permuted, ..ROW_WISE }],
            ..Method::dense()
        },
    },
    Preset {
        name: "s-ste",
        source: "Hu et al. 2024, arXiv 2409.09099",
        build: |_| Method {
            name: "s-ste",
            phases: vec![Phase {
                forward: WeightOperand::Pruned(MaskKind::RowWise, KeptValues::SoftThreshold),
                wgrad: GradientOperand::Mvue(Estimator::Exact),
                ..ROW_WISE
            }],
            ..Method::dense()
        },
    },
];

const HALF: Fraction = match Fraction::new(1, 2) {
    Ok(half) => half,
    Err(_) => unreachable!(),
};

const TENTH: Fraction = match Fraction::new(1, 10) {
    Ok(tenth) => tenth,
    Err(_) => unreachable!(),
};

/// Row-wise masks to the end of the run, gradients straight through: dX is that of the weights that
/// Z was computed with.
const ROW_WISE: Phase = Phase {
    forward: WeightOperand::Pruned(MaskKind::RowWise, KeptValues::Identity),
    dgrad: DgradOperand::AsForward,
    ..Phase::DENSE
};

impl Until {
    /// STEP's bounds: a tenth and a half of the run.
    pub const SETTLED: Self = Self::VarianceSettled { earliest: TENTH, latest: HALF };
}

impl Method {
    /// No sparsity.
    #[must_use]
    pub fn dense() -> Self {
        Self {
            name: "dense",
            width: Fraction::ONE,
            refresh: Refresh::EachStep,
            decay: MaskedDecay::None,
            phases: vec![Phase::DENSE],
        }
    }

    /// Fully sparse training: transposable masks in forward and dgrad, MVUE in wgrad, masked decay
    /// on the gradients, a dense finish.
    #[must_use]
    pub fn fst(lambda: f32) -> Self {
        Self {
            name: "fst",
            refresh: Refresh::Every(REFRESH),
            decay: MaskedDecay::OnGradients(lambda),
            phases: vec![
                Phase {
                    until: Until::Fraction(Fraction::FIVE_SIXTHS),
                    forward: WeightOperand::Pruned(MaskKind::Transposable, KeptValues::Identity),
                    dgrad: DgradOperand::AsForward,
                    wgrad: GradientOperand::Mvue(Estimator::Exact),
                    ..Phase::DENSE
                },
                Phase::DENSE,
            ],
            ..Self::dense()
        }
    }
}

/// The paper's l.
const REFRESH: NonZeroU32 = NonZeroU32::new(40).unwrap();
