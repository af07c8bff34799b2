//! The sum of two matrices.

use half::bf16;

use crate::{
    Device, Error, Matrix, Scalar,
    launch::{Grid, arguments},
};

/// Elements that are added.
pub trait Addend: Scalar {
    /// The kernel.
    const ENTRY: &'static str;
}

impl Addend for bf16 {
    const ENTRY: &'static str = "add";
}

impl Addend for f32 {
    const ENTRY: &'static str = "add_f32";
}

/// out = x + delta, in f32 and rounded once; all have the shape of x, and `out` may be x.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`], [`Error::Alignment`] to 16 bytes, [`Error::Alias`],
/// [`Error::Stale`], [`Error::Driver`].
pub fn add<T: Addend>(
    device: &mut Device,
    x: Matrix<T>,
    delta: Matrix<T>,
    out: Matrix<T>,
) -> Result<(), Error> {
    const THREADS: usize = 256;
    let mut checks = device.checks("add");
    checks.input("x", x, x.shape(), 16)?.input("delta", delta, x.shape(), 16)?;
    checks.output_or_input("out", out, ("x", x), x.shape(), 16)?;
    let (elements, width) = (x.elements(), 16 / size_of::<T>());
    // Sixteen bytes per thread, and one element each for the few that remain.
    let grid = Grid::line((elements / width + elements % width).div_ceil(THREADS), THREADS as u32);
    device.launch(T::ENTRY, grid, &arguments![x, delta, out, elements as u64])
}
