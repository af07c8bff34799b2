//! The gradient of a bias.

use half::bf16;
use sparse24_core::op::Accumulate;

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

const LANES: usize = 32;

/// Rows of a block, so that there are about a thousand blocks of 256 columns on every device.
fn rows([p, r]: [usize; 2]) -> usize {
    (p * r.div_ceil(256) / 1024).next_multiple_of(64).max(64)
}

/// The shape of the scratch of [`bias_grad`] for dz `[p, r]`.
#[must_use]
pub fn bias_grad_scratch([p, r]: [usize; 2]) -> [usize; 2] {
    [p.div_ceil(rows([p, r])), r]
}

/// db = the column sums of dz, or db += them: dz `[p, r]`, db `[1, r]`, scratch of shape
/// [`bias_grad_scratch`]. Sums have a fixed order, which differs from the CPU's.
///
/// # Errors
/// [`Error::Shape`], [`Error::Alias`], [`Error::Stale`], [`Error::TooLarge`], [`Error::Driver`].
pub fn bias_grad(
    device: &mut Device,
    dz: Matrix<bf16>,
    db: Matrix<f32>,
    accumulate: Accumulate,
    scratch: Matrix<f32>,
) -> Result<(), Error> {
    const LIMIT: usize = i32::MAX as usize;
    let [p, r] = dz.shape();
    let [blocks, _] = bias_grad_scratch([p, r]);
    device
        .checks("bias grad")
        .limit("the number of tokens or features", p.max(r), LIMIT)?
        .strided("dz", dz, [p, r], 1)?
        .output("scratch", scratch, [blocks, r], 4)?
        .output("db", db, [1, r], 4)?;
    let width = if r.is_multiple_of(8) && dz.is_aligned(16) { 8 } else { 1 };
    let (rows, stride) = (rows([p, r]) as u32, dz.stride() as u64);
    device.launch(
        "column_sums",
        Grid::plane([r.div_ceil(LANES * width), blocks], 256),
        &arguments![dz, stride, scratch, p as u32, r as u32, rows, width as u32],
    )?;
    let add = u32::from(accumulate == Accumulate::Add);
    device.launch(
        "row_sums",
        Grid::line(r.div_ceil(LANES), 1024),
        &arguments![scratch, db, blocks as u32, r as u32, add],
    )
}
