//! Column sums, and the gradient of a bias.

use sparse24_core::op::Accumulate;

use crate::{Device, Error, Matrix, WORKGROUP, error::check_shape, kernels};

/// Rows that one invocation sums.
pub(crate) const ROWS: usize = 64;

/// Elements of the scratch of [`bias_grad`].
#[must_use]
pub fn bias_grad_scratch([p, r]: [usize; 2]) -> usize {
    p.div_ceil(ROWS) * r
}

/// db = the column sums of dz, or db += them: dz `[p, r]`, db `[1, r]`.
///
/// Rows are summed in order within blocks of 64, and the blocks in order.
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; failures of earlier work.
///
/// # Panics
/// If the scratch is too small.
pub fn bias_grad(
    device: &mut Device,
    dz: Matrix,
    db: Matrix,
    accumulate: Accumulate,
    scratch: Matrix,
) -> Result<(), Error> {
    let [p, r] = dz.shape;
    check_shape("bias gradient", "db", [1, r], db)?;
    let blocks = scratch.reshaped([p.div_ceil(ROWS), r]);
    let [offset, stride] = dz.place();
    let constants = [offset, stride, blocks.offset as u32, p as u32, r as u32, 0];
    let groups = blocks.elements().div_ceil(WORKGROUP);
    device.run(&kernels::ROW_BLOCK_SUMS, [dz, blocks], &constants, groups)?;
    column_sums(device, blocks, db, accumulate)
}

/// out = the column sums of x `[p, n]`, or out += them; out `[1, n]`.
pub(crate) fn column_sums(
    device: &mut Device,
    x: Matrix,
    out: Matrix,
    accumulate: Accumulate,
) -> Result<(), Error> {
    let ([offset, stride], [p, n]) = (x.place(), x.shape);
    let adds = u32::from(accumulate == Accumulate::Add);
    let constants = [offset, stride, out.offset as u32, p as u32, n as u32, adds];
    device.run(&kernels::COLUMN_SUMS, [x, out], &constants, n.div_ceil(WORKGROUP))
}
