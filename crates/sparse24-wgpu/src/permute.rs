//! The mask of dgrad in another order of rows: [`sparse24_core::permute`], bit for bit.

use crate::{Device, Error, Matrix, Tiles, WORKGROUP, error::check_shape, kernels};

/// In each column, out keeps the two largest magnitudes of every four rows in `order`, among the
/// elements that the row-wise `mask` keeps.
///
/// w `[r, q]`; `order` `[1, 2r]` holds a permutation of the rows, then its inverse.
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; failures of earlier work.
pub fn permuted_mask(
    device: &mut Device,
    w: Matrix,
    mask: Tiles,
    order: Matrix,
    out: Tiles,
) -> Result<(), Error> {
    check_shape("permuted mask", "w", mask.shape, w)?;
    check_shape("permuted mask", "w", out.shape, w)?;
    check_shape("permuted mask", "order", [1, 2 * w.shape[0]], order)?;
    let [offset, stride] = w.place();
    let (columns, rows) = (mask.shape[1] / 4, mask.shape[0]);
    let constants = [offset, stride, columns as u32, mask.count() as u32, rows as u32];
    let matrices = [w, mask.words, order, out.words];
    device.run(&kernels::PERMUTED_MASK, matrices, &constants, mask.count().div_ceil(2 * WORKGROUP))
}
