//! The memory of the CPU adaptor.

use ndarray::ArrayView2;
use sparse24_core::Mask;
use sparse24_cpu::strips::Strips;

use super::{CpuBackend, Operands};
use crate::{
    DType, Error, Gradient24, MaskId, Memory, OptimizerEntry, Region, Result, TableId, Tensor,
    Weight24,
    op::{Orientation, check},
    zeros,
};

impl Memory for CpuBackend {
    fn memory(&self) -> Vec<(Region, usize)> {
        let masks: usize = self.masks.iter().map(|mask| 2 * mask.tiles().len()).sum();
        let weights = self.weights24.iter();
        let weights = weights.flat_map(|weight| weight.forward.iter().chain([&weight.dgrad]));
        let strips = weights.chain(self.gradients24.iter().map(|(_, strips)| strips));
        let sparse = masks + strips.map(Strips::allocated).sum::<usize>();
        let held = |region| match region {
            Region::Sparse => sparse,
            _ => self.buffers.bytes(region),
        };
        Region::ALL.map(|region| (region, held(region))).into()
    }

    fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor> {
        self.buffers.alloc(name, shape, dtype, region)
    }

    fn alloc_mask(&mut self, [rows, columns]: [usize; 2]) -> Result<MaskId> {
        let tiles = zeros("a mask", [rows / 4, columns / 4], Region::Sparse)?;
        self.masks.push(Mask::from_tiles(rows, columns, tiles)?);
        Ok(MaskId(self.masks.len() - 1))
    }

    fn alloc_weight24(&mut self, [r, q]: [usize; 2], orientation: Orientation) -> Result<Weight24> {
        check::tiled([r, q])?;
        let forward = orientation != Orientation::Permuted;
        let forward = forward.then(|| Strips::zeros([r, q])).transpose()?;
        self.weights24.push(Operands { forward, dgrad: Strips::zeros([q, r])? });
        Ok(Weight24(self.weights24.len() - 1))
    }

    fn alloc_gradient24(&mut self, [p, r]: [usize; 2]) -> Result<Gradient24> {
        self.gradients24.push((p, Strips::zeros([r, p])?));
        Ok(Gradient24(self.gradients24.len() - 1))
    }

    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId> {
        check::table(table)?;
        for entry in table {
            let Some(MaskId(at)) = entry.mask else { continue };
            check::shape("optimizer table", "mask", entry.weight.shape, self.masks[at].shape())?;
        }
        self.tables.push(table.to_vec());
        Ok(TableId(self.tables.len() - 1))
    }

    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result {
        check::floats("upload", to)?;
        let source = ArrayView2::from_shape(to.shape, from).map_err(|_| Error::Operand {
            operation: "upload",
            operand: "host data",
            expected: to.shape,
            found: [1, from.len()],
        })?;
        self.write([to], |_, [mut view]| {
            view.assign(&source);
            Ok(())
        })
    }

    fn upload_ids(&mut self, to: Tensor, from: &[u32]) -> Result {
        check::ids("upload", to)?;
        if from.len() != to.elements() {
            return Err(Error::Operand {
                operation: "upload",
                operand: "ids",
                expected: to.shape,
                found: [from.len(), 1],
            });
        }
        self.buffers.ids_mut(to).copy_from_slice(from);
        Ok(())
    }

    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result {
        check::floats("download", from)?;
        to.clear();
        for row in self.buffers.view(from).rows() {
            to.extend_from_slice(row.as_slice().expect("rows are contiguous"));
        }
        Ok(())
    }

    fn upload_mask(&mut self, MaskId(to): MaskId, from: &Mask) -> Result {
        let (expected, found) = (self.masks[to].shape(), from.shape());
        check::shape("upload", "mask", expected, found)?;
        self.masks[to].clone_from(from);
        Ok(())
    }

    fn download_mask(&mut self, MaskId(from): MaskId) -> Result<Mask> {
        Ok(self.masks[from].clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arithmetic, ErrorKind, cpu::buffers::scratch_view};

    #[test]
    fn what_memory_cannot_hold_is_an_error() {
        const MANY: usize = usize::MAX - 3;
        let mut cpu = CpuBackend::new(Arithmetic::F32);
        // More than memory has, than an allocation has, and than a number counts.
        for shape in [[1 << 26, 1 << 26], [1 << 32, 1 << 30], [MANY, 4], [MANY, MANY]] {
            let mut dense = |dtype| cpu.alloc("x", shape, dtype, Region::Activations).map(drop);
            let [floats, ids] = [DType::F32, DType::U32].map(&mut dense);
            let [both, permuted] = [Orientation::Both, Orientation::Permuted]
                .map(|orientation| cpu.alloc_weight24(shape, orientation).map(drop));
            let sampled = cpu.alloc_gradient24(shape).map(drop);
            for result in [floats, ids, both, permuted, sampled, cpu.alloc_mask(shape).map(drop)] {
                let error = result.expect_err("there is no such memory");
                assert_eq!(error.kind(), ErrorKind::Device, "{shape:?}: {error}");
                assert!(error.to_string().contains("MiB of memory"), "{shape:?}: {error}");
            }
        }
        let scratch = scratch_view(&mut Vec::new(), (1 << 32, 1 << 29)).map(drop);
        let error = Error::from(scratch.expect_err("there is no such memory"));
        assert_eq!(error.kind(), ErrorKind::Device, "{error}");
        let weight = cpu.alloc("w", [MANY, 4], DType::F32, Region::Parameters);
        let error = weight.expect_err("there is no such memory").to_string();
        assert!(!error.contains("batch.size") && error.contains("model.d_model"), "{error}");
        assert!(cpu.memory().into_iter().all(|(_, bytes)| bytes == 0), "nothing is held");
    }
}
