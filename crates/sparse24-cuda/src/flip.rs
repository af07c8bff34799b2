//! In how many elements two masks differ.

use crate::{
    Device, Error, Matrix,
    launch::{Argument, Grid},
    operand::check_packed,
};

/// Adds to `count` `[1, 1]` the number of elements in which two masks `[r/4, q/4]` of tiles differ.
///
/// # Errors
/// [`Error::Shape`], [`Error::Stale`], [`Error::Alias`], [`Error::Driver`].
pub fn flip_count(
    device: &mut Device,
    a: Matrix<u16>,
    b: Matrix<u16>,
    count: Matrix<u64>,
) -> Result<(), Error> {
    const OPERATION: &str = "flip count";
    check_packed(device, OPERATION, "a", a, a.shape(), 16)?;
    check_packed(device, OPERATION, "b", b, a.shape(), 16)?;
    device.check(OPERATION, "count", count, [1, 1])?;
    device.check_apart(OPERATION, ("count", count.span()), &[("a", a.span()), ("b", b.span())])?;
    let blocks = a.elements().div_ceil(8 * 256).min(8 * device.multiprocessors());
    device.launch(
        "flip_count",
        Grid::line(blocks, 256),
        &[a.into(), b.into(), count.into(), Argument::U64(a.elements() as u64)],
    )
}
