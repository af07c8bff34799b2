//! A matrix times a scalar, and the gradient of the scalar.

use sparse24_core::op::Accumulate;

use crate::{Device, Error, Matrix, WORKGROUP, error::check_shape, kernels, sums::column_sums};

/// Elements that a workgroup sums.
const BLOCK: usize = 4096;

/// out = s x: x and out `[n, d]`, s `[1, 1]`.
///
/// # Errors
/// [`Error::Shape`] unless out has the shape of x; failures of earlier work.
pub fn scale(device: &mut Device, x: Matrix, s: Matrix, out: Matrix) -> Result<(), Error> {
    check_shape("scale", "out", x.shape, out)?;
    let ([x_offset, x_stride], [out_offset, out_stride]) = (x.place(), out.place());
    let [columns, elements] = [x.shape[1], x.elements()].map(|n| n as u32);
    let s_offset = s.offset as u32;
    let constants = [x_offset, x_stride, s_offset, out_offset, out_stride, columns, elements];
    device.run(&kernels::SCALE, [x, s, out], &constants, x.elements().div_ceil(WORKGROUP))
}

/// Elements of the scratch of [`scale_grad`].
#[must_use]
pub fn scale_grad_scratch(shape: [usize; 2]) -> usize {
    (shape[0] * shape[1]).div_ceil(BLOCK)
}

/// ds = sum(x * dout), or ds += sum(x * dout): x and dout `[n, d]`, ds `[1, 1]`.
///
/// # Errors
/// Like [`scale`].
///
/// # Panics
/// If the scratch is too small.
pub fn scale_grad(
    device: &mut Device,
    x: Matrix,
    dout: Matrix,
    ds: Matrix,
    accumulate: Accumulate,
    scratch: Matrix,
) -> Result<(), Error> {
    check_shape("scale gradient", "dout", x.shape, dout)?;
    let blocks = scale_grad_scratch(x.shape);
    let sums = scratch.reshaped([blocks, 1]);
    assert_eq!(sums.offset, 0, "scratch is a whole buffer");
    let sizes = [x.shape[1], x.elements()].map(|n| n as u32);
    let constants = [x.place(), dout.place(), sizes].concat();
    device.run(&kernels::SCALE_GRAD, [x, dout, sums], &constants, blocks)?;
    column_sums(device, sums, ds, accumulate)
}
