//! The CPU adaptor: `sparse24-cpu` behind the [`Backend`] contract.
//!
//! A [`Weight24`] is S(W) `[r, q]` and its transpose, and a [`Gradient24`] the sampled dZ^T
//! `[r, p]`, as [`Strips`]: products skip their zeros.
//!
//! [`Weight24`]: super::Weight24
//! [`Gradient24`]: super::Gradient24

use ndarray::ArrayViewMut2;
use sparse24_core::{
    Mask,
    flip::flip_count,
    op::{NonFinite, StepState},
};
use sparse24_cpu::{optimizer, rounding::round_bf16, simd::Simd, strips::Strips};

use self::buffers::{Buffers, view_mut};
use super::op::{Orientation, check};
use super::{
    Arithmetic, Backend, Capabilities, DType, Device, Footprint, GraphId, MaskId, Op,
    OptimizerEntry, Region, StepReport, Tensor, bytes,
};
use crate::{Error, Result, host::full};

mod buffers;
mod dense;
mod memory;
mod sparse;
mod update;

/// The CPU backend; it runs on the rayon pool from which it is called.
pub struct CpuBackend {
    arithmetic: Arithmetic,
    buffers: Buffers,
    masks: Vec<Mask>,
    weights24: Vec<Operands>,
    /// Sampled gradients, and for how many tokens each has memory.
    gradients24: Vec<(usize, Strips)>,
    tables: Vec<Vec<OptimizerEntry>>,
    scratch: Vec<f32>,
    state: StepState,
    grad_norm: f32,
    non_finite: Option<NonFinite>,
}

/// A pruned weight as products read it.
struct Operands {
    /// S(W) `[r, q]`, unless its mask serves dgrad only.
    forward: Option<Strips>,
    /// S(W)^T `[q, r]`.
    dgrad: Strips,
}

impl From<sparse24_cpu::Error> for Error {
    fn from(error: sparse24_cpu::Error) -> Self {
        match error {
            sparse24_cpu::Error::Semantics(error) => Self::Semantics(error),
            sparse24_cpu::Error::Shape { operation, operand, expected, found } => {
                Self::Operand { operation, operand, expected, found }
            }
            sparse24_cpu::Error::Token { token, position, vocabulary, .. } => {
                Self::UnknownToken { token, position, vocabulary: vocabulary as u32 }
            }
            sparse24_cpu::Error::Memory { bytes } => {
                full("a copy of an operand", bytes, Region::Scratch)
            }
            other => Self::Refused(other.to_string()),
        }
    }
}

impl CpuBackend {
    /// A backend that holds nothing yet.
    #[must_use]
    pub fn new(arithmetic: Arithmetic) -> Self {
        Self {
            arithmetic,
            buffers: Buffers::default(),
            masks: Vec::new(),
            weights24: Vec::new(),
            gradients24: Vec::new(),
            tables: Vec::new(),
            scratch: Default::default(),
            state: StepState::default(),
            grad_norm: 0.0,
            non_finite: None,
        }
    }

    /// Runs an operation that writes these tensors, each in its own buffer; activations among them
    /// are rounded as they are stored.
    fn write<const N: usize>(
        &mut self,
        outputs: [Tensor; N],
        run: impl FnOnce(&Self, [ArrayViewMut2<'_, f32>; N]) -> Result<(), sparse24_cpu::Error>,
    ) -> Result {
        let mut taken = outputs.map(|t| self.buffers.take(t));
        let mut at = 0;
        let views = taken.each_mut().map(|data| {
            at += 1;
            view_mut(outputs[at - 1], data)
        });
        let done = run(self, views);
        for (t, mut data) in outputs.into_iter().zip(taken) {
            if t.dtype == DType::Activation {
                self.round(view_mut(t, &mut data));
            }
            self.buffers.put(t, data);
        }
        Ok(done?)
    }

    /// Rounds values as activations are stored.
    fn round(&self, mut values: ArrayViewMut2<'_, f32>) {
        match self.arithmetic {
            Arithmetic::Native | Arithmetic::F32 => {}
            Arithmetic::Bf16 => round_bf16(values.view_mut()),
        }
    }
}

impl Backend for CpuBackend {
    fn device(&self) -> Device {
        let arithmetic = match self.arithmetic {
            Arithmetic::Native | Arithmetic::F32 => "f32",
            Arithmetic::Bf16 => "bf16 activations and operands, f32 sums",
        };
        let (threads, simd) = (sparse24_cpu::threads(), Simd::detect());
        let plural = if threads == 1 { "" } else { "s" };
        Device {
            backend: "cpu",
            description: format!("{threads} thread{plural}, {simd}, {arithmetic}"),
            sparse_products: "computed without the pruned values",
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::unlimited("cpu")
    }

    fn set_step(&mut self, state: StepState) -> Result {
        self.state = state;
        Ok(())
    }

    fn execute(&mut self, op: &Op<'_>) -> Result {
        op.check()?;
        match op {
            Op::Sparse(op) => self.sparse(op),
            Op::Dense(op) => self.dense(op),
            Op::Update(op) => self.update(op),
        }
    }

    fn fused(&mut self, ops: &[Op<'_>]) -> Result<usize> {
        self.add_norm(ops)
    }

    fn graph(&mut self, _: GraphId, work: &mut dyn FnMut(&mut dyn Backend) -> Result) -> Result {
        work(self)
    }

    fn flip_count(&mut self, MaskId(a): MaskId, MaskId(b): MaskId) -> Result<u64> {
        Ok(flip_count(&self.masks[a], &self.masks[b])?)
    }

    fn l1_distance(&mut self, a: Tensor, b: Tensor) -> Result<f64> {
        check::distance(a, b)?;
        let [a, b] = [a, b].map(|t| self.buffers.view(t));
        let [a, b] = [a.as_standard_layout(), b.as_standard_layout()];
        let [a, b] = [&a, &b].map(|x| x.as_slice().expect("it has the standard layout"));
        Ok(optimizer::l1_distance(a, b)?)
    }

    fn report(&mut self, losses: Tensor) -> Result<StepReport> {
        check::f32s("report", losses)?;
        let losses = self.buffers.view(losses).iter().copied().collect();
        Ok(StepReport { losses, grad_norm: self.grad_norm, non_finite: self.non_finite.take() })
    }
}

/// The memory of the CPU backend: f32 throughout, and pruned operands as [`Strips`].
pub struct CpuFootprint;

impl Footprint for CpuFootprint {
    fn tensor(&self, shape: [usize; 2], _: DType, _: Region) -> u64 {
        bytes(shape, 4)
    }

    fn weight24(&self, [r, q]: [usize; 2], orientation: Orientation) -> u64 {
        let forward = if orientation == Orientation::Permuted { 0 } else { Strips::bytes([r, q]) };
        forward.saturating_add(Strips::bytes([q, r]))
    }

    fn gradient24(&self, [p, r]: [usize; 2]) -> u64 {
        Strips::bytes([r, p])
    }
}
