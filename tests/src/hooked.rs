//! A backend that delegates to another, with a hook in place of every operation.

use sparse24_core::{Mask, op::StepState};
use sparse24_train::{
    Error,
    backend::{
        Backend, Capabilities, Copied, DType, Device, Gradient24, GraphId, MaskId, Memory, Op,
        OptimizerEntry, Region, StepReport, TableId, Tensor, Weight24, op::Orientation,
    },
};

/// Executes an operation on the backend below; the step state is the one set last.
pub type Hook = Box<dyn FnMut(&mut dyn Backend, &StepState, &Op<'_>) -> Result<(), Error> + Send>;

/// The delegating backend. Sequences are executed one by one and graphs are not captured, so that
/// the hook sees every operation.
pub struct Hooked {
    inner: Box<dyn Backend>,
    state: StepState,
    hook: Hook,
    flips: fn(u64) -> u64,
    distance: fn(f64) -> f64,
}

impl Hooked {
    /// Puts `hook` in place of `inner`'s operations.
    #[must_use]
    pub fn new(inner: Box<dyn Backend>, hook: Hook) -> Box<Self> {
        let state = StepState::default();
        Box::new(Self { inner, state, hook, flips: |count| count, distance: |sum| sum })
    }

    /// Puts these functions of its flip counts and L1 distances in place of `inner`'s.
    #[must_use]
    pub fn distances(
        inner: Box<dyn Backend>,
        flips: fn(u64) -> u64,
        distance: fn(f64) -> f64,
    ) -> Box<Self> {
        let sound = Self::new(inner, Box::new(|backend, _, op| backend.execute(op)));
        Box::new(Self { flips, distance, ..*sound })
    }
}

impl Memory for Hooked {
    fn memory(&self) -> Vec<(Region, usize)> {
        self.inner.memory()
    }

    fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor, Error> {
        self.inner.alloc(name, shape, dtype, region)
    }

    fn alloc_mask(&mut self, shape: [usize; 2]) -> Result<MaskId, Error> {
        self.inner.alloc_mask(shape)
    }

    fn alloc_weight24(
        &mut self,
        shape: [usize; 2],
        orientation: Orientation,
    ) -> Result<Weight24, Error> {
        self.inner.alloc_weight24(shape, orientation)
    }

    fn alloc_gradient24(&mut self, shape: [usize; 2]) -> Result<Gradient24, Error> {
        self.inner.alloc_gradient24(shape)
    }

    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId, Error> {
        self.inner.alloc_table(table)
    }

    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result<(), Error> {
        self.inner.upload(to, from)
    }

    fn upload_ids(&mut self, to: Tensor, from: &[u32]) -> Result<(), Error> {
        self.inner.upload_ids(to, from)
    }

    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result<(), Error> {
        self.inner.download_into(from, to)
    }

    fn copy_out(&mut self, from: &[Tensor], to: Vec<Vec<f32>>) -> Result<Copied, Error> {
        self.inner.copy_out(from, to)
    }

    fn upload_mask(&mut self, to: MaskId, from: &Mask) -> Result<(), Error> {
        self.inner.upload_mask(to, from)
    }

    fn download_mask(&mut self, from: MaskId) -> Result<Mask, Error> {
        self.inner.download_mask(from)
    }
}

impl Backend for Hooked {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn set_step(&mut self, state: StepState) -> Result<(), Error> {
        self.state = state;
        self.inner.set_step(state)
    }

    fn execute(&mut self, op: &Op<'_>) -> Result<(), Error> {
        (self.hook)(&mut *self.inner, &self.state, op)
    }

    fn graph(
        &mut self,
        _: GraphId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        work(self)
    }

    fn flip_count(&mut self, a: MaskId, b: MaskId) -> Result<u64, Error> {
        self.inner.flip_count(a, b).map(self.flips)
    }

    fn l1_distance(&mut self, a: Tensor, b: Tensor) -> Result<f64, Error> {
        self.inner.l1_distance(a, b).map(self.distance)
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error> {
        self.inner.report(losses)
    }
}
