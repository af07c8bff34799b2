//! Rows of a matrix by number, and their way back, as in `sparse24_cpu::rows`.

use half::bf16;

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

/// The number of no row.
pub const NONE: u32 = u32::MAX;

const THREADS: u32 = 256;

/// Row i of out = row `rows[i]` of x, or zeros for a number outside x, such as [`NONE`]: x
/// `[p, c]`, rows `[count, 1]`, out `[count, c]`. c is a multiple of 8.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`], [`Error::Alignment`] to 16 bytes, [`Error::Alias`],
/// [`Error::Stale`], [`Error::Driver`].
pub fn gather_rows(
    device: &mut Device,
    x: Matrix<bf16>,
    rows: Matrix<u32>,
    out: Matrix<bf16>,
) -> Result<(), Error> {
    let ([p, c], count) = (x.shape(), rows.shape()[0]);
    device
        .checks("gather rows")
        .columns_of("x", [p, c], 8)?
        .input("x", x, [p, c], 16)?
        .input("rows", rows, [count, 1], 4)?
        .output("out", out, [count, c], 16)?;
    launch(device, "gather_rows", [x, out], rows, [p, c])
}

/// dx = 0, then row `rows[i]` of dx = row i of dout: the gradient of [`gather_rows`] for numbers
/// that are all different. Shapes as there.
///
/// # Errors
/// See [`gather_rows`].
pub fn scatter_rows(
    device: &mut Device,
    dout: Matrix<bf16>,
    rows: Matrix<u32>,
    dx: Matrix<bf16>,
) -> Result<(), Error> {
    let ([p, c], count) = (dx.shape(), rows.shape()[0]);
    device
        .checks("scatter rows")
        .columns_of("dx", [p, c], 8)?
        .input("dout", dout, [count, c], 16)?
        .input("rows", rows, [count, 1], 4)?
        .output("dx", dx, [p, c], 16)?;
    device.fill_bytes(dx, 0)?;
    launch(device, "scatter_rows", [dout, dx], rows, [p, c])
}

fn launch(
    device: &mut Device,
    kernel: &'static str,
    [from, to]: [Matrix<bf16>; 2],
    rows: Matrix<u32>,
    [p, c]: [usize; 2],
) -> Result<(), Error> {
    let (count, vectors) = (rows.shape()[0], c / 8);
    let grid = Grid::line((count * vectors).div_ceil(THREADS as usize), THREADS);
    let arguments = arguments![from, rows, to, p as u64, count as u64, vectors as u32];
    device.launch(kernel, grid, &arguments)
}
