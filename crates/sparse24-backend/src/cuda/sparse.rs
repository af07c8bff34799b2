//! Masks and compressed operands on a GPU.

use sparse24_cuda::{compressed::Compressed, mvue, permute, prune, search};

use super::{CudaBackend, Dgrad, PrunedWeight};
use crate::{
    Error, Gradient24, MaskId, Region, Result, Weight24,
    op::{CompressWeight, PermutedMask, SparseOp, check},
};

impl CudaBackend {
    pub(super) fn sparse(&mut self, op: &SparseOp<'_>) -> Result {
        match op {
            SparseOp::MaskSearch(op) => {
                let (w, MaskId(mask)) = (self.buffers.floats(op.w), op.mask);
                Ok(search::mask_search(&mut self.gpu, w, op.kind, self.masks[mask].0)?)
            }
            SparseOp::PermutedMask(op) => self.permuted_mask(op),
            SparseOp::CompressWeight(op) => self.compress_weight(op),
            SparseOp::MvueCompress(op) => {
                let (dz, Gradient24(out)) = (self.buffers.activations(op.dz), op.out);
                let out = self.sampled(out, dz.shape())?;
                Ok(mvue::mvue_compress(&mut self.gpu, dz, op.estimator, op.site, out)?)
            }
        }
    }

    /// The memory of a sampled gradient, for dZ `[p, r]`.
    pub(super) fn sampled(&self, gradient: usize, found: [usize; 2]) -> Result<Compressed> {
        let [r, most] = self.gradients24[gradient].shape();
        check::sampled([most, r], found)?;
        Ok(self.gradients24[gradient].narrowed(found[0].next_multiple_of(4)))
    }

    fn permuted_mask(&mut self, op: &PermutedMask<'_>) -> Result {
        let order = match self.orders.get(&op.out) {
            Some((order, uploaded)) if order == op.order => *uploaded,
            known => {
                let r = op.order.len();
                let uploaded = match known {
                    Some((_, uploaded)) => *uploaded,
                    None => {
                        self.gpu.set_purpose(Region::Scratch.name());
                        self.gpu.alloc("order of rows", [2, r])?
                    }
                };
                self.gpu.upload(uploaded, &op.order_and_places())?;
                self.orders.insert(op.out, (op.order.to_vec(), uploaded));
                uploaded
            }
        };
        let (w, tiles) = (self.buffers.floats(op.w), self.masks[op.mask.0].0);
        let out = self.masks[op.out.0].0;
        Ok(permute::permuted_mask(&mut self.gpu, w, tiles, order, out)?)
    }

    fn compress_weight(&mut self, op: &CompressWeight) -> Result {
        let (MaskId(mask), Weight24(out)) = (op.mask, op.out);
        let (w, tiles) = (self.buffers.floats(op.w), self.masks[mask].0);
        let pruned = prune::Pruned { w, tiles, map: op.map };
        let &PrunedWeight { forward, dgrad } = &self.weights24[out];
        match (forward, dgrad) {
            (Some(forward), Dgrad::Sparse(dgrad)) => {
                Ok(prune::compress_weight(&mut self.gpu, &pruned, forward, dgrad)?)
            }
            (forward, Dgrad::Dense(dense)) => {
                if let Some(forward) = forward {
                    prune::compress_forward(&mut self.gpu, &pruned, forward)?;
                }
                Ok(prune::prune_dense(&mut self.gpu, &pruned, dense)?)
            }
            (None, Dgrad::Sparse(_)) => {
                Err(Error::Refused("a transposable mask makes both products 2:4".to_owned()))
            }
        }
    }
}
