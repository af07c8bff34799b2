//! The optimizer, copies and fills.

use sparse24_core::op::{MaskedDecay, Optimizer};

use super::operations;
use crate::{MaskId, TableId, Tensor};

operations! {
    /// The optimizer, copies and fills.
    Update = UpdateOp<'a> {
        /// See [`struct@Copy`].
        Copy(Copy),
        /// See [`Fill`].
        Fill(Fill),
        /// See [`GradNorm`].
        GradNorm(GradNorm),
        /// See [`OptimizerStep`].
        OptimizerStep(OptimizerStep<'a>),
        /// See [`MovingAverage`].
        MovingAverage(MovingAverage),
    }
}

/// to = from.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    /// Source.
    pub from: Tensor,
    /// Overwritten.
    pub to: Tensor,
}

/// Every element = value.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// Overwritten.
    pub to: Tensor,
    /// The value of every element.
    pub value: f32,
}

/// Stores the L2 norm of all gradients of a table on the device, and raises the flag if one is not
/// finite.
#[derive(Debug, Clone, Copy)]
pub struct GradNorm {
    /// Table of the optimizer.
    pub table: TableId,
}

/// One step of the optimizer for every row of a table, clipped by the norm of [`GradNorm`], with
/// masked decay; a no-op while the flag is raised.
#[derive(Debug, Clone, Copy)]
pub struct OptimizerStep<'a> {
    /// Table of the optimizer.
    pub table: TableId,
    /// The optimizer.
    pub optimizer: &'a Optimizer,
    /// Masked decay, for rows with a mask.
    pub decay: MaskedDecay,
}

/// average = decay average + (1 - decay) w, every operation rounded to f32; a no-op while the flag
/// is raised.
#[derive(Debug, Clone, Copy)]
pub struct MovingAverage {
    /// A weight after its step.
    pub w: Tensor,
    /// Its moving average, in place; it has the shape of w.
    pub average: Tensor,
    /// In `[0, 1)`.
    pub decay: f32,
}

/// One row of the optimizer's table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerEntry {
    /// w.
    pub weight: Tensor,
    /// dL/dw.
    pub gradient: Tensor,
    /// m.
    pub first_moment: Tensor,
    /// v, if the update rule has it.
    pub second_moment: Option<Tensor>,
    /// Weight decay of this tensor.
    pub weight_decay: f32,
    /// The mask of the forward pass, where masked decay applies.
    pub mask: Option<MaskId>,
}
