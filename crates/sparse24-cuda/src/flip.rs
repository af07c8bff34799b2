//! Counts the elements in which two masks differ.

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

/// Adds to `count` `[1, 1]` the number of elements in which two masks of tiles `[r/4, q/4]` differ.
///
/// # Errors
/// [`Error::Shape`], [`Error::Stale`], [`Error::Alias`], [`Error::Driver`].
pub fn flip_count(
    device: &mut Device,
    a: Matrix<u16>,
    b: Matrix<u16>,
    count: Matrix<u64>,
) -> Result<(), Error> {
    device
        .checks("flip count")
        .input("a", a, a.shape(), 16)?
        .input("b", b, a.shape(), 16)?
        .output("count", count, [1, 1], 8)?;
    let blocks = a.elements().div_ceil(8 * 256).min(8 * device.multiprocessors());
    let tiles = a.elements() as u64;
    device.launch("flip_count", Grid::line(blocks, 256), &arguments![a, b, count, tiles])
}
