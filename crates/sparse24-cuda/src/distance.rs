//! The L1 distance of two matrices.

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

/// Blocks of the kernel at most, and sums that the host adds.
const BLOCKS: usize = 1024;

/// The shape of the scratch of [`l1_distance`].
pub const SCRATCH: [usize; 2] = [1, BLOCKS];

/// sum |a - b| in f64, in a fixed order; waits for it. `scratch` [`SCRATCH`] is overwritten with
/// the bits of f64 values.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`], [`Error::Stale`], [`Error::Alias`], [`Error::Driver`].
pub fn l1_distance(
    device: &mut Device,
    a: Matrix<f32>,
    b: Matrix<f32>,
    scratch: Matrix<u64>,
) -> Result<f64, Error> {
    device
        .checks("L1 distance")
        .input("a", a, a.shape(), 4)?
        .input("b", b, a.shape(), 4)?
        .output("scratch", scratch, SCRATCH, 8)?;
    let blocks = a.elements().div_ceil(256).min(BLOCKS);
    let arguments = arguments![a, b, scratch, a.elements() as u64];
    device.launch("l1_distance", Grid::line(blocks, 256), &arguments)?;
    let sums = device.download(scratch)?;
    Ok(sums[..blocks].iter().map(|&bits| f64::from_bits(bits)).sum())
}
