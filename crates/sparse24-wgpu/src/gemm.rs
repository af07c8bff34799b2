//! Dense products: the three products of a linear layer.
//!
//! Shapes are `[rows, columns]`, with p tokens, q in-features and r out-features. Each element is
//! one sum over ascending k, so its bits do not depend on the size of the output tile on the
//! adapters tested, lavapipe and NVIDIA's. WGSL lets a compiler fuse multiply-adds differently in
//! each kernel.

use sparse24_core::op::Accumulate;

use crate::{
    Device, Error, Matrix,
    error::check_shape,
    kernels::{self, Kernel},
};

#[cfg(test)]
mod speed;

/// Rows and columns of an output tile, the part of C that a workgroup computes. The larger size
/// reads less, but only a large product has enough such tiles to occupy a GPU.
const TILE: usize = 64;
const LARGE_TILE: usize = 128;
/// Number of large output tiles that occupies an H100 or H200, of 132 multiprocessors.
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

/// A product kernel, and the side of its output tiles.
pub(crate) type Tiled = (&'static Kernel, usize);
pub(crate) static KERNELS: [Tiled; 3] =
    [(&kernels::GEMM, TILE), (&kernels::GEMM_FOURS, TILE), (&kernels::GEMM_LARGE, LARGE_TILE)];

/// The kernel for a product.
fn chosen([m, n]: [usize; 2], a: Matrix, b: Matrix) -> Tiled {
    let [singles, fours, large] = KERNELS;
    match a.has_fours() && b.has_fours() {
        false => singles,
        true if tiles([m, n], LARGE_TILE) < ENOUGH => fours,
        true => large,
    }
}

/// Number of output tiles.
fn tiles([m, n]: [usize; 2], side: usize) -> usize {
    m.div_ceil(side) * n.div_ceil(side)
}

/// Checks the operands of a product, and returns the constants of its kernel.
fn constants(
    (a, of_a): (Matrix, Transposed),
    (b, of_b): (Matrix, Transposed),
    bias: Option<Matrix>,
    out: Matrix,
    accumulate: Accumulate,
) -> Result<Vec<u32>, Error> {
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
    Ok([&sizes[..], &steps(a, of_a), &steps(b, of_b), &rest].concat())
}

fn gemm(
    device: &mut Device,
    a: (Matrix, Transposed),
    b: (Matrix, Transposed),
    bias: Option<Matrix>,
    out: Matrix,
    accumulate: Accumulate,
) -> Result<(), Error> {
    let constants = constants(a, b, bias, out, accumulate)?;
    let (a, b) = (a.0, b.0);
    let (kernel, side) = chosen(out.shape, a, b);
    let operands = [a, b, bias.unwrap_or(b), out];
    device.run(kernel, operands, &constants, tiles(out.shape, side))
}

/// out = W W^T by this kernel: w `[r, q]`, out `[r, r]`.
pub(crate) fn square(
    device: &mut Device,
    (kernel, side): Tiled,
    w: Matrix,
    out: Matrix,
) -> Result<(), Error> {
    let (of_w, transposed) = ((w, Transposed::No), (w, Transposed::Yes));
    let constants = constants(of_w, transposed, None, out, Accumulate::Overwrite)?;
    device.run(kernel, [w, w, w, out], &constants, tiles(out.shape, side))
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

/// dW = dZ^T X, or dW += dZ^T X: dz `[p, r]`, x `[p, q]`, dw `[r, q]`.
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
