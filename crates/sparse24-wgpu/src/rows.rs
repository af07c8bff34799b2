//! Gathering rows by number, and scattering them back: exact copies.

use crate::{Device, Error, Matrix, WORKGROUP, elementwise::fill, error::check_shape, kernels};

/// Row i of out = row `rows[i]` of x, or zeros where x has no such row: x `[p, d]`, rows u32
/// `[n, 1]`, out `[n, d]`.
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; failures of earlier work.
pub fn gather_rows(device: &mut Device, x: Matrix, rows: Matrix, out: Matrix) -> Result<(), Error> {
    check_shape("gather rows", "out", [rows.shape[0], x.shape[1]], out)?;
    let constants = constants(x, rows, out, x.shape[0], out);
    device.run(
        &kernels::GATHER_ROWS,
        [x, rows, out],
        &constants,
        out.elements().div_ceil(WORKGROUP),
    )
}

/// dx = 0, then row `rows[i]` of dx = row i of dout, where all `rows` are different: dout `[n, d]`,
/// dx `[p, d]`.
///
/// # Errors
/// Like [`gather_rows`].
pub fn scatter_rows(
    device: &mut Device,
    dout: Matrix,
    rows: Matrix,
    dx: Matrix,
) -> Result<(), Error> {
    check_shape("scatter rows", "dout", [rows.shape[0], dx.shape[1]], dout)?;
    fill(device, dx, 0)?;
    let constants = constants(dout, rows, dx, dx.shape[0], dout);
    let groups = dout.elements().div_ceil(WORKGROUP);
    device.run(&kernels::SCATTER_ROWS, [dout, rows, dx], &constants, groups)
}

fn constants(x: Matrix, rows: Matrix, out: Matrix, limit: usize, over: Matrix) -> [u32; 8] {
    let ([x_offset, x_stride], [out_offset, out_stride]) = (x.place(), out.place());
    let [columns, elements] = [over.shape[1], over.elements()].map(|n| n as u32);
    let rows = rows.offset as u32;
    [x_offset, x_stride, rows, out_offset, out_stride, columns, elements, limit as u32]
}
