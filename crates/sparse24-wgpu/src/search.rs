//! The mask search of [`sparse24_core::search`], bit for bit.

use sparse24_core::MaskKind;

use crate::{Device, Error, Matrix, Tiles, WORKGROUP, error::check_shape, kernels};

/// mask = search(w): the exact transposable search, or the two largest of every group.
///
/// # Errors
/// [`Error::Shape`] unless the mask has the shape of w `[r, q]`; failures of earlier work.
pub fn mask_search(
    device: &mut Device,
    w: Matrix,
    kind: MaskKind,
    mask: Tiles,
) -> Result<(), Error> {
    check_shape("mask search", "w", mask.shape, w)?;
    let kernel = match kind {
        MaskKind::Transposable => &kernels::MASK_SEARCH,
        MaskKind::RowWise => &kernels::ROW_MASK_SEARCH,
        MaskKind::ColumnWise => &kernels::COLUMN_MASK_SEARCH,
    };
    let [offset, stride] = w.place();
    let constants = [offset, stride, (mask.shape[1] / 4) as u32, mask.count() as u32];
    device.run(kernel, [w, mask.words], &constants, mask.count().div_ceil(2 * WORKGROUP))
}
