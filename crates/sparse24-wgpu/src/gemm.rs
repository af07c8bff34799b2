//! Dense products: the three products of a linear layer.
//!
//! Shapes are `[rows, columns]`, with p tokens, q in-features and r out-features. Each element is
//! one sum over ascending k, so its bits depend on the device alone.

use sparse24_core::op::Accumulate;

use crate::{Device, Error, Matrix, error::check_shape, kernels};

/// Rows and columns of an output tile, the part of C that a workgroup computes. The larger size
/// reads less, but needs more tiles to occupy a GPU; the bits are the same.
const TILE: usize = 64;
const LARGE_TILE: usize = 128;
/// Number of large output tiles that occupies any current GPU.
const ENOUGH: usize = 256;

/// Offset of an operand, and its strides in elements from one row and one column to the next.
fn steps(m: Matrix, transposed: Transposed) -> [u32; 3] {
    let [offset, stride] = m.place();
    match transposed {
        Transposed::No => [offset, stride, 1],
        Transposed::Yes => [offset, 1, stride],
    }
}

/// Whether an operand is read as its transpose.
#[derive(Clone, Copy)]
enum Transposed {
    No,
    Yes,
}

fn gemm(
    device: &mut Device,
    (a, of_a): (Matrix, Transposed),
    (b, of_b): (Matrix, Transposed),
    bias: Option<Matrix>,
    out: Matrix,
    accumulate: Accumulate,
) -> Result<(), Error> {
    let [m, n] = out.shape;
    let k = match of_a {
        Transposed::No => a.shape[1],
        Transposed::Yes => a.shape[0],
    };
    let expected = |first, second, transposed| match transposed {
        Transposed::No => [first, second],
        Transposed::Yes => [second, first],
    };
    check_shape("product", "the left operand", expected(m, k, of_a), a)?;
    check_shape("product", "the right operand", expected(k, n, of_b), b)?;
    if let Some(bias) = bias {
        check_shape("product", "the bias", [1, n], bias)?;
    }
    let sizes = [m, n, k].map(|size| size as u32);
    let [out_offset, out_stride] = out.place();
    let rest = [
        out_offset,
        out_stride,
        bias.map_or(0, |bias| bias.offset as u32),
        u32::from(bias.is_some()),
        u32::from(accumulate == Accumulate::Add),
    ];
    let constants = [&sizes[..], &steps(a, of_a), &steps(b, of_b), &rest].concat();
    let groups = |tile| m.div_ceil(tile) * n.div_ceil(tile);
    let (kernel, tile) = match a.has_fours() && b.has_fours() {
        false => (&kernels::GEMM, TILE),
        true if groups(LARGE_TILE) < ENOUGH => (&kernels::GEMM_FOURS, TILE),
        true => (&kernels::GEMM_LARGE, LARGE_TILE),
    };
    device.run(kernel, [a, b, bias.unwrap_or(b), out], &constants, groups(tile))
}

/// Z = X W^T + b: x `[p, q]`, w `[r, q]`, bias `[1, r]`, z `[p, r]`.
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; failures of earlier work.
pub fn linear_forward(
    device: &mut Device,
    x: Matrix,
    w: Matrix,
    bias: Option<Matrix>,
    z: Matrix,
) -> Result<(), Error> {
    gemm(device, (x, Transposed::No), (w, Transposed::Yes), bias, z, Accumulate::Overwrite)
}

/// dX = dZ W: dz `[p, r]`, w `[r, q]`, dx `[p, q]`.
///
/// # Errors
/// Like [`linear_forward`].
pub fn linear_dgrad(device: &mut Device, dz: Matrix, w: Matrix, dx: Matrix) -> Result<(), Error> {
    gemm(device, (dz, Transposed::No), (w, Transposed::No), None, dx, Accumulate::Overwrite)
}

/// dW = dZ^T X, or dW += it: dz `[p, r]`, x `[p, q]`, dw `[r, q]`.
///
/// # Errors
/// Like [`linear_forward`].
pub fn linear_wgrad(
    device: &mut Device,
    dz: Matrix,
    x: Matrix,
    dw: Matrix,
    accumulate: Accumulate,
) -> Result<(), Error> {
    gemm(device, (dz, Transposed::Yes), (x, Transposed::No), None, dw, accumulate)
}
