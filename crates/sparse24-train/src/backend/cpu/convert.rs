//! Words of the contract as the kernels have them.

use ndarray::{ArrayView2, ArrayViewMut2};
use sparse24_cpu::{activation, attention};

use crate::backend::{Activation, AttentionMask, AttentionShape, Beta};

impl From<Beta> for sparse24_cpu::gemm::Beta {
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

type Kernel = Result<(), sparse24_cpu::Error>;

pub(super) fn act_forward(
    activation: Activation,
    z: ArrayView2<'_, f32>,
    h: ArrayViewMut2<'_, f32>,
) -> Kernel {
    match activation {
        Activation::Gelu => activation::gelu_forward(z, h),
        Activation::Geglu => activation::geglu_forward(z, h),
        Activation::Swiglu => activation::swiglu_forward(z, h),
    }
}

pub(super) fn act_backward(
    activation: Activation,
    dh: ArrayView2<'_, f32>,
    z: ArrayView2<'_, f32>,
    dz: ArrayViewMut2<'_, f32>,
) -> Kernel {
    match activation {
        Activation::Gelu => activation::gelu_backward(dh, z, dz),
        Activation::Geglu => activation::geglu_backward(dh, z, dz),
        Activation::Swiglu => activation::swiglu_backward(dh, z, dz),
    }
}
