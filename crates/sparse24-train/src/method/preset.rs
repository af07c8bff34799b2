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
    /// The word of `method.name`.
    pub name: &'static str,
    /// The publication, and where its code and its text differ, which of them this follows.
    pub source: &'static str,
    /// Factor of masked decay of the source; the paper's for GPT-2 124M if the method has no decay.
    pub lambda: f32,
    /// Builds the method with a factor of masked decay, for methods that have it.
    build: fn(f32) -> Method,
}

/// Hu et al. 2024, arXiv 2404.01847, table 2: GPT-2 124M.
const PAPER_LAMBDA: f32 = 6e-5;

/// The table of methods.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "dense",
        source: "the baseline",
        lambda: PAPER_LAMBDA,
        build: |_| Method::dense(),
    },
    Preset {
        name: "half",
        source: "the baseline of Hu et al. 2024, arXiv 2404.01847: as many multiply-adds as a \
            2:4 feed-forward",
        lambda: PAPER_LAMBDA,
        build: |_| Method { width: fraction(1, 2), ..Method::dense() },
    },
    Preset {
        name: "ste",
        source: "Hu et al. 2024, arXiv 2404.01847, tables 1 (lambda 0) and 10 (first row): FST \
            without decay, MVUE and dense finish; the estimator is Bengio et al. 2013, arXiv \
            1308.3432",
        lambda: PAPER_LAMBDA,
        build: |_| Method {
            refresh: Refresh::Every(REFRESH),
            phases: vec![TRANSPOSABLE],
            ..Method::dense()
        },
    },
    Preset {
        name: "ste-row-wise",
        source: "the straight-through estimator of Bengio et al. 2013, arXiv 1308.3432, with \
            row-wise masks: SR-STE without decay",
        lambda: PAPER_LAMBDA,
        build: |_| Method { phases: vec![ROW_WISE], ..Method::dense() },
    },
    Preset {
        name: "sr-ste",
        source: "Zhou et al. 2021, arXiv 2102.04010; decay on gradients as in its code \
            (aojunzz/NM-sparsity, devkit/sparse_ops)",
        lambda: 2e-4,
        build: |lambda| Method {
            decay: MaskedDecay::OnGradients(lambda),
            phases: vec![ROW_WISE],
            ..Method::dense()
        },
    },
    Preset {
        name: "fst",
        source: "Hu et al. 2024, arXiv 2404.01847",
        lambda: PAPER_LAMBDA,
        build: Method::fst,
    },
    Preset {
        name: "step",
        source: "Lu et al. 2023, arXiv 2302.01172",
        lambda: PAPER_LAMBDA,
        build: |_| Method {
            phases: vec![
                Phase { until: Until::SETTLED, ..Phase::DENSE },
                Phase { optimizer: AdamVariant::FrozenVariance, ..ROW_WISE },
            ],
            ..Method::dense()
        },
    },
    Preset {
        name: "bi-mask",
        source: "Zhang et al. 2023, arXiv 2302.06058; decay on gradients as in its DeiT code, \
            which trains with AdamW (zyxxmu/Bi-Mask)",
        lambda: 2e-4,
        build: |lambda| Method {
            decay: MaskedDecay::OnGradients(lambda),
            phases: vec![Phase { dgrad: DgradOperand::Permuted, ..ROW_WISE }],
            ..Method::dense()
        },
    },
    Preset {
        name: "s-ste",
        source: "Hu et al. 2024, arXiv 2409.09099",
        lambda: PAPER_LAMBDA,
        build: |_| Method {
            phases: vec![Phase {
                forward: WeightOperand::Pruned(MaskKind::RowWise, KeptValues::SoftThreshold),
                wgrad: GradientOperand::Mvue(Estimator::Exact),
                ..ROW_WISE
            }],
            ..Method::dense()
        },
    },
];

const fn fraction(numerator: u32, denominator: u32) -> Fraction {
    match Fraction::new(numerator, denominator) {
        Ok(fraction) => fraction,
        Err(_) => unreachable!(),
    }
}

/// Row-wise masks to the end of the run; dX uses the weights that Z used, wgrad is dense.
const ROW_WISE: Phase = Phase {
    forward: WeightOperand::Pruned(MaskKind::RowWise, KeptValues::Identity),
    dgrad: DgradOperand::AsForward,
    ..Phase::DENSE
};

/// Transposable masks to the end of the run, in forward and dgrad; wgrad is dense.
const TRANSPOSABLE: Phase = Phase {
    forward: WeightOperand::Pruned(MaskKind::Transposable, KeptValues::Identity),
    ..ROW_WISE
};

/// l, steps between mask searches.
const REFRESH: NonZeroU32 = NonZeroU32::new(40).unwrap();

impl Until {
    /// STEP's bounds for its switch: a tenth and a half of the run.
    pub const SETTLED: Self =
        Self::VarianceSettled { earliest: fraction(1, 10), latest: fraction(1, 2) };
}

impl Preset {
    /// The method, with a factor of masked decay for methods that have it.
    #[must_use]
    pub fn method(&self, lambda: f32) -> Method {
        Method { name: self.name, ..(self.build)(lambda) }
    }
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
    /// on the gradients, and a dense finish over the last sixth of the run.
    #[must_use]
    pub fn fst(lambda: f32) -> Self {
        Self {
            name: "fst",
            refresh: Refresh::Every(REFRESH),
            decay: MaskedDecay::OnGradients(lambda),
            phases: vec![
                Phase {
                    until: Until::Fraction(Fraction::FIVE_SIXTHS),
                    wgrad: GradientOperand::Mvue(Estimator::Exact),
                    ..TRANSPOSABLE
                },
                Phase::DENSE,
            ],
            ..Self::dense()
        }
    }
}
