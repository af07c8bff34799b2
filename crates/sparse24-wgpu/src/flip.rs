//! The distance between two masks: [`sparse24_core::flip`], bit for bit.

use crate::{Device, Error, Matrix, Tiles, WORKGROUP, error::check_shape, kernels};

/// Adds to `count` `[1, 1]` the number of bits in which two masks differ, modulo 2^32.
///
/// # Errors
/// [`Error::Shape`] unless the masks have the same shape; failures of earlier work.
pub fn flip_count(device: &mut Device, a: Tiles, b: Tiles, count: Matrix) -> Result<(), Error> {
    check_shape("flip count", "b", a.shape, Matrix { shape: b.shape, ..b.words })?;
    check_shape("flip count", "count", [1, 1], count)?;
    let words = a.words.elements();
    let matrices = [a.words, b.words, count];
    device.run(&kernels::FLIP_COUNT, matrices, &[words as u32], words.div_ceil(WORKGROUP))
}
