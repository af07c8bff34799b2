//! Words of the contract as the kernels have them.

use sparse24_cuda::attention;

use crate::backend::{AttentionMask, AttentionShape, Beta};

impl From<Beta> for sparse24_cuda::Beta {
    fn from(beta: Beta) -> Self {
        match beta {
            Beta::Overwrite => Self::Overwrite,
            Beta::Accumulate => Self::Accumulate,
        }
    }
}

impl From<AttentionShape> for attention::AttentionShape {
    fn from(shape: AttentionShape) -> Self {
        let AttentionShape { batch, heads, queries, keys, mask } = shape;
        let mask = match mask {
            AttentionMask::Causal => attention::AttentionMask::Causal,
            AttentionMask::Full => attention::AttentionMask::Full,
        };
        Self { batch, heads, queries, keys, mask }
    }
}
