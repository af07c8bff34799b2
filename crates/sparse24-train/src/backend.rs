//! The contract between training and a device: a small set of operations, each given by its
//! equation.
//!
//! - A backend owns its buffers; handles ([`Tensor`], [`MaskId`], [`Weight24`], [`Gradient24`],
//!   [`TableId`]) are plain numbers with stable addresses. Everything is allocated before the first
//!   step.
//! - What changes each step lives on the device ([`StepState`]); randomness is addressed by (seed,
//!   site, micro-step, step).
//! - Sums run in a fixed order: the same plan, build and device give the same bits. Masks, patterns
//!   and sampled indices are the same bits on every backend.
//! - An operation fuses what a device can fuse; a backend that cannot composes it.
//! - Outputs never alias inputs unless the operation says "in place".
//! - A non-finite training loss or gradient raises a sticky flag that turns
//!   [`Backend::optimizer_step`] into a no-op until it is reported.
//!
//! Shapes are `[rows, columns]`, row-major; tokens p, in-features q, out-features r. Adding a
//! backend is one adaptor file and one line in [`BACKENDS`]. Deliberately absent: layers, models,
//! autograd.

use std::{collections::BTreeMap, ops::Range, path::PathBuf};

use sparse24_core::{Mask, MaskKind, mvue::Estimator, philox::Site};

use crate::{
    Error,
    optim::{AdamW, MaskedDecay},
    trainer::Recipe,
};

#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod operation;

pub use operation::{
    Activation, AttentionBackward, AttentionForward, AttentionMask, AttentionShape, CompressWeight,
    Dropout, Embed, HeadGradients, HeadLoss, LinearDgrad, LinearForward, LinearWgrad, NormBackward,
    NormForward, OptimizerEntry, Orientation,
};

/// What an element is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// What the device stores activations in, and their gradients: bf16 on a GPU, f32 on a CPU
    /// unless that mimics a GPU. The host reads and writes them as f32.
    Activation,
    /// Token ids.
    U32,
}

/// What memory is for; reports of memory use group by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Region {
    /// Weights.
    Parameters,
    /// Their gradients.
    Gradients,
    /// Optimizer moments.
    Moments,
    /// Masks and compressed operands.
    Sparse,
    /// What the forward pass keeps for the backward pass, and scratch.
    Activations,
}

impl Region {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Parameters, Self::Gradients, Self::Moments, Self::Sparse, Self::Activations];

    /// In words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "weights",
            Self::Gradients => "gradients",
            Self::Moments => "moments",
            Self::Sparse => "masks and pruned operands",
            Self::Activations => "activations and scratch",
        }
    }
}

/// A matrix in a backend's buffer, or a rectangle of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor {
    /// The buffer's number.
    pub buffer: usize,
    /// Elements before the first.
    pub offset: usize,
    /// `[rows, columns]`.
    pub shape: [usize; 2],
    /// Elements from one row to the next.
    pub stride: usize,
    /// Element type.
    pub dtype: DType,
}

impl Tensor {
    /// The first rows.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn first_rows(self, rows: usize) -> Self {
        self.rows(0..rows)
    }

    /// Some rows.
    ///
    /// # Panics
    /// Outside of the shape.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        assert!(
            rows.start <= rows.end && rows.end <= self.shape[0],
            "rows {rows:?} outside of {:?}",
            self.shape
        );
        Self {
            offset: self.offset + rows.start * self.stride,
            shape: [rows.len(), self.shape[1]],
            ..self
        }
    }

    /// Some columns.
    ///
    /// # Panics
    /// Outside of the shape.
    #[must_use]
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(
            columns.start <= columns.end && columns.end <= self.shape[1],
            "columns {columns:?} outside of {:?}",
            self.shape
        );
        Self { offset: self.offset + columns.start, shape: [self.shape[0], columns.len()], ..self }
    }

    /// Elements.
    #[must_use]
    pub fn elements(self) -> usize {
        self.shape[0] * self.shape[1]
    }
}

/// A mask on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskId(pub usize);

/// A table of tensors that the optimizer updates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableId(pub usize);

/// The values of tensors on their way to the host, see [`Backend::copy_out`].
pub type Copied = Box<dyn FnOnce() -> Result<Vec<Vec<f32>>, Error> + Send>;

/// The number of a segment, see [`Backend::segment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SegmentId(pub usize);

/// A pruned weight in the device's own form, made by [`Backend::compress_weight`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight24(pub usize);

/// A sampled output gradient in the device's own form, made by [`Backend::mvue_compress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gradient24(pub usize);

/// The weight operand of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// W `[r, q]` as it is.
    Dense(Tensor),
    /// S(W).
    Pruned(Weight24),
}

/// The output-gradient operand of the weight gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gradient {
    /// dZ `[p, r]` as it is.
    Dense(Tensor),
    /// MVUE(dZ^T).
    Sampled(Gradient24),
}

/// What happens to what the output held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beta {
    /// It is overwritten, and never read.
    Overwrite,
    /// The result is added to it.
    Accumulate,
}

/// What changes every step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepState {
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step under way, from 1.
    pub step: u32,
    /// The global micro-step within it, from 0.
    pub micro_step: u32,
    /// The learning rate of this step.
    pub learning_rate: f32,
    /// Adam's: 1 - beta^step, of the first moment and of the second.
    pub bias_corrections: [f32; 2],
    /// Scale of the loss gradient: that of [`HeadGradients`].
    pub loss_scale: f32,
}

/// What the device knows after a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// The sum of the losses asked for.
    pub loss: f64,
    /// The L2 norm of all gradients, before clipping.
    pub grad_norm: f32,
    /// What raised the flag, if it is up; the report lowers it.
    pub non_finite: Option<NonFinite>,
}

/// What was not finite in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NonFinite {
    /// The loss of a micro-batch.
    Loss,
    /// The gradient in this row of the optimizer's table, the first of them.
    Gradient(usize),
    /// The norm of all gradients, though each is finite.
    Norm,
}

/// The device in words, for provenance.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "run", derive(serde::Serialize))]
pub struct Device {
    /// The backend's name.
    pub backend: &'static str,
    /// The hardware and what of it is used.
    pub description: String,
    /// How pruned operands are multiplied here.
    pub sparse_products: &'static str,
}

/// What is rounded to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(
    feature = "run",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Arithmetic {
    /// As is usual on the device: [`Self::F32`] on a CPU, [`Self::Bf16`] on a GPU.
    #[default]
    Native,
    /// f32 throughout.
    F32,
    /// As on a GPU: activations and their gradients are stored in bf16, products read a weight's
    /// rounding to bf16; sums, weights, their gradients, moments and statistics are f32.
    Bf16,
}

/// How a device is told what to do in a training step; results have the same bits either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(
    feature = "run",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Launches {
    /// Segments are recorded and then replayed as a whole, where the device can.
    #[default]
    Replayed,
    /// One operation at a time.
    Queued,
}

/// How a backend is opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BackendSettings {
    /// What is rounded to bf16.
    pub arithmetic: Arithmetic,
    /// The number of the GPU, as its driver counts; of no meaning on a CPU.
    pub gpu: usize,
    /// How a device is told what to do; of no meaning on a CPU.
    pub launches: Launches,
    /// Folders with the libraries that are loaded at run time; of no meaning on a CPU.
    pub libraries: Vec<PathBuf>,
}

/// Every timed choice, by what was chosen.
pub type Plans = BTreeMap<String, String>;

/// The entry of [`Plans`] that says on what they were timed; what reads otherwise elsewhere is
/// timed anew there.
pub const PLANNED_ON: &str = "device";

/// Where a backend's buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// In this machine's memory.
    Host,
    /// In the device's own, which says itself when it does not suffice.
    Device,
}

/// A backend that a configuration can name.
#[derive(Debug, Clone, Copy)]
pub struct BackendEntry {
    /// Its name.
    pub name: &'static str,
    /// Where its buffers are.
    pub memory: Memory,
    /// Refuses what it cannot train, before it is opened.
    pub check: fn(&Recipe) -> Result<(), Error>,
    /// Opens it; of its memory nothing is taken but what dense products of a GPU work in.
    pub open: fn(BackendSettings) -> Result<Box<dyn Backend>, Error>,
}

/// All backends of this build. Adding one is a line here.
pub const BACKENDS: &[BackendEntry] = &[
    #[cfg(feature = "cpu")]
    BackendEntry {
        name: "cpu",
        memory: Memory::Host,
        check: |_| Ok(()),
        open: |settings| Ok(Box::new(cpu::CpuBackend::new(settings.arithmetic))),
    },
    #[cfg(feature = "cuda")]
    BackendEntry {
        name: "cuda",
        memory: Memory::Device,
        check: cuda::CudaBackend::check,
        open: |settings| Ok(Box::new(cuda::CudaBackend::open(settings)?)),
    },
];

/// A device that can train. See the [module documentation](self) for what holds for every
/// operation.
///
/// # Errors
/// Every operation returns [`Error::Operand`] when shapes do not fit.
pub trait Backend: Send {
    /// The device in words.
    fn device(&self) -> Device;
    /// Bytes held, by region.
    fn memory(&self) -> Vec<(Region, usize)>;

    /// The timed choices so far, with [`PLANNED_ON`]; empty where nothing is timed. A choice is
    /// about time alone: it may fix the order of a sum, never what is summed.
    fn plans(&self) -> Plans {
        Plans::new()
    }
    /// How many there are: as long as that is the same, they are. Unlike them it costs nothing to
    /// ask.
    fn plans_made(&self) -> usize {
        0
    }
    /// Replays recorded choices instead of timing them: with those of a run, the same build on the
    /// same device gives its bits.
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

    /// Refuses what it cannot train, before anything is allocated; the same as
    /// [`BackendEntry::check`].
    ///
    /// # Errors
    /// [`Error::Setting`] names the choice.
    fn check(&self, _: &Recipe) -> Result<(), Error> {
        Ok(())
    }

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
    /// Room for S(W), W `[r, q]`.
    fn alloc_weight24(&mut self, shape: [usize; 2]) -> Result<Weight24, Error>;
    /// Room for MVUE(dZ^T), dZ `[p, r]`.
    fn alloc_gradient24(&mut self, shape: [usize; 2]) -> Result<Gradient24, Error>;
    /// A table of the optimizer; it sums norms and names gradients in this order.
    fn alloc_table(&mut self, table: &[OptimizerEntry]) -> Result<TableId, Error>;

    /// Host to device, f32.
    fn upload(&mut self, to: Tensor, from: &[f32]) -> Result<(), Error>;
    /// Host to device, token ids.
    fn upload_tokens(&mut self, to: Tensor, from: &[u32]) -> Result<(), Error>;
    /// Device to host, f32, rows packed.
    fn download(&mut self, from: Tensor) -> Result<Vec<f32>, Error>;
    /// As [`Backend::download`], into a vector whose room can serve again.
    fn download_into(&mut self, from: Tensor, to: &mut Vec<f32>) -> Result<(), Error> {
        *to = self.download(from)?;
        Ok(())
    }
    /// Begins to copy to the host what tensors hold now, f32, rows packed, into vectors whose room
    /// can serve again. Whoever calls [`Copied`] waits for it, on any thread; before that, of all
    /// that writes to tensors only [`Backend::upload`] and [`Backend::optimizer_step`] may write to
    /// these.
    fn copy_out(&mut self, from: &[Tensor], mut to: Vec<Vec<f32>>) -> Result<Copied, Error> {
        to.resize_with(from.len(), Vec::new);
        from.iter().zip(&mut to).try_for_each(|(&from, to)| self.download_into(from, to))?;
        Ok(Box::new(|| Ok(to)))
    }
    /// Host to device.
    fn upload_mask(&mut self, to: MaskId, from: &Mask) -> Result<(), Error>;
    /// Device to host.
    fn download_mask(&mut self, from: MaskId) -> Result<Mask, Error>;
    /// to = from.
    fn copy(&mut self, from: Tensor, to: Tensor) -> Result<(), Error>;
    /// Every element = value.
    fn fill(&mut self, to: Tensor, value: f32) -> Result<(), Error>;

    /// What the following operations read of the step.
    fn set_step(&mut self, state: StepState) -> Result<(), Error>;

    /// Does `work`, or what it did before under the same number. It is the same operations on the
    /// same handles every time, reads nothing of the host and leaves nothing there: what changes is
    /// what buffers hold, and the step state. A device may record it and replay it.
    fn segment(
        &mut self,
        segment: SegmentId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error>;

    /// mask = search(w), see [`sparse24_core::search::mask_search`].
    fn mask_search(&mut self, w: Tensor, kind: MaskKind, mask: MaskId) -> Result<(), Error>;
    /// |a - b|_1, see [`sparse24_core::flip::flip_count`].
    fn flip_count(&mut self, a: MaskId, b: MaskId) -> Result<u64, Error>;
    /// out = m m' of w, see [`sparse24_core::permute::permuted_mask`]; `mask` is m.
    fn permuted_mask(
        &mut self,
        w: Tensor,
        mask: MaskId,
        order: &[u32],
        out: MaskId,
    ) -> Result<(), Error>;
    /// See [`CompressWeight`].
    fn compress_weight(&mut self, op: &CompressWeight) -> Result<(), Error>;
    /// out = MVUE(dz^T), see [`sparse24_core::mvue::compress`].
    fn mvue_compress(
        &mut self,
        dz: Tensor,
        site: Site,
        estimator: Estimator,
        out: Gradient24,
    ) -> Result<(), Error>;

    /// See [`LinearForward`].
    fn linear_forward(&mut self, op: &LinearForward) -> Result<(), Error>;
    /// See [`LinearDgrad`].
    fn linear_dgrad(&mut self, op: &LinearDgrad) -> Result<(), Error>;
    /// See [`LinearWgrad`].
    fn linear_wgrad(&mut self, op: &LinearWgrad) -> Result<(), Error>;
    /// db = column sums of dz `[p, r]`; db `[1, r]`.
    fn bias_grad(&mut self, dz: Tensor, db: Tensor, beta: Beta) -> Result<(), Error>;
    /// See [`NormForward`].
    fn norm_forward(&mut self, op: &NormForward) -> Result<(), Error>;
    /// See [`NormBackward`].
    fn norm_backward(&mut self, op: &NormBackward) -> Result<(), Error>;
    /// See [`AttentionForward`].
    fn attention_forward(&mut self, op: &AttentionForward) -> Result<(), Error>;
    /// See [`AttentionBackward`].
    fn attention_backward(&mut self, op: &AttentionBackward) -> Result<(), Error>;
    /// See [`Embed`].
    fn embed_forward(&mut self, op: &Embed) -> Result<(), Error>;
    /// The gradient of [`Embed`]: always added to the tables' gradients, summed in token order.
    fn embed_backward(&mut self, op: &Embed) -> Result<(), Error>;
    /// See [`HeadLoss`].
    fn head_loss(&mut self, op: &HeadLoss) -> Result<(), Error>;
    /// out = x E^T.
    fn logits(&mut self, x: Tensor, embedding: Tensor, out: Tensor) -> Result<(), Error>;
    /// x = dropout(x), in place; its gradient is the same call on the gradient.
    fn dropout(&mut self, x: Tensor, dropout: Dropout) -> Result<(), Error>;

    /// Keeps the L2 norm of all gradients on the device, and raises the flag if one is not finite.
    fn grad_norm(&mut self, table: TableId) -> Result<(), Error>;
    /// One AdamW step of every row, clipped by the norm of [`Backend::grad_norm`], with masked
    /// decay; a no-op while the flag is up.
    fn optimizer_step(
        &mut self,
        table: TableId,
        rule: &AdamW,
        decay: MaskedDecay,
    ) -> Result<(), Error>;
    /// sum |a - b| in f64, in a fixed order.
    fn l1_distance(&mut self, a: Tensor, b: Tensor) -> Result<f64, Error>;
    /// The outcome of the step; `losses` are summed in f64, in order.
    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error>;
}
