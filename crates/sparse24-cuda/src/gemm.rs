//! Dense products through cuBLASLt, in bf16 with sums in f32.
//!
//! How a product is computed is a plan: measured once a shape, kept, and written down as text that
//! another process replays. Invariant: a plan repeats its bits. Algorithms that split the sum over
//! k may do so only through partial sums in f32 that a later step adds in order; those that add
//! them up in the output as blocks finish are never candidates.

mod cublaslt;
mod descriptors;
mod plan;

use std::collections::BTreeMap;

use half::bf16;

use crate::{Beta, Device, Error, Matrix, Scalar};
use descriptors::Addresses;
use plan::{Key, Plans, Product};

/// Bytes of [`Gemm`]'s workspace.
pub const WORKSPACE: usize = 32 << 20;

/// Z = X W^T + b, rounded once.
#[derive(Debug, Clone, Copy)]
pub struct LinearForward {
    /// X `[p, q]`.
    pub x: Matrix<bf16>,
    /// W `[r, q]`.
    pub weight: Matrix<bf16>,
    /// b `[1, r]`; none is zero.
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

/// dW = dZ^T X.
#[derive(Debug, Clone, Copy)]
pub struct LinearWgrad {
    /// dZ `[p, r]`.
    pub dz: Matrix<bf16>,
    /// X `[p, q]`.
    pub x: Matrix<bf16>,
    /// dW `[r, q]`.
    pub dw: Matrix<f32>,
    /// Overwrite or accumulate.
    pub beta: Beta,
}

/// The dense products of one device. Operands may be rectangles of larger matrices; each begins at
/// a multiple of 16 bytes.
///
/// A shape's first call that overwrites its output measures the library's candidates, so it must
/// not be captured in a graph; one that accumulates before that takes the library's own first
/// choice, and writes nothing down. Products of k = 0 are zero without a bias.
#[derive(Debug)]
pub struct Gemm {
    plans: Plans,
    workspace: Matrix<u8>,
}

impl Gemm {
    /// No plans yet; the workspace is `[1, WORKSPACE]`, and of this alone.
    ///
    /// # Errors
    /// [`Error::Library`] without cuBLASLt; [`Error::Shape`]; [`Error::Stale`]; [`Error::Blas`].
    pub fn new(device: &Device, workspace: Matrix<u8>) -> Result<Self, Error> {
        device.check("dense products", "workspace", workspace, [1, WORKSPACE])?;
        device.check_aligned("dense products", "workspace", workspace, 256)?;
        Ok(Self { plans: Plans::new(device)?, workspace })
    }

    /// The library's release, of which plans are: major.minor.patch.
    #[must_use]
    pub fn release(&self) -> String {
        dotted(cublaslt::version())
    }

    /// The measured plans as text, by product and shape.
    #[must_use]
    pub fn plans(&self) -> BTreeMap<String, String> {
        self.plans.texts()
    }

    /// How many of them there are.
    #[must_use]
    pub fn planned(&self) -> usize {
        self.plans.measured().count()
    }

    /// Takes over what [`Gemm::plans`] gave, of the same release of the library, in place of what
    /// is planned for that shape.
    ///
    /// # Errors
    /// [`Error::Recorded`] if the texts are no product or no plan, or the library refuses the plan
    /// on this GPU.
    pub fn use_plan(&mut self, product: &str, plan: &str) -> Result<(), Error> {
        self.plans.add(product, plan)
    }

    /// See [`LinearForward`].
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Alignment`], [`Error::Alias`], [`Error::Stale`]; [`Error::Blas`]
    /// for what the library refuses.
    pub fn linear_forward(&mut self, device: &mut Device, op: &LinearForward) -> Result<(), Error> {
        const OPERATION: &str = "linear forward";
        let ([p, q], r) = (op.x.shape(), op.weight.shape()[0]);
        device.check(OPERATION, "weight", op.weight, [r, q])?;
        device.check(OPERATION, "z", op.z, [p, r])?;
        let mut inputs = vec![("weight", op.weight.span()), ("x", op.x.span())];
        if let Some(bias) = op.bias {
            device.check(OPERATION, "bias", bias, [1, r])?;
            check_start(device, OPERATION, "bias", bias)?;
            inputs.push(("bias", bias.span()));
        }
        let product = if op.bias.is_some() { Product::ForwardBias } else { Product::Forward };
        let key = Key {
            product,
            sizes: [r, p, q],
            strides: [op.weight.stride(), op.x.stride(), op.z.stride()],
        };
        self.multiply(
            device,
            OPERATION,
            key,
            Operands { a: op.weight, b: op.x, d: op.z, bias: op.bias, inputs },
            Beta::Overwrite,
        )
    }

    /// See [`LinearDgrad`].
    ///
    /// # Errors
    /// As [`Gemm::linear_forward`].
    pub fn linear_dgrad(&mut self, device: &mut Device, op: &LinearDgrad) -> Result<(), Error> {
        const OPERATION: &str = "linear dgrad";
        let ([p, r], q) = (op.dz.shape(), op.weight.shape()[1]);
        device.check(OPERATION, "weight", op.weight, [r, q])?;
        device.check(OPERATION, "dx", op.dx, [p, q])?;
        let inputs = vec![("weight", op.weight.span()), ("dz", op.dz.span())];
        let key = Key {
            product: Product::Dgrad,
            sizes: [q, p, r],
            strides: [op.weight.stride(), op.dz.stride(), op.dx.stride()],
        };
        self.multiply(
            device,
            OPERATION,
            key,
            Operands { a: op.weight, b: op.dz, d: op.dx, bias: None, inputs },
            Beta::Overwrite,
        )
    }

    /// See [`LinearWgrad`].
    ///
    /// # Errors
    /// As [`Gemm::linear_forward`].
    pub fn linear_wgrad(&mut self, device: &mut Device, op: &LinearWgrad) -> Result<(), Error> {
        const OPERATION: &str = "linear wgrad";
        let ([p, r], q) = (op.dz.shape(), op.x.shape()[1]);
        device.check(OPERATION, "x", op.x, [p, q])?;
        device.check(OPERATION, "dw", op.dw, [r, q])?;
        let inputs = vec![("x", op.x.span()), ("dz", op.dz.span())];
        let key = Key {
            product: Product::Wgrad,
            sizes: [q, r, p],
            strides: [op.x.stride(), op.dz.stride(), op.dw.stride()],
        };
        self.multiply(
            device,
            OPERATION,
            key,
            Operands { a: op.x, b: op.dz, d: op.dw, bias: None, inputs },
            op.beta,
        )
    }

    /// Shapes fit each other.
    fn multiply<T: Scalar>(
        &mut self,
        device: &mut Device,
        operation: &'static str,
        key: Key,
        operands: Operands<T>,
        beta: Beta,
    ) -> Result<(), Error> {
        let Operands { a, b, d, bias, mut inputs } = operands;
        device.check_live(operation, "workspace", self.workspace)?;
        for ((name, _), operand) in inputs.iter().zip([a, b]) {
            device.check_live(operation, name, operand)?;
            check_start(device, operation, name, operand)?;
        }
        check_start(device, operation, "the output", d)?;
        inputs.push(("the workspace", self.workspace.span()));
        device.check_apart(operation, ("the output", d.span()), &inputs)?;
        if d.elements() == 0 {
            return Ok(());
        }
        if key.sizes[2] == 0 && bias.is_none() {
            return if beta == Beta::Overwrite { device.fill_bytes(d, 0) } else { Ok(()) };
        }
        let [a, b, d, workspace] =
            [a.span(), b.span(), d.span(), self.workspace.span()].map(|span| span.start);
        let bias = bias.map_or(0, |bias| bias.span().start);
        self.plans.run(device, key, &Addresses { a, b, d, bias, workspace }, beta)
    }
}

/// The library's release, without any product.
#[cfg(feature = "bench")]
pub(crate) fn release() -> Result<String, Error> {
    cublaslt::load()?;
    Ok(dotted(cublaslt::version()))
}

/// From the library's number: 10000 * major + 100 * minor + patch.
fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// In the library's terms D = A B; `inputs` begin with A and B in the order of their names.
struct Operands<T> {
    a: Matrix<bf16>,
    b: Matrix<bf16>,
    d: Matrix<T>,
    bias: Option<Matrix<bf16>>,
    inputs: Vec<(&'static str, std::ops::Range<u64>)>,
}

/// Candidates are asked for with this alignment; rows may begin anywhere, which the library sees in
/// the strides.
fn check_start<T: Scalar>(
    device: &Device,
    operation: &'static str,
    operand: &'static str,
    matrix: Matrix<T>,
) -> Result<(), Error> {
    device.check_aligned(
        operation,
        operand,
        Matrix { shape: [1, matrix.shape[1]], ..matrix },
        descriptors::ALIGNMENT,
    )
}

#[cfg(test)]
mod tests {
    use super::dotted;

    #[test]
    fn a_release_is_read_from_the_library_s_number() {
        assert_eq!(dotted(130_100), "13.1.0");
    }
}
