//! Words of the contract as the kernels have them.

use sparse24_core::op;

use crate::backend::{Activation, AttentionMask, AttentionShape, Beta};

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

impl From<Activation> for op::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Gelu => Self::Gelu,
            Activation::Geglu => Self::Geglu,
            Activation::Swiglu => Self::Swiglu,
        }
    }
}
