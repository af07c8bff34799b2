//! The CUDA adaptor: `sparse24-cuda` behind the [`Backend`] contract.
//!
//! Activations and their gradients are bf16; weights, their gradients and moments are f32; products
//! read a bf16 copy of each weight that the optimizer writes. A pruned weight is compressed for the
//! products that its mask makes 2:4, and a sampled gradient once, for the sparse tensor cores; the
//! other products with a pruned weight are dense. Operations are queued: only
//! downloads, counts and reports wait, and writes to parameters wait for copies of them.

use std::collections::HashMap;

use half::bf16;
use sparse24_core::{mvue::Estimator, op::StepState};
use sparse24_cuda::{
    Device as Gpu, Matrix, Scalar, Settings, activation, attention, compressed::Compressed,
    distance, dropout, flip, gemm, health::Health, mvue, nccl::Communicator, norm, optimizer,
    profile::Profile, spmm24,
};

use self::{
    buffers::Buffers,
    graph::{Captured, Segment, Writes},
    plans::SparsePlans,
};
use super::{
    Arithmetic, Backend, BackendSettings, Capabilities, Device, Exchange, Extent, GraphId,
    Launches, Limit, MaskId, Op, Plans, Region, Stage, StepReport, Tensor,
    op::{DenseOp, SparseOp, Weight},
    reduce,
};
use crate::{Error, group::Group, op::check};

mod buffers;
mod dense;
mod error;
mod exchange;
mod footprint;
mod graph;
mod memory;
mod plans;
mod sparse;
mod update;

pub use footprint::CudaFootprint;

/// The backend of one GPU.
pub struct CudaBackend {
    gemm: gemm::Gemm,
    buffers: Buffers,
    masks: Vec<(Matrix<u16>, [usize; 2])>,
    weights24: Vec<PrunedWeight>,
    gradients24: Vec<Compressed>,
    /// The norm of all gradients and the flag.
    health: Matrix<u32>,
    flips: Matrix<u64>,
    distances: Matrix<u64>,
    /// The orders of rows of permuted masks, by mask, as they were uploaded.
    orders: HashMap<MaskId, (Vec<u32>, Matrix<u32>)>,
    launches: Launches,
    tables: Vec<optimizer::Parameters>,
    graphs: HashMap<GraphId, Captured>,
    /// The memory that the present graph writes.
    writes: Writes,
    /// The segments so far of the graph that is being captured, if one is.
    capture: Option<Vec<Segment>>,
    sparse_plans: SparsePlans,
    scratch: Scratch,
    exchange: Exchange,
    /// Dropped before the GPU, which waits for its transfers.
    communicator: Option<Communicator>,
    /// Declared last, so that it outlives what it owns.
    gpu: Gpu,
}

/// The operands of the two products with S(W).
struct PrunedWeight {
    /// None where only dgrad reads it.
    forward: Option<Compressed>,
    dgrad: Dgrad,
}

/// S(W) as dgrad multiplies by it.
#[derive(Clone, Copy)]
enum Dgrad {
    /// Its transpose, where the mask is transposable.
    Sparse(Compressed),
    /// Under another mask, with its zeros.
    Dense(Matrix<bf16>),
}

/// Working memory of operations; it grows in the first step only.
#[derive(Default)]
struct Scratch {
    floats: Option<Matrix<f32>>,
    order: Option<Matrix<u32>>,
    /// A head's table of one row, and its gradient.
    table: Option<Matrix<bf16>>,
    gradient: Option<Matrix<f32>>,
    report: Option<Matrix<u8>>,
}

/// A contiguous matrix of scratch, which only grows; its contents are unspecified.
fn grown<T: Scalar>(
    gpu: &mut Gpu,
    scratch: &mut Option<Matrix<T>>,
    shape: [usize; 2],
) -> Result<Matrix<T>, Error> {
    let elements = shape[0] * shape[1];
    let whole = match *scratch {
        Some(whole) if whole.elements() >= elements => whole,
        _ => {
            gpu.set_purpose(Region::Scratch.name());
            *scratch.insert(gpu.alloc("scratch of operations", [1, elements])?)
        }
    };
    Ok(whole.columns(0..elements).reshaped(shape))
}

/// The limits of the kernels, known without a GPU.
#[must_use]
pub fn capabilities() -> Capabilities {
    /// Kernels read and write 16 bytes at a time: rows of activations are multiples of 8 elements.
    const ROW: usize = 8;
    const fn limit(extent: Extent, multiple_of: usize, at_most: usize) -> (Extent, Limit) {
        (extent, Limit { multiple_of, at_most })
    }
    const LIMITS: &[(Extent, Limit)] = &[
        limit(Extent::NormWidth, 1, norm::MAX_WIDTH),
        limit(Extent::HeadDim, ROW, attention::MAX_HEAD_WIDTH),
        limit(Extent::RowWidth, ROW, usize::MAX),
        limit(Extent::ProductColumns, 1, spmm24::MAX_SIZE),
        limit(Extent::GatedElements, 1, activation::MAX_GATED),
        limit(Extent::DropoutElements, 1, dropout::MAX_ELEMENTS),
    ];
    let lacks = Some(Arithmetic::F32);
    Capabilities { limits: LIMITS, lacks, ..Capabilities::unlimited("cuda") }
}

impl CudaBackend {
    /// Opens a GPU. Tensors are allocated later.
    ///
    /// # Errors
    /// [`Error::Device`] without driver, GPU or libraries; [`Error::Setting`] for an arithmetic
    /// that it does not have.
    pub fn open(settings: BackendSettings) -> Result<Self, Error> {
        capabilities().check_arithmetic(settings.arithmetic)?;
        let mut gpu = Gpu::open(&Settings { ordinal: settings.gpu, ..Settings::default() })?;
        gpu.set_purpose("library workspaces");
        let workspace = gpu.alloc("workspace of dense products", [1, gemm::WORKSPACE])?;
        let gemm = gemm::Gemm::new(&gpu, workspace)?;
        gpu.set_purpose(Region::Scratch.name());
        let health = gpu.alloc("health", [1, Health::WORDS])?;
        let flips = gpu.alloc("flips", [1, 1])?;
        let distances = gpu.alloc("distances", distance::SCRATCH)?;
        Ok(Self {
            gemm,
            buffers: Buffers::default(),
            masks: Vec::new(),
            weights24: Vec::new(),
            gradients24: Vec::new(),
            health,
            flips,
            distances,
            orders: HashMap::new(),
            launches: settings.launches,
            tables: Vec::new(),
            graphs: HashMap::new(),
            writes: Writes::Other,
            capture: None,
            sparse_plans: SparsePlans::default(),
            scratch: Scratch::default(),
            exchange: settings.exchange,
            communicator: None,
            gpu,
        })
    }

    /// The GPU, for work beside the backend's own.
    pub fn gpu(&mut self) -> &mut Gpu {
        &mut self.gpu
    }

    /// Records the time of everything that this backend launches, once it is started.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.gpu.profile()
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> Device {
        let planned_on = plans::planned_on(&self.gpu, &self.gemm);
        let driver = self.gpu.driver();
        Device {
            backend: "cuda",
            description: format!("{planned_on}, driver {driver}, bf16 activations, f32 weights"),
            sparse_products: "computed on the sparse tensor cores",
        }
    }

    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn plans(&self) -> Plans {
        plans::recorded(&self.gpu, &self.gemm, &self.sparse_plans)
    }

    fn plan_count(&self) -> usize {
        1 + self.gemm.planned() + self.sparse_plans.len()
    }

    fn use_plans(&mut self, recorded: &Plans) -> Result<(), Error> {
        plans::replay(&self.gpu, &mut self.gemm, &mut self.sparse_plans, recorded)
    }

    fn set_step(&mut self, state: StepState) -> Result<(), Error> {
        Ok(self.gpu.set_step(&state)?)
    }

    fn execute(&mut self, op: &Op<'_>) -> Result<(), Error> {
        op.check()?;
        self.gpu.profile().set_product(product(op));
        match op {
            Op::Sparse(op) => self.sparse(op),
            Op::Dense(op) => self.dense(op),
            Op::Update(op) => self.update(op),
        }
    }

    fn fused(&mut self, ops: &[Op<'_>]) -> Result<usize, Error> {
        self.gpu.profile().set_product(ops.first().and_then(product));
        match ops {
            [Op::Dense(DenseOp::Add(add)), Op::Dense(DenseOp::NormForward(norm)), ..]
                if add.out == norm.x =>
            {
                self.norm_forward(norm, Some([add.x, add.delta])).map(|()| 2)
            }
            [
                Op::Dense(DenseOp::ActivationBackward(back)),
                Op::Sparse(SparseOp::MvueCompress(sample)),
                ..,
            ] if back.dz == sample.dz && sample.estimator == Estimator::Exact => {
                let operands = [back.dh, back.z, back.dz].map(|t| self.buffers.activations(t));
                let out = self.sampled(sample.out.0, back.dz.shape)?;
                let (gpu, activation, site) = (&mut self.gpu, back.activation, sample.site);
                let fused = mvue::backward_compress(gpu, activation, operands, site, out)?;
                Ok(if fused { 2 } else { 0 })
            }
            [
                Op::Dense(DenseOp::LinearForward(product)),
                Op::Dense(DenseOp::ActivationForward(after)),
                ..,
            ] if product.z == after.z
                && matches!(product.weight, Weight::Pruned(_))
                && spmm24::fuses(after.activation) =>
            {
                let h = self.buffers.activations(after.h);
                self.linear_forward(product, Some((after.activation, h))).map(|()| 2)
            }
            _ => Ok(0),
        }
    }

    fn graph(
        &mut self,
        id: GraphId,
        work: &mut dyn FnMut(&mut dyn Backend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.run_graph(id, work)
    }

    fn flip_count(&mut self, MaskId(a): MaskId, MaskId(b): MaskId) -> Result<u64, Error> {
        self.gpu.fill_bytes(self.flips, 0)?;
        flip::flip_count(&mut self.gpu, self.masks[a].0, self.masks[b].0, self.flips)?;
        Ok(self.gpu.download(self.flips)?[0])
    }

    fn l1_distance(&mut self, a: Tensor, b: Tensor) -> Result<f64, Error> {
        check::distance(a, b)?;
        let [a, b] = [a, b].map(|t| self.buffers.floats(t));
        Ok(distance::l1_distance(&mut self.gpu, a, b, self.distances)?)
    }

    fn connect(&mut self, group: &mut dyn Group) -> Result<Option<String>, Error> {
        self.connect_gpus(group).map(Some)
    }

    fn reduce(&mut self, stages: &[Stage], group: &mut dyn Group) -> Result<(), Error> {
        if self.communicator.is_none() {
            return reduce::through_host(self, stages, group);
        }
        exchange::start(&mut self.communicator, &mut self.gpu, &self.buffers, stages)?;
        Ok(self.gpu.join()?)
    }

    fn start_reduce(&mut self, stages: &[Stage]) -> Result<(), Error> {
        self.cut_graph(stages)
    }

    fn can_overlap(&self) -> bool {
        self.communicator.is_some()
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport, Error> {
        check::f32s("report", losses)?;
        // Losses and health side by side, so that the host waits once.
        let (losses, health) = (self.buffers.floats(losses).as_bytes(), self.health.as_bytes());
        let ([rows, columns], [_, words]) = (losses.shape(), health.shape());
        let report = grown(&mut self.gpu, &mut self.scratch.report, [1, rows * columns + words])?;
        let to_losses = report.columns(0..rows * columns);
        let to_health = report.columns(rows * columns..rows * columns + words);
        self.gpu.copy(losses, to_losses.rectangle(0, [rows, columns], columns))?;
        self.gpu.copy(health, to_health)?;
        if let Some(communicator) = &mut self.communicator {
            communicator.wait(&self.gpu)?;
        }
        let bytes = self.gpu.download(report)?;
        let word = |four: &[u8]| u32::from_le_bytes(four.try_into().expect("four bytes"));
        let mut words = bytes.chunks_exact(4).map(word);
        let losses = words.by_ref().take(rows * columns / 4).map(f32::from_bits).collect();
        let health = std::array::from_fn(|_| words.next().expect("two words follow"));
        let Health { grad_norm, non_finite } = Health::of_words(health);
        self.gpu.fill_bytes(self.health, 0)?;
        Ok(StepReport { losses, grad_norm, non_finite })
    }
}

/// The pass of a product, and the shape of its weight.
fn product(op: &Op<'_>) -> Option<(&'static str, [usize; 2])> {
    let Op::Dense(op) = op else { return None };
    match op {
        DenseOp::LinearForward(op) => Some(("forward", [op.z.shape[1], op.x.shape[1]])),
        DenseOp::LinearDgrad(op) => Some(("dgrad", [op.dz.shape[1], op.dx.shape[1]])),
        DenseOp::LinearWgrad(op) => Some(("wgrad", op.dw.shape)),
        _ => None,
    }
}

/// Activations are bf16 on the device.
type Activations = Matrix<bf16>;
