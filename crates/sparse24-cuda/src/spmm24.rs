//! The sparse x dense product, on the sparse tensor cores: Hopper's own kernels, and one for every
//! other GPU.
//!
//! The sparse operand of the instruction is always on the left. So a layer whose activations are
//! rows of features computes the transpose of its result, which the kernel turns while it stores:
//! see [`spmm24_transposed`]. Invariant: a [`Plan`] decides how a product is computed and in which
//! order it is summed, never what it is. Deliberately absent: where compressed operands come from.

mod guess;
mod plan;

use std::ops::Range;

use half::bf16;

pub use plan::{Form, NoPlan, Plan, Wgmma, plans};

use crate::{
    Beta, Device, Error, Matrix, Scalar,
    compressed::Compressed,
    launch::{Argument, Grid},
    layout::BLOCK,
    tensor_map,
};

/// The largest m, n and k: what grids and coordinates count with.
pub const MAX_SIZE: usize = 65_535 * BLOCK;
/// Where rows must begin for the copy engine and 16-byte stores, and for the kernel without them.
const WIDE: usize = tensor_map::ALIGNMENT;
const NARROW: usize = 8;

/// Operands of [`spmm24_transposed`].
#[derive(Debug, Clone, Copy)]
pub struct Transposed {
    /// The sparse operand `[m, k]`, m a multiple of 4.
    pub a: Compressed,
    /// The transpose of the dense operand: `[n, k]`.
    pub b: Matrix<bf16>,
    /// `[1, m]`, added to every row of the result.
    pub bias: Option<Matrix<f32>>,
    /// The result's transpose `[n, m]`, overwritten.
    pub d: Matrix<bf16>,
    /// Memory for at least [`Plan::scratch`] numbers; what it holds is lost.
    pub scratch: Matrix<f32>,
}

/// Operands of [`spmm24`].
#[derive(Debug, Clone, Copy)]
pub struct Straight {
    /// The sparse operand `[m, k]`.
    pub a: Compressed,
    /// The dense operand `[k, n]`, n a multiple of 4. Up to three of its last rows may be missing;
    /// they count as zeros.
    pub b: Matrix<bf16>,
    /// The result `[m, n]`.
    pub d: Matrix<f32>,
    /// What becomes of what it holds.
    pub beta: Beta,
    /// Memory for at least [`Plan::scratch`] numbers; what it holds is lost.
    pub scratch: Matrix<f32>,
}

/// D`[n,m]` = (decode(A)`[m,k]` B`[n,k]`^T)^T + bias: Z = X S(W)^T + bias of the forward pass, and
/// dX = dZ S(W) with S(W)^T as A.
///
/// Sums are in f32, in an order that depends on the plan and the shape alone; bias is added to them
/// before the one rounding to bf16.
///
/// # Errors
/// [`Error::Shape`]; [`Error::Semantics`] unless m is a multiple of 4; [`Error::Alignment`] unless
/// rows of B and D begin at multiples of 16 bytes (8 suffice for [`Plan::Mma`], all that [`plans`]
/// then offers); [`Error::Unserved`] for a plan of another GPU; [`Error::Alias`], [`Error::Stale`],
/// [`Error::TooLarge`], [`Error::Driver`].
pub fn spmm24_transposed(
    device: &mut Device,
    operands: &Transposed,
    plan: Plan,
) -> Result<(), Error> {
    const OPERATION: &str = "spmm24 transposed";
    let Transposed { a, b, bias, d, scratch } = *operands;
    let ([m, k], n) = (a.shape(), b.shape()[0]);
    let plan = plan.unless_empty(k);
    check_sizes(OPERATION, m, [m, n, k])?;
    a.check(device, OPERATION, "a", [m, k])?;
    device.check(OPERATION, "b", b, [n, k])?;
    device.check(OPERATION, "d", d, [n, m])?;
    let mut inputs = vec![("a", a.values.span()), ("a", a.metadata.span()), ("b", b.span())];
    if let Some(bias) = bias {
        device.check(OPERATION, "bias", bias, [1, m])?;
        inputs.push(("bias", bias.span()));
    }
    check_memory(device, OPERATION, plan, &inputs, b, d, scratch)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let (values, metadata, bias) = (a.values.into(), a.metadata.into(), bias.into());
    match plan {
        Plan::Mma => {
            let sizes = [m, n, k].map(|length| Argument::U32(length as u32));
            let operands = [b.into(), stride(b), values, metadata, bias, d.into(), stride(d)];
            device.launch(
                "spmm24_mma_transposed",
                mma_grid([m, n]),
                &[&operands[..], &sizes].concat(),
            )
        }
        Plan::Wgmma(wgmma) => {
            let launches =
                wgmma.launches(OPERATION, device.architecture(), Form::Transposed, [m, n, k])?;
            let maps = [
                tensor_map::swizzled(b, launches.rows_of_b)?,
                tensor_map::swizzled(d, launches.rows_of_d)?,
            ];
            let operands = [maps[0], maps[1], values, metadata, bias, scratch.into()];
            device.launch(
                launches.entry,
                launches.grid,
                &[&operands[..], &launches.sizes].concat(),
            )?;
            let operands = [scratch.into(), bias, d.into(), stride(d)];
            device.launch(
                "spmm24_gather_transposed",
                launches.gather_grid,
                &[&operands[..], &launches.gather_sizes].concat(),
            )
        }
    }
}

/// D`[m,n]` (+)= decode(A)`[m,k]` B`[k,n]`: dW = MVUE(dZ^T) X.
///
/// Sums are in f32, in an order that depends on the plan and the shape alone.
///
/// # Errors
/// [`Error::Shape`]; [`Error::Semantics`] unless m and n are multiples of 4; [`Error::Alignment`]
/// unless rows of B begin at multiples of 16 bytes and those of D too (8 suffice for [`Plan::Mma`],
/// all that [`plans`] then offers); [`Error::Unserved`] for a plan of another GPU;
/// [`Error::Alias`], [`Error::Stale`], [`Error::TooLarge`], [`Error::Driver`].
pub fn spmm24(device: &mut Device, operands: &Straight, plan: Plan) -> Result<(), Error> {
    const OPERATION: &str = "spmm24";
    let Straight { a, b, d, beta, scratch } = *operands;
    let ([m, k], [rows, n]) = (a.shape(), b.shape());
    let plan = plan.unless_empty(k);
    check_sizes(OPERATION, m, [m, n, k])?;
    check_sizes(OPERATION, n, [m, n, k])?;
    a.check(device, OPERATION, "a", [m, k])?;
    device.check(OPERATION, "b", b, [if rows.next_multiple_of(4) == k { rows } else { k }, n])?;
    device.check(OPERATION, "d", d, [m, n])?;
    let inputs = [("a", a.values.span()), ("a", a.metadata.span()), ("b", b.span())];
    check_memory(device, OPERATION, plan, &inputs, b, d, scratch)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let (values, metadata) = (a.values.into(), a.metadata.into());
    let result = [d.into(), stride(d), Argument::U32(u32::from(beta == Beta::Accumulate))];
    match plan {
        Plan::Mma => {
            let sizes = [m, n, k, rows].map(|length| Argument::U32(length as u32));
            let inputs = [b.into(), stride(b), values, metadata];
            device.launch(
                "spmm24_mma_straight",
                mma_grid([m, n]),
                &[&inputs[..], &result, &sizes].concat(),
            )
        }
        Plan::Wgmma(wgmma) => {
            let launches =
                wgmma.launches(OPERATION, device.architecture(), Form::Straight, [m, n, k])?;
            let inputs =
                [tensor_map::swizzled(b, launches.rows_of_b)?, values, metadata, scratch.into()];
            device.launch(
                launches.entry,
                launches.grid,
                &[&inputs[..], &result, &launches.sizes].concat(),
            )?;
            device.launch(
                "spmm24_gather",
                launches.gather_grid,
                &[&[scratch.into()], &result[..], &launches.gather_sizes].concat(),
            )
        }
    }
}

/// The result and the scratch lie apart and are large enough, and rows begin where the plan's
/// kernels read and write.
fn check_memory<D: Scalar>(
    device: &Device,
    operation: &'static str,
    plan: Plan,
    inputs: &[(&'static str, Range<u64>)],
    b: Matrix<bf16>,
    d: Matrix<D>,
    scratch: Matrix<f32>,
) -> Result<(), Error> {
    let bytes = if plan == Plan::Mma { NARROW } else { WIDE };
    device.check_aligned(operation, "b", b, bytes)?;
    device.check_aligned(operation, "d", d, bytes)?;
    device.check_apart(operation, ("d", d.span()), inputs)?;
    let needed = plan.scratch();
    device.check_live(operation, "scratch", scratch)?;
    if scratch.elements() < needed || !scratch.is_contiguous() {
        return Err(Error::Shape {
            operation,
            operand: "scratch",
            expected: [1, needed],
            found: scratch.shape(),
        });
    }
    device.check_aligned(operation, "scratch", scratch, WIDE)?;
    device.check_apart(
        operation,
        ("scratch", scratch.span()),
        &[inputs, &[("d", d.span())]].concat(),
    )
}

fn mma_grid([m, n]: [usize; 2]) -> Grid {
    Grid::plane([n.div_ceil(BLOCK), m.div_ceil(BLOCK)], 128)
}

fn stride<T: Scalar>(matrix: Matrix<T>) -> Argument {
    Argument::U64(matrix.stride() as u64)
}

/// `grouped` is a multiple of 4, and nothing is larger than kernels count.
fn check_sizes(operation: &'static str, grouped: usize, sizes: [usize; 3]) -> Result<(), Error> {
    if !grouped.is_multiple_of(4) {
        return Err(sparse24_core::Error::NotGrouped { operation, length: grouped }.into());
    }
    match sizes.into_iter().zip(["m", "n", "k"]).find(|&(size, _)| size > MAX_SIZE) {
        Some((found, what)) => Err(Error::TooLarge { operation, what, found, limit: MAX_SIZE }),
        None => Ok(()),
    }
}
