//! The memory of the CUDA adaptor.

use sparse24_core::Mask;
use sparse24_cuda::{compressed::Compressed, optimizer};

use super::{CudaBackend, Dgrad, PrunedWeight};
use crate::{
    Copied, DType, Gradient24, MaskId, Memory, OptimizerEntry, Region, Result, TableId, Tensor,
    Weight24,
    op::{Orientation, check},
};

impl Memory for CudaBackend {
    fn memory(&self) -> Vec<(Region, usize)> {
        let held = self.gpu.held();
        let of = |region: Region| {
            let of_region = held.iter().filter(|(purpose, _)| *purpose == region.name());
            of_region.map(|(_, bytes)| bytes).sum()
        };
        Region::ALL.map(|region| (region, of(region))).into()
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

    fn alloc_mask(&mut self, [rows, columns]: [usize; 2]) -> Result<MaskId> {
        let empty = Mask::empty(rows, columns)?;
        self.gpu.set_purpose(Region::Sparse.name());
        self.masks.push((self.gpu.alloc("mask", [rows / 4, columns / 4])?, empty.shape()));
        Ok(MaskId(self.masks.len() - 1))
    }

    fn alloc_weight24(&mut self, [r, q]: [usize; 2], orientation: Orientation) -> Result<Weight24> {
        const NAME: &str = "pruned weight";
        check::tiled([r, q])?;
        self.gpu.set_purpose(Region::Sparse.name());
        let gpu = &mut self.gpu;
        let forward = match orientation {
            Orientation::Permuted => None,
            Orientation::Both | Orientation::Forward => Some(Compressed::alloc(gpu, NAME, [r, q])?),
        };
        let dgrad = match orientation {
            Orientation::Both => Dgrad::Sparse(Compressed::alloc(gpu, NAME, [q, r])?),
            Orientation::Forward | Orientation::Permuted => Dgrad::Dense(gpu.alloc(NAME, [r, q])?),
        };
        self.weights24.push(PrunedWeight { forward, dgrad });
        Ok(Weight24(self.weights24.len() - 1))
    }

    fn alloc_gradient24(&mut self, [p, r]: [usize; 2]) -> Result<Gradient24> {
        self.gpu.set_purpose(Region::Sparse.name());
        let shape = [r, p.next_multiple_of(4)];
        self.gradients24.push(Compressed::alloc(&mut self.gpu, "sampled gradient", shape)?);
        Ok(Gradient24(self.gradients24.len() - 1))
    }

    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId> {
        check::table(table)?;
        let row = |entry: &OptimizerEntry| optimizer::Parameter {
            w: self.buffers.floats(entry.weight),
            g: self.buffers.floats(entry.gradient),
            m: self.buffers.floats(entry.first_moment),
            v: entry.second_moment.map(|v| self.buffers.floats(v)),
            tiles: entry.mask.map(|MaskId(at)| self.masks[at].0),
            shadow: Some(self.buffers.copy_of(entry.weight)),
            weight_decay: entry.weight_decay,
        };
        let parameters: Vec<_> = table.iter().map(row).collect();
        self.gpu.set_purpose(Region::Scratch.name());
        self.tables.push(optimizer::Parameters::new(&mut self.gpu, &parameters)?);
        Ok(TableId(self.tables.len() - 1))
    }

    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result {
        check::floats("upload", to)?;
        self.gpu.wait_for_copies()?;
        self.buffers.upload(&mut self.gpu, to, from)
    }

    fn upload_ids(&mut self, to: Tensor, from: &[u32]) -> Result {
        check::ids("upload", to)?;
        Ok(self.gpu.upload(self.buffers.ids(to), from)?)
    }

    fn download(&mut self, from: Tensor) -> Result<Vec<f32>> {
        check::floats("download", from)?;
        self.buffers.download(&mut self.gpu, from)
    }

    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result {
        *to = self.download(from)?;
        Ok(())
    }

    fn copy_out(&mut self, from: &[Tensor], mut to: Vec<Vec<f32>>) -> Result<Copied> {
        from.iter().try_for_each(|&t| check::floats("download", t))?;
        let matrices: Vec<_> = from.iter().map(|&tensor| self.buffers.floats(tensor)).collect();
        if let Some(copy) = self.gpu.copy_to_host(&matrices)? {
            return Ok(Box::new(|| Ok(copy.read(to)?)));
        }
        to = matrices
            .into_iter()
            .map(|matrix| self.gpu.download(matrix))
            .collect::<Result<_, _>>()?;
        Ok(Box::new(|| Ok(to)))
    }

    fn upload_mask(&mut self, MaskId(to): MaskId, from: &Mask) -> Result {
        let (tiles, expected) = self.masks[to];
        let found = from.shape();
        check::shape("upload", "mask", expected, found)?;
        Ok(self.gpu.upload(tiles, from.tiles())?)
    }

    fn download_mask(&mut self, MaskId(from): MaskId) -> Result<Mask> {
        let (tiles, [rows, columns]) = self.masks[from];
        Ok(Mask::from_tiles(rows, columns, self.gpu.download(tiles)?)?)
    }
}
