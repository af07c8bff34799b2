//! The gradient of a bias.

use half::bf16;

use crate::{
    Beta, Device, Error, Matrix,
    launch::{Argument, Grid},
    operand::check_packed,
};

const LANES: usize = 32;

/// Rows of a block: those that make about a thousand blocks of 256 columns, on every device.
fn rows([p, r]: [usize; 2]) -> usize {
    (p * r.div_ceil(256) / 1024).next_multiple_of(64).max(64)
}

/// The shape of the scratch of [`bias_grad`] for dz `[p, r]`.
#[must_use]
pub fn bias_grad_scratch([p, r]: [usize; 2]) -> [usize; 2] {
    [p.div_ceil(rows([p, r])), r]
}

/// db = the column sums of dz, or db += them: dz `[p, r]`, db `[1, r]`, `scratch` as
/// [`bias_grad_scratch`] says.
///
/// Sums have a fixed order, which is not the CPU's.
///
/// # Errors
/// [`Error::Shape`], [`Error::Alias`], [`Error::Stale`], [`Error::TooLarge`], [`Error::Driver`].
pub fn bias_grad(
    device: &mut Device,
    dz: Matrix<bf16>,
    db: Matrix<f32>,
    beta: Beta,
    scratch: Matrix<f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "bias grad";
    const LIMIT: usize = i32::MAX as usize;
    let [p, r] = dz.shape();
    let [blocks, _] = bias_grad_scratch([p, r]);
    if p > LIMIT || r > LIMIT {
        return Err(Error::TooLarge {
            operation: OPERATION,
            what: "tokens or features",
            found: p.max(r),
            limit: LIMIT,
        });
    }
    device.check_live(OPERATION, "dz", dz)?;
    check_packed(device, OPERATION, "db", db, [1, r], 4)?;
    check_packed(device, OPERATION, "scratch", scratch, [blocks, r], 4)?;
    device.check_apart(
        OPERATION,
        ("db", db.span()),
        &[("dz", dz.span()), ("scratch", scratch.span())],
    )?;
    device.check_apart(OPERATION, ("scratch", scratch.span()), &[("dz", dz.span())])?;

    let width = if r.is_multiple_of(8) && dz.is_aligned(16) { 8 } else { 1 };
    let sizes = [p, r, rows([p, r]), width].map(|size| Argument::U32(size as u32));
    let grid = Grid::plane([r.div_ceil(LANES * width), blocks], 256);
    device.launch(
        "column_sums",
        grid,
        &[&[dz.into(), Argument::U64(dz.stride() as u64), scratch.into()], &sizes[..]].concat(),
    )?;
    let sizes =
        [blocks, r, usize::from(beta == Beta::Accumulate)].map(|size| Argument::U32(size as u32));
    device.launch(
        "row_sums",
        Grid::line(r.div_ceil(LANES), 1024),
        &[&[scratch.into(), db.into()], &sizes[..]].concat(),
    )
}
