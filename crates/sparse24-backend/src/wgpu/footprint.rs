//! The memory that the backend takes, known without a GPU.

use sparse24_wgpu::{
    attention, norm::norm_backward_scratch, optimizer::Parameters, scale::scale_grad_scratch,
    sums::bias_grad_scratch,
};

use crate::{
    DType, Footprint, Op, OptimizerEntry, POOLS, Region, bytes,
    op::{DenseOp, HeadLoss, Orientation},
};

/// The memory of the wgpu backend: f32 throughout, and dense pruned operands.
pub struct WgpuFootprint;

impl Footprint for WgpuFootprint {
    fn tensor(&self, shape: [usize; 2], dtype: DType, _: Region) -> u64 {
        let each = if dtype == DType::U32 { 8 } else { 4 };
        // An empty buffer has a word.
        bytes(shape, each).max(4)
    }

    /// Two tiles per word.
    fn mask(&self, [rows, columns]: [usize; 2]) -> u64 {
        bytes([rows / 4, columns / 4], 2).next_multiple_of(4)
    }

    fn weight24(&self, shape: [usize; 2], _: Orientation) -> u64 {
        bytes(shape, 4)
    }

    fn gradient24(&self, shape: [usize; 2]) -> u64 {
        bytes(shape, 4)
    }

    fn table(&self, table: &[OptimizerEntry]) -> u64 {
        Parameters::scratch_bytes(table.iter().map(|entry| entry.weight.elements()))
    }

    /// All tensors are copied to buffers that the host can map, at once.
    fn staging(&self, checkpoint: u64) -> u64 {
        checkpoint
    }

    fn scratch(&self, op: &Op<'_>) -> [u64; POOLS] {
        let Op::Dense(op) = op else { return [0; POOLS] };
        let losses = match op {
            DenseOp::HeadLoss(op) => op.x.shape[0],
            _ => 0,
        };
        let sums = match op {
            DenseOp::BiasGrad(op) => bias_grad_scratch(op.dz.shape),
            DenseOp::NormBackward(op) => norm_backward_scratch(op.dy.shape),
            DenseOp::AttentionBackward(op) => attention::backward_scratch(op.forward.shape),
            DenseOp::ScaleGrad(op) => scale_grad_scratch(op.x.shape),
            DenseOp::HeadLoss(HeadLoss { logits, .. }) => bias_grad_scratch(logits.shape),
            _ => 0,
        };
        [bytes([1, losses], 4), bytes([1, sums], 4), 0]
    }
}
