//! Masks and pruned operands.

use sparse24_wgpu::{mvue, permute, prune, search};

use super::WgpuBackend;
use crate::{
    Gradient24, MaskId, Region, Result, Weight24,
    op::{PermutedMask, SparseOp, check},
};

impl WgpuBackend {
    pub(super) fn sparse(&mut self, op: &SparseOp<'_>) -> Result {
        match op {
            SparseOp::MaskSearch(op) => {
                let (w, mask) = (self.buffers.matrix(op.w), self.masks[op.mask.0]);
                Ok(search::mask_search(&mut self.gpu, w, op.kind, mask)?)
            }
            SparseOp::PermutedMask(op) => self.permuted_mask(op),
            SparseOp::CompressWeight(op) => {
                let (MaskId(mask), Weight24(out)) = (op.mask, op.out);
                let (w, out) = (self.buffers.matrix(op.w), self.weights24[out]);
                Ok(prune::compress_weight(&mut self.gpu, w, self.masks[mask], op.map, out)?)
            }
            SparseOp::MvueCompress(op) => {
                let (dz, Gradient24(out)) = (self.buffers.matrix(op.dz), op.out);
                check::sampled(self.gradients24[out].shape, dz.shape)?;
                let out = self.gradients24[out].reshaped(dz.shape);
                Ok(mvue::mvue_compress(&mut self.gpu, dz, op.estimator, op.site, out)?)
            }
        }
    }

    fn permuted_mask(&mut self, op: &PermutedMask<'_>) -> Result {
        let order = match self.orders.get(&op.out) {
            Some((order, uploaded)) if order == op.order => *uploaded,
            known => {
                let r = op.order.len();
                let uploaded = match known {
                    Some((_, uploaded)) => *uploaded,
                    None => self.gpu.alloc("order of rows", [1, 2 * r], Region::Scratch.name())?,
                };
                self.gpu.upload(uploaded, &op.order_and_places())?;
                self.orders.insert(op.out, (op.order.to_vec(), uploaded));
                uploaded
            }
        };
        let (w, mask) = (self.buffers.matrix(op.w), self.masks[op.mask.0]);
        let out = self.masks[op.out.0];
        Ok(permute::permuted_mask(&mut self.gpu, w, mask, order, out)?)
    }
}
