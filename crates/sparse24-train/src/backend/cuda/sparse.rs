//! Masks and compressed operands on a GPU.

use sparse24_cuda::{mvue, prune, search};

use super::{CudaBackend, missing};
use crate::{
    Error,
    backend::{
        Gradient24, MaskId, Weight24,
        op::{CompressWeight, Orientation, SparseOp},
    },
};

impl CudaBackend {
    pub(super) fn sparse(&mut self, op: &SparseOp<'_>) -> Result<(), Error> {
        match op {
            SparseOp::MaskSearch(op) => {
                let (w, MaskId(mask)) = (self.buffers.floats(op.w), op.mask);
                Ok(search::mask_search(&mut self.gpu, w, op.kind, self.masks[mask].0)?)
            }
            SparseOp::PermutedMask(_) => Err(missing("permuted masks")),
            SparseOp::CompressWeight(op) => self.compress_weight(op),
            SparseOp::MvueCompress(op) => {
                let (dz, Gradient24(out)) = (self.buffers.activations(op.dz), op.out);
                let out = self.gradients24[out];
                Ok(mvue::mvue_compress(&mut self.gpu, dz, op.estimator, op.site, out)?)
            }
        }
    }

    fn compress_weight(&mut self, op: &CompressWeight) -> Result<(), Error> {
        let (MaskId(mask), Weight24(out)) = (op.mask, op.out);
        let (w, tiles) = (self.buffers.floats(op.w), self.masks[mask].0);
        let pruned = prune::Pruned { w, tiles, map: op.map };
        let [forward, dgrad] = self.weights24[out];
        match op.orientation {
            Orientation::Both => {
                Ok(prune::compress_weight(&mut self.gpu, &pruned, forward, dgrad)?)
            }
            Orientation::Forward => Ok(prune::compress_forward(&mut self.gpu, &pruned, forward)?),
            Orientation::Permuted => Err(missing("permuted masks")),
        }
    }
}
