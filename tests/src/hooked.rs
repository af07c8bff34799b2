//! A backend that delegates to another, with a hook in place of every operation.

use sparse24_core::{Mask, op::StepState};
use sparse24_train::{
    Error,
    backend::{
        Backend, Capabilities, Copied, DType, Device, Gradient24, GraphId, MaskId, Memory, Op,
        OptimizerEntry, Region, Stage, StepReport, TableId, Tensor, Weight24, op::Orientation,
    },
    group::Group,
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
    exchange: Option<Exchange>,
}

/// An exchange that has started.
#[derive(Default)]
struct Exchange {
    /// How often a part of it started.
    starts: usize,
    stages: Vec<Stage>,
    /// Its tensors, and their values when it started.
    taken: Vec<(Tensor, Vec<f32>)>,
}

impl Hooked {
    /// Puts `hook` in place of `inner`'s operations.
    #[must_use]
    pub fn new(inner: Box<dyn Backend>, hook: Hook) -> Box<Self> {
        let state = StepState::default();
        let (flips, distance) = (|count| count, |sum| sum);
        Box::new(Self { inner, state, hook, flips, distance, exchange: None })
    }

    /// Starts exchanges of gradients during a backward pass, with NaN in place of their tensors
    /// until they end.
    ///
    /// # Panics
    /// If a tensor is written meanwhile, or there are few starts.
    #[must_use]
    pub fn overlapping(self) -> Box<Self> {
        Box::new(Self { exchange: Some(Exchange::default()), ..self })
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

    fn can_overlap(&self) -> bool {
        self.exchange.is_some()
    }

    fn start_reduce(&mut self, stages: &[Stage]) -> Result<(), Error> {
        let Some(exchange) = &mut self.exchange else { return self.inner.start_reduce(stages) };
        for stage in stages {
            let transfers = stage.sent.iter().chain(&stage.received).map(|&(_, tensor)| tensor);
            for tensor in transfers.chain(stage.additions.iter().flatten().copied()) {
                if exchange.taken.iter().all(|&(taken, _)| taken != tensor) {
                    exchange.taken.push((tensor, self.inner.download(tensor)?));
                    self.inner.upload(tensor, &vec![f32::NAN; tensor.elements()])?;
                }
            }
        }
        exchange.starts += usize::from(!stages.is_empty());
        exchange.stages.extend_from_slice(stages);
        Ok(())
    }

    fn reduce(&mut self, stages: &[Stage], group: &mut dyn Group) -> Result<(), Error> {
        let Some(exchange) = &mut self.exchange else { return self.inner.reduce(stages, group) };
        let Exchange { starts, stages: mut all, taken } = std::mem::take(exchange);
        assert!(starts > 2, "{starts} starts of an exchange overlap with little");
        for &(tensor, _) in &taken {
            let found = self.inner.download(tensor)?;
            assert!(found.into_iter().all(f32::is_nan), "{tensor:?} was written too late");
        }
        taken.iter().try_for_each(|(tensor, values)| self.inner.upload(*tensor, values))?;
        all.extend_from_slice(stages);
        self.inner.reduce(&all, group)
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error> {
        self.inner.report(losses)
    }
}
