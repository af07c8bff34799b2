//! The portable GPU adaptor: `sparse24-wgpu` behind the [`Backend`] contract.
//!
//! Everything is f32. Products with a pruned operand are computed densely: a [`Weight24`] is S(W)
//! `[r, q]` and a [`Gradient24`] the sampled dZ `[p, r]`, both including zeros. Operations are
//! queued; only downloads, counts and reports wait.
//!
//! [`Weight24`]: super::Weight24
//! [`Gradient24`]: super::Gradient24

use std::collections::HashMap;

use sparse24_core::op::StepState;
pub use sparse24_wgpu::Arrivals;
use sparse24_wgpu::{
    Copied, Device as Gpu, Matrix, Recorded, Tiles, attention, elementwise, flip, health::Health,
    optimizer::Parameters,
};

use self::buffers::{Buffers, Scratch};
use super::{
    Arithmetic, Backend, BackendSettings, Capabilities, Device, Extent, GraphId, Launches, Limit,
    MaskId, Memory, Op, PendingCount, PendingReport, Region, StepReport, Tensor,
};
use crate::{Error, op::check};

mod buffers;
mod dense;
mod error;
mod footprint;
mod memory;
mod sparse;
mod update;

pub use footprint::WgpuFootprint;

/// The backend of one adapter.
pub struct WgpuBackend {
    gpu: Gpu,
    buffers: Buffers,
    masks: Vec<Tiles>,
    weights24: Vec<Matrix>,
    gradients24: Vec<Matrix>,
    tables: Vec<Parameters>,
    /// The norm of all gradients and the flag.
    health: Matrix,
    flips: Matrix,
    /// The uploaded orders of rows of permuted masks, by mask.
    orders: HashMap<MaskId, (Vec<u32>, Matrix)>,
    scratch: Scratch,
    launches: Launches,
    /// Parts of a step, with their recorded work: it is recorded when they run for the second time.
    graphs: HashMap<GraphId, Option<Recorded>>,
}

/// The limits of the kernels, known without a GPU.
#[must_use]
pub fn capabilities() -> Capabilities {
    /// Elements are numbered in u32, four in a call.
    const ELEMENTS: usize = u32::MAX as usize - 3;
    const fn limit(extent: Extent, at_most: usize) -> (Extent, Limit) {
        (extent, Limit { multiple_of: 1, at_most })
    }
    const LIMITS: &[(Extent, Limit)] = &[
        limit(Extent::HeadDim, attention::MAX_HEAD_WIDTH),
        limit(Extent::GatedElements, ELEMENTS),
        limit(Extent::DropoutElements, ELEMENTS),
    ];
    let lacks = Some(Arithmetic::Bf16);
    Capabilities { limits: LIMITS, reads_kept: false, lacks, ..Capabilities::unlimited("wgpu") }
}

/// Names of this machine's adapters, in the order of their numbers in [`BackendSettings::gpu`]:
/// GPUs first, then software adapters, which run on the CPU.
#[must_use]
#[cfg(not(target_family = "wasm"))]
pub fn adapters() -> Vec<String> {
    Gpu::adapters()
}

/// Where the buffers of an adapter are, by its number: those of software adapters and integrated
/// GPUs are in this machine's memory.
#[must_use]
#[cfg(not(target_family = "wasm"))]
pub fn placement(number: usize) -> super::Placement {
    if Gpu::is_in_main_memory(number) { super::Placement::Host } else { super::Placement::Device }
}

/// The limits on the adapter of this number, before it is opened; `None` if there are no adapters.
///
/// # Errors
/// [`Error::Device`] if there are adapters, but none with this number.
#[cfg(not(target_family = "wasm"))]
pub fn device_capabilities(number: usize) -> Result<Option<Capabilities>, Error> {
    match Gpu::largest_on(number) {
        Ok(bytes) => Ok(Some(with_tensors_of(bytes))),
        Err(sparse24_wgpu::Error::NoAdapter { found, .. }) if found.is_empty() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The limits of a device whose tensors have at most so many bytes.
fn with_tensors_of(bytes: u64) -> Capabilities {
    Capabilities { most_elements: (bytes / 4) as usize, ..capabilities() }
}

impl WgpuBackend {
    /// Opens and tests an adapter.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no such adapter or it fails its test; [`Error::Setting`] for
    /// an arithmetic other than f32.
    #[cfg(not(target_family = "wasm"))]
    pub fn open(settings: BackendSettings) -> Result<Self, Error> {
        Self::new(Gpu::open(settings.gpu)?, settings)
    }

    /// Opens an adapter without blocking the thread, for browsers.
    ///
    /// # Errors
    /// Errors of [`Self::open`].
    pub async fn request(settings: BackendSettings) -> Result<Self, Error> {
        Self::new(Gpu::request(settings.gpu).await?, settings)
    }

    /// A handle that waits for the copies of this backend.
    #[must_use]
    pub fn arrivals(&self) -> Arrivals {
        self.gpu.arrivals()
    }

    fn new(mut gpu: Gpu, settings: BackendSettings) -> Result<Self, Error> {
        capabilities().check_arithmetic(settings.arithmetic)?;
        let health = gpu.alloc("health", [1, 2], Region::Scratch.name())?;
        gpu.upload(health, &Health::SOUND)?;
        let flips = gpu.alloc("flips", [1, 1], Region::Scratch.name())?;
        Ok(Self {
            gpu,
            buffers: Buffers::default(),
            masks: Vec::new(),
            weights24: Vec::new(),
            gradients24: Vec::new(),
            tables: Vec::new(),
            health,
            flips,
            orders: HashMap::new(),
            scratch: Scratch::default(),
            launches: settings.launches,
            graphs: HashMap::new(),
        })
    }
}

/// Waits for copied losses and health, and decodes them.
fn read_report(copied: Copied) -> Result<StepReport, Error> {
    let [losses, health] = &copied.read()?[..] else {
        panic!("two matrices are copied");
    };
    let losses = losses.iter().map(|&bits| f32::from_bits(bits)).collect();
    let health = Health::of_words([health[0], health[1]]);
    Ok(StepReport { losses, grad_norm: health.grad_norm, non_finite: health.non_finite })
}

impl Backend for WgpuBackend {
    fn device(&self) -> Device {
        Device {
            backend: "wgpu",
            description: format!("{}, f32", self.gpu.name()),
            sparse_products: "computed densely with pruned values",
        }
    }

    fn capabilities(&self) -> Capabilities {
        with_tensors_of(self.gpu.largest())
    }

    fn set_step(&mut self, state: StepState) -> Result<(), Error> {
        Ok(self.gpu.set_step(&state)?)
    }

    fn execute(&mut self, op: &Op<'_>) -> Result<(), Error> {
        op.check()?;
        match op {
            Op::Sparse(op) => self.sparse(op),
            Op::Dense(op) => self.dense(op),
            Op::Update(op) => self.update(op),
        }
    }

    fn graph(
        &mut self,
        id: GraphId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self.graphs.get(&id) {
            Some(Some(recorded)) => Ok(self.gpu.replay(recorded)?),
            // Scratch grows when the work runs for the first time, so that is not recorded.
            known if self.launches == Launches::Eager || known.is_none() => {
                self.graphs.insert(id, None);
                work(self)
            }
            _ => {
                self.gpu.start_recording();
                let done = work(self);
                let recorded = self.gpu.end_recording();
                done?;
                self.graphs.insert(id, Some(recorded));
                Ok(())
            }
        }
    }

    fn flip_count(&mut self, MaskId(a): MaskId, MaskId(b): MaskId) -> Result<u64, Error> {
        self.start_flip_count(MaskId(a), MaskId(b))?()
    }

    fn start_flip_count(
        &mut self,
        MaskId(a): MaskId,
        MaskId(b): MaskId,
    ) -> Result<PendingCount, Error> {
        elementwise::fill(&mut self.gpu, self.flips, 0)?;
        flip::flip_count(&mut self.gpu, self.masks[a], self.masks[b], self.flips)?;
        let copied = self.gpu.copy_out(&[self.flips])?;
        Ok(Box::new(|| Ok(copied.read()?[0][0].into())))
    }

    fn l1_distance(&mut self, a: Tensor, b: Tensor) -> Result<f64, Error> {
        check::distance(a, b)?;
        let (a, b) = (self.download(a)?, self.download(b)?);
        Ok(a.iter().zip(&b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs()).sum())
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error> {
        let report = self.start_report(losses)?;
        report(self)
    }

    fn start_report(&mut self, losses: Tensor) -> Result<PendingReport, Error> {
        check::f32s("report", losses)?;
        let copied = self.gpu.copy_out(&[self.buffers.matrix(losses), self.health])?;
        self.gpu.upload(self.health, &Health::SOUND)?;
        Ok(Box::new(|_| read_report(copied)))
    }
}
