//! Conversions between this crate's operation records and those of core.

use sparse24_core::op;

use crate::backend::{Activation, AttentionMask, AttentionShape, Beta, Dropout};

impl From<Beta> for op::Accumulate {
    fn from(beta: Beta) -> Self {
        match beta {
            Beta::Overwrite => Self::Overwrite,
            Beta::Accumulate => Self::Add,
        }
    }
}

impl From<AttentionShape> for op::AttentionShape {
    fn from(shape: AttentionShape) -> Self {
        let AttentionShape { batch, heads, queries, keys, mask } = shape;
        let mask = match mask {
            AttentionMask::Causal => op::AttentionMask::Causal,
            AttentionMask::Full => op::AttentionMask::Full,
        };
        Self { batch, heads, queries, keys, mask }
    }
}

impl From<Dropout> for op::Dropout {
    fn from(Dropout { p, site }: Dropout) -> Self {
        Self { p, site }
    }
}

impl From<Activation> for op::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Gelu => Self::Gelu,
            Activation::Geglu => Self::Geglu,
            Activation::Swiglu => Self::Swiglu,
        }
    }
}
