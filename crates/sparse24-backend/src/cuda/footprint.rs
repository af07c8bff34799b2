//! The memory that the CUDA backend takes, known without a GPU.

use sparse24_core::op::AttentionShape;
use sparse24_cuda::{attention, bias, embedding::EmbedScratch, gemm};

use super::buffers::padded;
use crate::{
    DType, Footprint, Op, OptimizerEntry, POOLS, Region, bytes,
    op::{DenseOp, EmbedBackward, HeadLoss, Orientation},
};

/// The memory of the CUDA backend. Split-K scratch of products, which their timed plans decide, is
/// not counted.
pub struct CudaFootprint;

/// Multiprocessors of an H200; a device with fewer needs less scratch.
const MULTIPROCESSORS: usize = 132;
/// A driver's context with the loaded kernels.
const CONTEXT: u64 = 600 << 20;

impl Footprint for CudaFootprint {
    fn tensor(&self, [rows, columns]: [usize; 2], dtype: DType, region: Region) -> u64 {
        let tall = [if rows == 1 { 1 } else { padded(rows) }, columns];
        let wide = if rows == 1 { padded(columns) } else { columns };
        match (dtype, region) {
            (DType::U32, _) => bytes([rows, columns], 4),
            (DType::Activation, _) => bytes([rows, padded(columns)], 2),
            // The bf16 copy that products read.
            (DType::F32, Region::Parameters) => {
                bytes(tall, 4).saturating_add(bytes([tall[0], wide], 2))
            }
            (DType::F32, Region::Gradients) => bytes(tall, 4),
            (DType::F32, _) => bytes([rows, columns], 4),
        }
    }

    fn weight24(&self, [r, q]: [usize; 2], orientation: Orientation) -> u64 {
        match orientation {
            Orientation::Both => compressed([r, q]).saturating_add(compressed([q, r])),
            Orientation::Forward => compressed([r, q]).saturating_add(bytes([r, q], 2)),
            Orientation::Permuted => bytes([r, q], 2),
        }
    }

    fn gradient24(&self, [p, r]: [usize; 2]) -> u64 {
        compressed([r, p])
    }

    fn table(&self, table: &[OptimizerEntry]) -> u64 {
        let chunks = table.iter().map(|entry| entry.weight.elements().div_ceil(8192) as u64);
        table.len() as u64 * 64 + chunks.sum::<u64>() * 16
    }

    fn scratch(&self, op: &Op<'_>) -> [u64; POOLS] {
        let Op::Dense(op) = op else { return [0; POOLS] };
        let floats = match op {
            DenseOp::BiasGrad(op) => bias::bias_grad_scratch(op.dz.shape),
            DenseOp::NormBackward(op) => [MULTIPROCESSORS, 2 * op.dy.shape[1]],
            DenseOp::AttentionBackward(op) => {
                let shape: AttentionShape = op.forward.shape;
                attention::backward_scratch(shape)
            }
            DenseOp::EmbedBackward(EmbedBackward(op)) => EmbedScratch::pieces_shape(op.rows.shape),
            DenseOp::HeadLoss(HeadLoss { x, logits, gradients, .. }) => {
                let biased = gradients.is_some_and(|gradients| gradients.dbias.is_some());
                let sums = if biased { bias::bias_grad_scratch(logits.shape) } else { [0, 0] };
                [x.shape[0] + sums[0] * sums[1], 1]
            }
            _ => [0, 0],
        };
        let order = match op {
            DenseOp::EmbedBackward(EmbedBackward(op)) => EmbedScratch::order_shape(op.rows.shape),
            _ => [0, 0],
        };
        [bytes(floats, 4), bytes(order, 4), 0]
    }

    fn overhead(&self) -> u64 {
        CONTEXT + gemm::WORKSPACE as u64
    }
}

/// Bytes of a compressed `[m, k]`: half of the bf16 values, and four bits per group of four, in
/// blocks of 64 x 64.
fn compressed([m, k]: [usize; 2]) -> u64 {
    let padded = [m.next_multiple_of(64), k.next_multiple_of(64)];
    bytes(padded, 1).saturating_add(bytes(padded, 1) / 8)
}
