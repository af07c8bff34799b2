//! The operations of a backend. A record names its operands and gives the equation between them;
//! shapes are `[rows, columns]`, with tokens p, in-features q, out-features r.
//!
//! Outputs never alias inputs, or lie in an allocation of one, unless a record says "in place" or
//! that one may be the other. [`Op::check`] refuses what does not fit.

use super::Tensor;

pub(crate) mod check;
mod dense;
mod sparse;
mod update;

pub use dense::{
    ActivationBackward, ActivationForward, Add, AttentionBackward, AttentionDropout,
    AttentionForward, BiasGrad, DenseOp, DropSequences, DropoutOp, Embed, EmbedBackward,
    EmbedForward, GatherRows, Gradient, HeadGradients, HeadLoss, LinearDgrad, LinearForward,
    LinearWgrad, Logits, Mixed, NormBackward, NormForward, Scale, ScaleGrad, ScatterRows,
    TargetLoss, Weight,
};
pub use sparse::{CompressWeight, MaskSearch, MvueCompress, Orientation, PermutedMask, SparseOp};
pub use update::{Copy, Fill, GradNorm, MovingAverage, OptimizerEntry, OptimizerStep, UpdateOp};

/// One operation.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::large_enum_variant, reason = "an operation lives for one call, on the stack")]
pub enum Op<'a> {
    /// Masks and compressed operands.
    Sparse(SparseOp<'a>),
    /// Layers: products, activations, norms, attention, embeddings, losses.
    Dense(DenseOp),
    /// The optimizer, copies and fills.
    Update(UpdateOp<'a>),
}

/// Declares the enum of one part and the conversion of each record into an [`Op`].
macro_rules! operations {
    ($(#[$doc:meta])* $part:ident = $enum:ident $(<$life:lifetime>)? {
        $($(#[$row:meta])* $variant:ident($record:ident $(<$of:lifetime>)?),)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub enum $enum $(<$life>)? {
            $($(#[$row])* $variant($record $(<$of>)?),)*
        }
        $(impl<'a> From<operations!(@record $record $($of)?)> for $crate::Op<'a> {
            fn from(op: operations!(@record $record $($of)?)) -> Self {
                Self::$part($enum::$variant(op))
            }
        })*
    };
    (@record $record:ident) => { $record };
    (@record $record:ident $of:lifetime) => { $record<'a> };
}
use operations;

impl Op<'_> {
    /// The gradients of parameters that it writes.
    pub fn gradients(&self) -> impl Iterator<Item = Tensor> {
        let gradients = match self {
            Self::Dense(op) => op.gradients(),
            Self::Sparse(_) | Self::Update(_) => [None; 2],
        };
        gradients.into_iter().flatten()
    }

    /// Floating-point operations, a multiply-add counted as two; only products count.
    #[must_use]
    pub fn flops(&self) -> f64 {
        match self {
            Self::Dense(op) => op.flops(),
            Self::Sparse(_) | Self::Update(_) => 0.0,
        }
    }
}
