//! Dense products through cuBLASLt, in bf16 with f32 sums.
//!
//! How a product is computed is a plan: measured once per shape, kept, and recorded as text for
//! other processes. Invariant: a plan repeats its bits. Split-K algorithms are candidates only if a
//! later step adds the f32 partial sums in order, never if blocks add to the output as they finish.

mod cublaslt;
mod descriptors;
mod key;
mod plan;

use std::collections::BTreeMap;

use half::bf16;
use sparse24_core::op::Accumulate;

use crate::{Device, Error, Matrix, Scalar};
use descriptors::Addresses;
use key::{Key, Product};
use plan::Plans;

/// Bytes of [`Gemm`]'s workspace.
pub const WORKSPACE: usize = descriptors::WORKSPACE;

/// Z = X W^T + b, rounded once.
#[derive(Debug, Clone, Copy)]
pub struct LinearForward {
    /// X `[p, q]`.
    pub x: Matrix<bf16>,
    /// W `[r, q]`.
    pub weight: Matrix<bf16>,
    /// b `[1, r]`; zero if absent.
    pub bias: Option<Matrix<bf16>>,
    /// Z `[p, r]`, overwritten.
    pub z: Matrix<bf16>,
}

/// dX = dZ W.
#[derive(Debug, Clone, Copy)]
pub struct LinearDgrad {
    /// dZ `[p, r]`.
    pub dz: Matrix<bf16>,
    /// W `[r, q]`.
    pub weight: Matrix<bf16>,
    /// dX `[p, q]`, overwritten.
    pub dx: Matrix<bf16>,
}

/// dW = dZ^T X, or dW += it.
#[derive(Debug, Clone, Copy)]
pub struct LinearWgrad {
    /// dZ `[p, r]`.
    pub dz: Matrix<bf16>,
    /// X `[p, q]`.
    pub x: Matrix<bf16>,
    /// dW `[r, q]`.
    pub dw: Matrix<f32>,
    /// Whether dW is overwritten.
    pub accumulate: Accumulate,
}

/// The dense products of one device. Operands may be rectangles of larger matrices; each starts at
/// a multiple of 16 bytes.
///
/// The first call for a shape that overwrites its output measures candidates, so it cannot be
/// captured in a CUDA graph. A call that accumulates before that takes cuBLASLt's first proposal
/// and records nothing. Products with k = 0 are zero, plus the bias.
#[derive(Debug)]
pub struct Gemm {
    plans: Plans,
    workspace: Matrix<u8>,
}

impl Gemm {
    /// Opens cuBLASLt, without plans. The workspace is `[1, WORKSPACE]` and used by nothing else.
    ///
    /// # Errors
    /// [`Error::Library`] without cuBLASLt; [`Error::Shape`], [`Error::Stale`], [`Error::Blas`].
    pub fn new(device: &Device, workspace: Matrix<u8>) -> Result<Self, Error> {
        device.checks("dense products").input("workspace", workspace, [1, WORKSPACE], 256)?;
        Ok(Self { plans: Plans::new(device)?, workspace })
    }

    /// The release of cuBLASLt: major.minor.patch.
    #[must_use]
    pub fn release(&self) -> String {
        dotted(cublaslt::version())
    }

    /// The measured plans as text, by product and shape.
    #[must_use]
    pub fn plans(&self) -> BTreeMap<String, String> {
        self.plans.texts()
    }

    /// The number of measured plans.
    #[must_use]
    pub fn planned(&self) -> usize {
        self.plans.measured().count()
    }

    /// Uses a plan from [`Gemm::plans`], recorded with the same release of cuBLASLt.
    ///
    /// # Errors
    /// [`Error::Recorded`] if the texts are malformed, or cuBLASLt refuses the plan on this GPU.
    pub fn use_plan(&mut self, product: &str, plan: &str) -> Result<(), Error> {
        self.plans.add(product, plan)
    }

    /// Queues a [`LinearForward`].
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Alignment`], [`Error::Alias`], [`Error::Stale`]; [`Error::Blas`]
    /// if cuBLASLt refuses.
    pub fn linear_forward(&mut self, device: &mut Device, op: &LinearForward) -> Result<(), Error> {
        let ([p, q], r) = (op.x.shape(), op.weight.shape()[0]);
        let product = if op.bias.is_some() { Product::ForwardBias } else { Product::Forward };
        let operands = Operands {
            operation: "linear forward",
            a: ("weight", op.weight, [r, q]),
            b: ("x", op.x, [p, q]),
            d: ("z", op.z, [p, r]),
            bias: op.bias,
        };
        self.multiply(device, product, [r, p, q], operands, Accumulate::Overwrite)
    }

    /// Queues a [`LinearDgrad`].
    ///
    /// # Errors
    /// See [`Gemm::linear_forward`].
    pub fn linear_dgrad(&mut self, device: &mut Device, op: &LinearDgrad) -> Result<(), Error> {
        let ([p, r], q) = (op.dz.shape(), op.weight.shape()[1]);
        let operands = Operands {
            operation: "linear dgrad",
            a: ("weight", op.weight, [r, q]),
            b: ("dz", op.dz, [p, r]),
            d: ("dx", op.dx, [p, q]),
            bias: None,
        };
        self.multiply(device, Product::Dgrad, [q, p, r], operands, Accumulate::Overwrite)
    }

    /// Queues a [`LinearWgrad`].
    ///
    /// # Errors
    /// See [`Gemm::linear_forward`].
    pub fn linear_wgrad(&mut self, device: &mut Device, op: &LinearWgrad) -> Result<(), Error> {
        let ([p, r], q) = (op.dz.shape(), op.x.shape()[1]);
        let operands = Operands {
            operation: "linear wgrad",
            a: ("x", op.x, [p, q]),
            b: ("dz", op.dz, [p, r]),
            d: ("dw", op.dw, [r, q]),
            bias: None,
        };
        self.multiply(device, Product::Wgrad, [q, r, p], operands, op.accumulate)
    }

    fn multiply<T: Scalar>(
        &mut self,
        device: &mut Device,
        product: Product,
        sizes: [usize; 3],
        operands: Operands<T>,
        accumulate: Accumulate,
    ) -> Result<(), Error> {
        let Operands { operation, a, b, d, bias } = operands;
        let mut checks = device.checks(operation);
        checks.rectangle(a.0, a.1, a.2)?.rectangle(b.0, b.1, b.2)?;
        if let Some(bias) = bias {
            checks.rectangle("bias", bias, [1, d.2[1]])?;
        }
        checks
            .input("workspace", self.workspace, [1, WORKSPACE], 256)?
            .rectangle(d.0, d.1, d.2)?
            .last_is_apart()?;
        let (a, b, d) = (a.1, b.1, d.1);
        if d.elements() == 0 {
            return Ok(());
        }
        if sizes[2] == 0 && bias.is_none() {
            return match accumulate {
                Accumulate::Overwrite => device.fill_bytes(d, 0),
                Accumulate::Add => Ok(()),
            };
        }
        let key = Key { product, sizes, strides: [a.stride(), b.stride(), d.stride()] };
        let addresses = Addresses {
            a: a.address,
            b: b.address,
            d: d.address,
            bias: bias.map_or(0, |bias| bias.address),
            workspace: self.workspace.address,
        };
        self.plans.run(device, key, &addresses, accumulate)
    }
}

/// The release of cuBLASLt, without any product.
#[cfg(feature = "bench")]
pub(crate) fn release() -> Result<String, Error> {
    cublaslt::load()?;
    Ok(dotted(cublaslt::version()))
}

/// cuBLASLt's version number is 10000 * major + 100 * minor + patch.
fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// D = A B in cuBLASLt's terms: names, matrices and the shapes that they must have.
struct Operands<T> {
    operation: &'static str,
    a: (&'static str, Matrix<bf16>, [usize; 2]),
    b: (&'static str, Matrix<bf16>, [usize; 2]),
    d: (&'static str, Matrix<T>, [usize; 2]),
    bias: Option<Matrix<bf16>>,
}

#[cfg(test)]
mod tests {
    use super::dotted;

    #[test]
    fn versions_are_dotted() {
        assert_eq!(dotted(130_100), "13.1.0");
    }
}
