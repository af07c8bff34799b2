//! The contract between training and a device, with an adaptor per device.
//!
//! - A backend owns its buffers; handles ([`Tensor`], [`MaskId`], [`Weight24`], [`Gradient24`],
//!   [`TableId`]) are plain numbers. Everything with a handle is allocated before the first step.
//! - Work is a value, an [`Op`], given to [`Backend::execute`]. Operations that a device could fuse
//!   are given together, to [`Backend::sequence`], which executes them one by one unless the
//!   backend recognizes the sequence.
//! - The numbers that change from step to step live on the device
//!   ([`StepState`]); random numbers are addressed by (seed, site, micro-step, step).
//! - Sums run in a fixed order: the same plan, build and device give the same bits. From equal
//!   inputs, every backend computes the same masks, patterns and sampled indices.
//! - A non-finite training loss or gradient raises a sticky flag that turns [`op::OptimizerStep`]
//!   into a no-op until it is reported.
//!
//! Shapes are `[rows, columns]`, row-major. A new backend is one adaptor and one row of
//! [`BACKENDS`]. Users of `sparse24-train` find this crate there, as its module `backend`.

use std::collections::BTreeMap;

use sparse24_core::{
    Mask,
    op::{NonFinite, StepState},
};

use self::{group::Group, op::Orientation};

mod capabilities;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod group;
mod host;
pub mod limits;
pub mod op;
pub mod reduce;
mod shape_only;
mod tensor;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use capabilities::{Capabilities, Extent, Limit, Requirement};
pub use error::{DataError, Error, ErrorKind};
pub use host::zeros;
pub use op::{Op, OptimizerEntry};
pub use reduce::Stage;
pub use shape_only::{Footprint, POOLS, ShapeOnly, bytes};
pub use tensor::{DType, Gradient24, GraphId, MaskId, Region, TableId, Tensor, Weight24};

/// A `Result` that defaults to no value and to this crate's error.
type Result<T = (), E = Error> = core::result::Result<T, E>;

/// Values of tensors on their way to the host, see [`Memory::copy_out`].
pub type Copied = Box<dyn FnOnce() -> Result<Vec<Vec<f32>>, Error> + Send>;

/// A step's report on its way to the host, see [`Backend::start_report`].
pub type PendingReport = Box<dyn FnOnce(&mut dyn Backend) -> Result<StepReport, Error> + Send>;

/// A mask on its way to the host, see [`Memory::start_mask`].
pub type PendingMask = Box<dyn FnOnce() -> Result<Mask, Error> + Send>;

/// A number of flips on its way to the host, see [`Backend::start_flip_count`].
pub type PendingCount = Box<dyn FnOnce() -> Result<u64, Error> + Send>;

/// The outcome of a step, as the device reports it.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The summed loss of each micro-batch.
    pub losses: Vec<f32>,
    /// The L2 norm of all gradients, before clipping.
    pub grad_norm: f32,
    /// The cause of the flag, if it is raised; reading the report clears it.
    pub non_finite: Option<NonFinite>,
}

/// The device in words, for provenance.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Device {
    /// Name of the backend.
    pub backend: &'static str,
    /// The hardware, and which of its features are used.
    pub description: String,
    /// How products with a 2:4 operand are computed.
    pub sparse_products: &'static str,
}

/// Which numbers are rounded to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
pub enum Arithmetic {
    /// The device's usual arithmetic: [`Self::Bf16`] with CUDA, [`Self::F32`] otherwise.
    #[default]
    Native,
    /// f32 throughout.
    F32,
    /// Activations and their gradients are stored in bf16, and products read weights rounded to
    /// bf16; sums, weights, their gradients, moments and statistics are f32.
    Bf16,
}

/// Whether the repeated parts of a step are captured as CUDA graphs; results have the same bits
/// either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Launches {
    /// Captured once and replayed, where the device can.
    #[default]
    Captured,
    /// One launch per operation.
    Eager,
}

/// How gradients travel between the GPUs of several ranks; results have the same bits either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Exchange {
    /// [`Self::Nccl`] if all ranks have it, [`Self::Tcp`] otherwise.
    #[default]
    Auto,
    /// From GPU to GPU, by NCCL.
    Nccl,
    /// Through host memory and the [`Group`].
    Tcp,
}

/// How a backend is opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BackendSettings {
    /// Which numbers are rounded to bf16.
    pub arithmetic: Arithmetic,
    /// Index of the GPU, as its driver counts; unused on a CPU.
    pub gpu: usize,
    /// CUDA graphs or single launches; unused on a CPU.
    pub launches: Launches,
    /// How gradients travel between ranks; used only by CUDA.
    pub exchange: Exchange,
}

/// The timed choices of a device, by operation and shape.
pub type Plans = BTreeMap<String, String>;

/// The key of [`Plans`] that identifies the device on which they were timed; plans of another
/// device are timed again.
pub const PLANNED_ON: &str = "device";

/// Where a backend's buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// In this machine's memory.
    Host,
    /// In the device's own memory.
    Device,
}

/// A backend that a configuration can name.
#[derive(Clone, Copy)]
pub struct BackendEntry {
    /// Its name.
    pub name: &'static str,
    /// Where the buffers of the GPU or adapter of this number are.
    pub placement: fn(usize) -> Placement,
    /// Its capabilities, known without a device.
    pub capabilities: fn() -> Capabilities,
    /// Its capabilities on the GPU or adapter of this number, as far as they are known before it
    /// is opened; `None` where they depend on an adapter and this machine has none.
    pub device_capabilities: fn(usize) -> Result<Option<Capabilities>, Error>,
    /// How much memory it takes, known without a device.
    pub footprint: fn() -> Box<dyn Footprint>,
    /// Opens the device.
    pub open: fn(BackendSettings) -> Result<Box<dyn Backend>, Error>,
}

/// The names of all backends, each the name of the feature with which this crate and those above it
/// have the backend.
pub const BACKEND_NAMES: [&str; 3] = ["cpu", "cuda", "wgpu"];

/// All backends of this build.
pub const BACKENDS: &[BackendEntry] = &[
    #[cfg(feature = "cpu")]
    BackendEntry {
        name: "cpu",
        placement: |_| Placement::Host,
        capabilities: || Capabilities::unlimited("cpu"),
        device_capabilities: |_| Ok(Some(Capabilities::unlimited("cpu"))),
        footprint: || Box::new(cpu::CpuFootprint),
        open: |settings| Ok(Box::new(cpu::CpuBackend::new(settings.arithmetic))),
    },
    #[cfg(feature = "cuda")]
    BackendEntry {
        name: "cuda",
        placement: |_| Placement::Device,
        capabilities: cuda::capabilities,
        device_capabilities: |_| Ok(Some(cuda::capabilities())),
        footprint: || Box::new(cuda::CudaFootprint),
        open: |settings| Ok(Box::new(cuda::CudaBackend::open(settings)?)),
    },
    #[cfg(all(feature = "wgpu", not(target_family = "wasm")))]
    BackendEntry {
        name: "wgpu",
        placement: wgpu::placement,
        capabilities: wgpu::capabilities,
        device_capabilities: wgpu::device_capabilities,
        footprint: || Box::new(wgpu::WgpuFootprint),
        open: |settings| Ok(Box::new(wgpu::WgpuBackend::open(settings)?)),
    },
];

/// The memory of a device.
///
/// # Errors
/// [`Error::Operand`] where shapes do not fit; [`Error::Refused`] where ids are taken for floats or
/// the reverse, or tensors of a table do not lie as the optimizer needs; [`Error::Device`] where
/// memory does not suffice.
///
/// # Panics
/// Like [`Backend::execute`].
pub trait Memory {
    /// Bytes held, by region; without the device's context and library workspaces.
    fn memory(&self) -> Vec<(Region, usize)>;

    /// A zeroed `[rows, columns]` matrix; `name` appears in errors.
    fn alloc(
        &mut self,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
        region: Region,
    ) -> Result<Tensor, Error>;
    /// An empty mask.
    fn alloc_mask(&mut self, shape: [usize; 2]) -> Result<MaskId, Error>;
    /// Memory for S(W), W `[r, q]`, under masks that make these products 2:4.
    fn alloc_weight24(
        &mut self,
        shape: [usize; 2],
        orientation: Orientation,
    ) -> Result<Weight24, Error>;
    /// Memory for MVUE(dZ^T), dZ `[p, r]`.
    fn alloc_gradient24(&mut self, shape: [usize; 2]) -> Result<Gradient24, Error>;
    /// A table of the optimizer; norms are summed and gradients are named in its order.
    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId, Error>;

    /// Host to device, f32.
    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result<(), Error>;
    /// Host to device, u32: token ids, lengths.
    fn upload_ids(&mut self, to: Tensor, from: &[u32]) -> Result<(), Error>;
    /// Device to host, f32, rows packed; `to` is overwritten, and its memory reused.
    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result<(), Error>;
    /// Device to host, f32, rows packed.
    fn download(&mut self, from: Tensor) -> Result<Vec<f32>, Error> {
        let mut to = Vec::new();
        self.download_into(from, &mut to)?;
        Ok(to)
    }
    /// Starts to copy the present values of tensors to the host, f32, rows packed, into vectors
    /// whose memory is reused. [`Copied`] waits for the copy, on any thread. Until then, only
    /// [`Memory::upload`] and [`op::OptimizerStep`] may write to these tensors.
    fn copy_out(&mut self, from: &[Tensor], mut to: Vec<Vec<f32>>) -> Result<Copied, Error> {
        to.resize_with(from.len(), Vec::new);
        from.iter().zip(&mut to).try_for_each(|(&from, to)| self.download_into(from, to))?;
        Ok(Box::new(|| Ok(to)))
    }
    /// Host to device.
    fn upload_mask(&mut self, to: MaskId, from: &Mask) -> Result<(), Error>;
    /// Device to host.
    fn download_mask(&mut self, from: MaskId) -> Result<Mask, Error>;
    /// Starts to copy the present mask to the host; it may be read after later work was queued.
    fn start_mask(&mut self, from: MaskId) -> Result<PendingMask, Error> {
        let mask = self.download_mask(from)?;
        Ok(Box::new(|| Ok(mask)))
    }
}

/// A device that can train. See the [module documentation](self) for what holds for every
/// operation.
pub trait Backend: Memory + Send {
    /// The device in words.
    fn device(&self) -> Device;
    /// The capabilities of its [`BackendEntry`], with the limits of the opened device.
    fn capabilities(&self) -> Capabilities;

    /// The timed choices so far, with [`PLANNED_ON`]; empty where nothing is timed. A choice is
    /// about time alone: it may fix the order of a sum, never what is summed.
    fn plans(&self) -> Plans {
        Plans::new()
    }
    /// The number of timed choices so far; while it is the same, [`Backend::plans`] are.
    fn plan_count(&self) -> usize {
        0
    }
    /// Replays recorded choices instead of timing them: the same build on the same device then
    /// gives the bits of the run that recorded them.
    ///
    /// # Errors
    /// [`Error::Plan`] names the first that this device does not have.
    fn use_plans(&mut self, plans: &Plans) -> Result<(), Error> {
        match plans.keys().next() {
            None => Ok(()),
            Some(key) => Err(Error::Plan {
                key: key.clone(),
                problem: "nothing is timed on this backend".to_owned(),
            }),
        }
    }

    /// Sets the numbers of the step that the following operations read.
    fn set_step(&mut self, state: StepState) -> Result<(), Error>;
    /// Executes one operation.
    ///
    /// # Errors
    /// Errors of [`Op::check`]; [`Error::Operand`] or [`Error::Refused`] for a mask or pruned
    /// operand that does not fit.
    ///
    /// # Panics
    /// Perhaps, if a handle is not one of this backend; it may also be taken for another one.
    fn execute(&mut self, op: &Op<'_>) -> Result<(), Error>;
    /// Executes operations in order, fused if possible; tensors of [`Region::Scratch`] hold
    /// unspecified values afterwards.
    ///
    /// # Errors
    /// Errors of [`Backend::execute`].
    fn sequence(&mut self, ops: &[Op<'_>]) -> Result<(), Error> {
        ops.iter().try_for_each(Op::check)?;
        let mut left = ops;
        while let [first, others @ ..] = left {
            left = match self.fused(left)? {
                0 => self.execute(first).map(|()| others)?,
                done => &left[done..],
            };
        }
        Ok(())
    }
    /// Executes the first operations of a sequence, if the backend recognizes them as one kernel
    /// with the bits of the composition; returns how many.
    fn fused(&mut self, _: &[Op<'_>]) -> Result<usize, Error> {
        Ok(0)
    }
    /// Runs `work`, or replays what it did before under the same id. `work` must execute the same
    /// operations on the same handles every time, without host reads or writes; only the contents
    /// of buffers and the step state may change. Scalars in operations are frozen at the capture.
    fn graph(
        &mut self,
        id: GraphId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error>;

    /// |a - b|_1, see [`sparse24_core::flip::flip_count`].
    fn flip_count(&mut self, a: MaskId, b: MaskId) -> Result<u64, Error>;
    /// Starts to count; the count may be read after later work was queued.
    fn start_flip_count(&mut self, a: MaskId, b: MaskId) -> Result<PendingCount, Error> {
        let count = self.flip_count(a, b)?;
        Ok(Box::new(move || Ok(count)))
    }
    /// sum |a - b| in f64, in a fixed order.
    fn l1_distance(&mut self, a: Tensor, b: Tensor) -> Result<f64, Error>;

    /// Prepares [`Backend::reduce`] between the ranks of a group. If gradients can travel in more
    /// than one way, describes the one chosen, in the same words on all ranks. Without this call,
    /// they travel through host memory.
    ///
    /// # Errors
    /// [`Error::Setting`] if the ranks cannot do what [`BackendSettings::exchange`] asks for;
    /// [`Error::Peer`] if a rank is gone.
    fn connect(&mut self, _: &mut dyn Group) -> Result<Option<String>, Error> {
        Ok(None)
    }
    /// Replaces the gradients on every rank by their sums over all ranks, a power of two of them:
    /// `((g0 + g1) + (g2 + g3)) + ...`, with the gradients of rank i as gi. The stages of all ranks
    /// fit together; these come after those of [`Backend::start_reduce`]. Called between the last
    /// micro-batch and the update, unless there is one rank.
    ///
    /// # Errors
    /// [`Error::Peer`] if a rank is gone.
    fn reduce(&mut self, stages: &[Stage], group: &mut dyn Group) -> Result<(), Error> {
        reduce::through_host(self, stages, group)
    }
    /// Starts stages that [`Backend::reduce`] will finish, beside the operations that follow, none
    /// of which touches their tensors. Part of a [`Backend::graph`]. There are stages only if
    /// [`Backend::can_overlap`].
    fn start_reduce(&mut self, stages: &[Stage]) -> Result<(), Error> {
        assert!(stages.is_empty(), "this backend cannot overlap");
        Ok(())
    }
    /// Whether gradients can be exchanged while the device computes.
    fn can_overlap(&self) -> bool {
        false
    }
    /// The outcome of the step: `losses` `[micro-batches, 1]`, gradient norm, flag.
    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error>;
    /// Starts to copy the outcome of the step to the host; the report may be read after later work
    /// was queued.
    fn start_report(&mut self, losses: Tensor) -> Result<PendingReport, Error> {
        let report = self.report(losses)?;
        Ok(Box::new(|_| Ok(report)))
    }
}

impl dyn Backend + '_ {
    /// [`Backend::execute`] of a record.
    ///
    /// # Errors
    /// Errors of [`Backend::execute`].
    pub fn run<'op>(&mut self, op: impl Into<Op<'op>>) -> Result<(), Error> {
        self.execute(&op.into())
    }
}

#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../README.md")]
struct Readme;
