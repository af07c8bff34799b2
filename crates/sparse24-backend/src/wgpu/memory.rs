//! The memory of the adaptor.

use sparse24_core::Mask;
use sparse24_wgpu::{
    embedding::with_order,
    optimizer::{Parameter, Parameters},
};

use super::WgpuBackend;
use crate::{
    Copied, DType, Error, Gradient24, MaskId, Memory, OptimizerEntry, PendingMask, Region, Result,
    TableId, Tensor, Weight24,
    op::{Orientation, check},
};

impl Memory for WgpuBackend {
    fn memory(&self) -> Vec<(Region, usize)> {
        Region::ALL.map(|region| (region, self.gpu.held(region.name()) as usize)).into()
    }

    fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor> {
        self.buffers.alloc(&mut self.gpu, name, shape, dtype, region)
    }

    fn alloc_mask(&mut self, shape: [usize; 2]) -> Result<MaskId> {
        self.masks.push(self.gpu.alloc_tiles(shape, Region::Sparse.name())?);
        Ok(MaskId(self.masks.len() - 1))
    }

    fn alloc_weight24(&mut self, shape: [usize; 2], _: Orientation) -> Result<Weight24> {
        check::tiled(shape)?;
        self.weights24.push(self.gpu.alloc("pruned weight", shape, Region::Sparse.name())?);
        Ok(Weight24(self.weights24.len() - 1))
    }

    fn alloc_gradient24(&mut self, shape: [usize; 2]) -> Result<Gradient24> {
        self.gradients24.push(self.gpu.alloc("sampled gradient", shape, Region::Sparse.name())?);
        Ok(Gradient24(self.gradients24.len() - 1))
    }

    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId> {
        check::table(table)?;
        let row = |entry: &OptimizerEntry| Parameter {
            w: self.buffers.matrix(entry.weight),
            g: self.buffers.matrix(entry.gradient),
            m: self.buffers.matrix(entry.first_moment),
            v: entry.second_moment.map(|v| self.buffers.matrix(v)),
            mask: entry.mask.map(|MaskId(at)| self.masks[at]),
            weight_decay: entry.weight_decay,
        };
        let parameters = table.iter().map(row).collect();
        let purpose = Region::Scratch.name();
        self.tables.push(Parameters::new(&mut self.gpu, parameters, purpose)?);
        Ok(TableId(self.tables.len() - 1))
    }

    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result {
        check::floats("upload", to)?;
        let bits: Vec<u32> = from.iter().map(|x| x.to_bits()).collect();
        Ok(self.gpu.upload(self.buffers.matrix(to), &bits)?)
    }

    fn upload_ids(&mut self, to: Tensor, from: &[u32]) -> Result {
        check::ids("upload", to)?;
        let (ordered, found) = (self.buffers.ordered(to), from.len());
        if found != to.elements() {
            let (operation, operand) = ("upload", "ids");
            let (expected, found) = (to.shape, [found, 1]);
            return Err(Error::Operand { operation, operand, expected, found });
        }
        Ok(self.gpu.upload(ordered, &with_order(from))?)
    }

    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result {
        check::floats("download", from)?;
        let bits = self.gpu.download(self.buffers.matrix(from))?;
        to.clear();
        to.extend(bits.into_iter().map(f32::from_bits));
        Ok(())
    }

    fn copy_out(&mut self, from: &[Tensor], mut to: Vec<Vec<f32>>) -> Result<Copied> {
        from.iter().try_for_each(|&t| check::floats("download", t))?;
        let matrices: Vec<_> = from.iter().map(|&t| self.buffers.matrix(t)).collect();
        let copied = self.gpu.copy_out(&matrices)?;
        Ok(Box::new(move || {
            to.resize_with(matrices.len(), Vec::new);
            for (to, bits) in to.iter_mut().zip(copied.read()?) {
                to.clear();
                to.extend(bits.into_iter().map(f32::from_bits));
            }
            Ok(to)
        }))
    }

    fn upload_mask(&mut self, MaskId(to): MaskId, from: &Mask) -> Result {
        Ok(self.gpu.upload_mask(self.masks[to], from)?)
    }

    fn download_mask(&mut self, MaskId(from): MaskId) -> Result<Mask> {
        Ok(self.gpu.download_mask(self.masks[from])?)
    }

    fn start_mask(&mut self, MaskId(from): MaskId) -> Result<PendingMask> {
        let tiles = self.masks[from];
        let copied = self.gpu.copy_out(&[tiles.words])?;
        Ok(Box::new(move || {
            Ok(tiles.mask(&copied.read()?[0]).map_err(sparse24_wgpu::Error::from)?)
        }))
    }
}
