//! Masks and pruned operands on the CPU.

use std::mem;

use sparse24_core::{Mask, prune::ValueMap};
use sparse24_cpu::{
    mvue::mvue_strips, permute::permuted_mask, prune::masked, search::mask_search,
    threshold::soft_threshold,
};

use super::{CpuBackend, Operands, buffers::scratch_view};
use crate::{
    MaskId, Result, Weight24,
    op::{CompressWeight, MvueCompress, SparseOp, check},
};

impl CpuBackend {
    pub(super) fn sparse(&mut self, op: &SparseOp<'_>) -> Result {
        match op {
            SparseOp::MaskSearch(op) => self
                .write_mask(op.mask, |cpu, out| mask_search(cpu.buffers.view(op.w), op.kind, out)),
            SparseOp::PermutedMask(op) => self.write_mask(op.out, |cpu, out| {
                permuted_mask(cpu.buffers.view(op.w), &cpu.masks[op.mask.0], op.order, out)
            }),
            SparseOp::CompressWeight(op) => self.compress_weight(op),
            SparseOp::MvueCompress(op) => self.mvue_compress(op),
        }
    }

    fn write_mask(
        &mut self,
        MaskId(id): MaskId,
        run: impl FnOnce(&Self, &mut Mask) -> Result<(), sparse24_cpu::Error>,
    ) -> Result {
        let empty = Mask::empty(0, 0).expect("0 is a multiple of 4");
        let mut out = mem::replace(&mut self.masks[id], empty);
        let done = run(self, &mut out);
        self.masks[id] = out;
        Ok(done?)
    }

    fn compress_weight(&mut self, op: &CompressWeight) -> Result {
        let (MaskId(mask), Weight24(out), [r, q]) = (op.mask, op.out, op.w.shape);
        let found = self.weights24[out].dgrad.shape();
        check::shape("compress weight", "out", [q, r], found)?;
        let mut scratch = mem::take(&mut self.scratch);
        let (w, mask) = (self.buffers.view(op.w), &self.masks[mask]);
        let mut pruned = scratch_view(&mut scratch, w.dim())?;
        match op.map {
            ValueMap::Identity => masked(w, mask, pruned.view_mut())?,
            ValueMap::SoftThreshold { scale } => {
                soft_threshold(w, mask, scale, pruned.view_mut())?;
            }
        }
        self.round(pruned.view_mut());
        let Operands { forward, dgrad } = &mut self.weights24[out];
        rayon::join(
            || forward.iter_mut().for_each(|forward| forward.pack(pruned.view())),
            || dgrad.pack(pruned.t()),
        );
        self.scratch = scratch;
        Ok(())
    }

    /// The estimator reads dZ as it is stored.
    fn mvue_compress(&mut self, op: &MvueCompress) -> Result {
        let (most, sampled) = &mut self.gradients24[op.out.0];
        check::sampled([*most, sampled.shape()[0]], op.dz.shape)?;
        let mut sampled = mem::take(sampled);
        let (dz, stream) = (self.buffers.view(op.dz), self.state.stream(op.site));
        mvue_strips(dz, op.estimator, stream, |values| self.round(values), &mut sampled);
        self.gradients24[op.out.0].1 = sampled;
        Ok(())
    }
}
