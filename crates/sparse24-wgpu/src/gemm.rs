//! Dense products: the three products of a linear layer.
//!
//! Shapes are `[rows, columns]`, with p tokens, q in-features and r out-features. Each element is
//! one sum over ascending k, so its bits do not depend on the kernel on the adapters tested,
//! lavapipe and NVIDIA's, except where a software adapter adds to C: its sums begin with C. WGSL
//! lets a compiler fuse multiply-adds differently in each kernel.

use sparse24_core::op::Accumulate;

use crate::{
    Device, Error, Matrix,
    error::check_shape,
    kernels::{self, Kernel},
};

#[cfg(test)]
mod speed;
#[cfg(test)]
mod tests;

/// Number of large output tiles that occupies an H100 or H200, of 132 multiprocessors.
const ENOUGH: usize = 256;

/// A kernel for products.
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) kernel: &'static Kernel,
    /// Rows and columns of an output tile, the part of C that a workgroup computes.
    tile: [usize; 2],
    /// Values of k per call; `None` if one call covers all of k.
    depth: Option<usize>,
}

impl Product {
    const fn square(kernel: &'static Kernel, side: usize) -> Self {
        Self { kernel, tile: [side; 2], depth: None }
    }

    /// Number of output tiles.
    fn tiles(&self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(self.tile[0]) * n.div_ceil(self.tile[1])
    }

    /// Whether a product consists of whole tiles and calls, in a grid of one dimension.
    fn fits(&self, [m, n, k]: [usize; 3]) -> bool {
        let is_whole = |extent: usize, part: usize| extent > 0 && extent.is_multiple_of(part);
        is_whole(m, self.tile[0])
            && is_whole(n, self.tile[1])
            && self.depth.is_none_or(|depth| is_whole(k, depth))
            && self.tiles([m, n]) <= kernels::MOST_GROUPS as usize
    }

    /// Runs all calls of a product; the constants begin with m, n and k.
    fn run(
        &self,
        device: &mut Device,
        operands: [Matrix; 4],
        constants: &[u32],
    ) -> Result<(), Error> {
        let (groups, k) = (self.tiles(operands[3].shape), constants[2].max(1));
        for first in (0..k).step_by(self.depth.unwrap_or(k as usize)) {
            device.run(self.kernel, operands, &[constants, &[first]].concat(), groups)?;
        }
        Ok(())
    }
}

static SINGLES: Product = Product::square(&kernels::GEMM, 64);
static FOURS: Product = Product::square(&kernels::GEMM_FOURS, 64);
/// Reads less than [`FOURS`], but only a large product has enough such tiles to occupy a GPU.
static LARGE: Product = Product::square(&kernels::GEMM_LARGE, 128);
/// For adapters that run on a CPU.
static SOFTWARE: Product =
    Product { kernel: &kernels::GEMM_SOFTWARE, tile: [32, 128], depth: Some(64) };

/// All kernels for products that a device uses.
pub(crate) fn products(device: &Device) -> [&'static Product; 3] {
    [&SINGLES, &FOURS, if device.is_software() { &SOFTWARE } else { &LARGE }]
}

/// The kernel for a product.
fn chosen(device: &Device, k: usize, [a, b, out]: [Matrix; 3]) -> &'static Product {
    let [m, n] = out.shape;
    let is_large = match device.is_software() {
        true => out.has_fours() && SOFTWARE.fits([m, n, k]),
        false => LARGE.tiles([m, n]) >= ENOUGH,
    };
    let [singles, fours, large] = products(device);
    match a.has_fours() && b.has_fours() {
        false => singles,
        true if is_large => large,
        true => fours,
    }
}

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
    let product = chosen(device, constants[2] as usize, [a, b, out]);
    product.run(device, [a, b, bias.unwrap_or(b), out], &constants)
}

/// out = W W^T by this kernel, which it must fit: w `[r, q]`, out `[r, r]`.
pub(crate) fn square(
    device: &mut Device,
    product: &Product,
    w: Matrix,
    out: Matrix,
) -> Result<(), Error> {
    let (of_w, transposed) = ((w, Transposed::No), (w, Transposed::Yes));
    let constants = constants(of_w, transposed, None, out, Accumulate::Overwrite)?;
    product.run(device, [w, w, w, out], &constants)
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
