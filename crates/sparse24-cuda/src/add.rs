//! The sum of two matrices.

use half::bf16;

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

/// out = x + delta, in f32 and rounded once; all have the shape of x, and `out` may be x.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`], [`Error::Alignment`] to 16 bytes, [`Error::Alias`],
/// [`Error::Stale`], [`Error::Driver`].
pub fn add(
    device: &mut Device,
    x: Matrix<bf16>,
    delta: Matrix<bf16>,
    out: Matrix<bf16>,
) -> Result<(), Error> {
    const THREADS: usize = 256;
    let mut checks = device.checks("add");
    checks.input("x", x, x.shape(), 16)?.input("delta", delta, x.shape(), 16)?;
    checks.output_or_input("out", out, ("x", x), x.shape(), 16)?;
    let elements = x.elements();
    // Eight elements per thread, and one each for the up to seven that remain.
    let grid = Grid::line((elements / 8 + elements % 8).div_ceil(THREADS), THREADS as u32);
    device.launch("add", grid, &arguments![x, delta, out, elements as u64])
}
