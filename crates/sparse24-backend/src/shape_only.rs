//! A backend that computes nothing: it counts the memory and the floating-point operations that
//! another backend would take.

use sparse24_core::{Mask, op::StepState};

use super::op::Orientation;
use super::{
    Backend, Capabilities, DType, Device, Gradient24, GraphId, MaskId, Memory, Op, OptimizerEntry,
    Region, StepReport, TableId, Tensor, Weight24,
};
use crate::Result;

/// The bytes that a backend takes for what it is asked to hold.
pub trait Footprint: Send {
    /// Bytes of a tensor.
    fn tensor(&self, _: [usize; 2], _: DType, _: Region) -> u64 {
        0
    }
    /// Bytes of a mask: two per 4x4 tile.
    fn mask(&self, [rows, columns]: [usize; 2]) -> u64 {
        bytes([rows.div_ceil(4), columns.div_ceil(4)], 2)
    }
    /// Bytes of S(W), W `[r, q]`.
    fn weight24(&self, _: [usize; 2], _: Orientation) -> u64 {
        0
    }
    /// Bytes of MVUE(dZ^T), dZ `[p, r]`.
    fn gradient24(&self, _: [usize; 2]) -> u64 {
        0
    }
    /// Bytes of the optimizer's table.
    fn table(&self, _: &[OptimizerEntry]) -> u64 {
        0
    }
    /// Bytes of working memory that the operation takes, by pool; a pool is as large as its largest
    /// user.
    fn scratch(&self, _: &Op<'_>) -> [u64; POOLS] {
        [0; POOLS]
    }
    /// Bytes of main memory through which a checkpoint with tensors of so many bytes is copied.
    fn staging(&self, _: u64) -> u64 {
        0
    }
    /// Bytes of library workspaces and the device's context, which no tensor accounts for.
    fn overhead(&self) -> u64 {
        0
    }
}

/// Pools of working memory.
pub const POOLS: usize = 3;

/// Bytes of a matrix; saturating, so that no configuration overflows.
#[must_use]
pub fn bytes([rows, columns]: [usize; 2], element: u64) -> u64 {
    (rows as u64).saturating_mul(columns as u64).saturating_mul(element)
}

/// The counting backend.
pub struct ShapeOnly {
    footprint: Box<dyn Footprint>,
    capabilities: Capabilities,
    buffers: usize,
    bytes: [u64; Region::ALL.len()],
    pools: [u64; POOLS],
    /// Floating-point operations of all products so far.
    pub flops: f64,
}

/// Nothing takes memory.
struct Weightless;

impl Footprint for Weightless {}

impl ShapeOnly {
    /// A backend of which only the shapes matter.
    #[must_use]
    pub fn weightless() -> Self {
        Self::within(Capabilities::unlimited("shape only"))
    }

    /// The same with limits: it refuses tensors beyond them.
    #[must_use]
    pub fn within(capabilities: Capabilities) -> Self {
        Self::new(Box::new(Weightless), capabilities)
    }

    /// Counts for the backend with this footprint.
    #[must_use]
    pub fn new(footprint: Box<dyn Footprint>, capabilities: Capabilities) -> Self {
        let bytes = [0; Region::ALL.len()];
        let pools = [0; POOLS];
        Self { footprint, capabilities, buffers: 0, bytes, pools, flops: 0.0 }
    }

    fn take(&mut self, region: Region, bytes: u64) -> usize {
        let held = &mut self.bytes[region as usize];
        *held = held.saturating_add(bytes);
        self.buffers += 1;
        self.buffers - 1
    }

    /// Bytes per region, as [`Memory::memory`] of the backend that is imitated.
    #[must_use]
    pub fn bytes(&self, region: Region) -> u64 {
        let pools = if region == Region::Scratch { self.pools.iter().sum() } else { 0 };
        self.bytes[region as usize].saturating_add(pools)
    }
}

impl Memory for ShapeOnly {
    fn memory(&self) -> Vec<(Region, usize)> {
        Region::ALL.map(|region| (region, self.bytes(region) as usize)).into()
    }

    fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor> {
        self.capabilities.check_tensor(name, shape, region)?;
        let buffer = self.take(region, self.footprint.tensor(shape, dtype, region));
        Ok(Tensor { buffer, offset: 0, shape, stride: shape[1], dtype })
    }

    fn alloc_mask(&mut self, shape: [usize; 2]) -> Result<MaskId> {
        Ok(MaskId(self.take(Region::Sparse, self.footprint.mask(shape))))
    }

    fn alloc_weight24(&mut self, shape: [usize; 2], orientation: Orientation) -> Result<Weight24> {
        Ok(Weight24(self.take(Region::Sparse, self.footprint.weight24(shape, orientation))))
    }

    fn alloc_gradient24(&mut self, shape: [usize; 2]) -> Result<Gradient24> {
        Ok(Gradient24(self.take(Region::Sparse, self.footprint.gradient24(shape))))
    }

    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId> {
        Ok(TableId(self.take(Region::Scratch, self.footprint.table(table))))
    }

    fn upload(&mut self, _: Tensor, _: &[f32]) -> Result {
        Ok(())
    }

    fn upload_ids(&mut self, _: Tensor, _: &[u32]) -> Result {
        Ok(())
    }

    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result {
        to.clear();
        to.resize(from.elements(), 0.0);
        Ok(())
    }

    fn upload_mask(&mut self, _: MaskId, _: &Mask) -> Result {
        Ok(())
    }

    fn download_mask(&mut self, _: MaskId) -> Result<Mask> {
        Ok(Mask::empty(0, 0)?)
    }
}

impl Backend for ShapeOnly {
    fn device(&self) -> Device {
        Device {
            backend: self.capabilities.backend,
            description: "shapes only".to_owned(),
            sparse_products: "counted",
        }
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn set_step(&mut self, _: StepState) -> Result {
        Ok(())
    }

    fn execute(&mut self, op: &Op<'_>) -> Result {
        op.check()?;
        self.flops += op.flops();
        for (pool, bytes) in self.pools.iter_mut().zip(self.footprint.scratch(op)) {
            *pool = (*pool).max(bytes);
        }
        Ok(())
    }

    fn graph(&mut self, _: GraphId, work: &mut dyn FnMut(&mut dyn Backend) -> Result) -> Result {
        work(self)
    }

    fn flip_count(&mut self, _: MaskId, _: MaskId) -> Result<u64> {
        Ok(0)
    }

    fn l1_distance(&mut self, _: Tensor, _: Tensor) -> Result<f64> {
        Ok(0.0)
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport> {
        Ok(StepReport { losses: vec![0.0; losses.elements()], grad_norm: 0.0, non_finite: None })
    }
}
