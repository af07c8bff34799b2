//! Bi-Mask's mask of masked weights in another order of rows, as in `sparse24_cpu::permute`.

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
    search::check_tiled,
};

const THREADS: usize = 256;

/// out = `tiles` restricted to the two largest masked magnitudes of every group of four rows in an
/// order: w `[r, q]`, masks `[r/4, q/4]`. `order` `[2, r]` has the rows in the order in which
/// groups are formed, then the place of each row in it; the kernel trusts that they are inverse.
/// The bits are those of [`sparse24_core::permute::permuted_mask`].
///
/// # Errors
/// [`Error::Semantics`] unless r and q are multiples of 4; [`Error::Shape`], [`Error::Stale`],
/// [`Error::Alignment`], [`Error::Alias`], [`Error::Driver`].
pub fn permuted_mask(
    device: &mut Device,
    w: Matrix<f32>,
    tiles: Matrix<u16>,
    order: Matrix<u32>,
    out: Matrix<u16>,
) -> Result<(), Error> {
    const OPERATION: &str = "permuted mask";
    let shape @ [r, _] = w.shape();
    let tiled @ [_, columns] = check_tiled(OPERATION, shape)?;
    device
        .checks(OPERATION)
        .strided("w", w, shape, 16)?
        .input("the mask", tiles, tiled, 2)?
        .input("the order", order, [2, r], 4)?
        .output("the permuted mask", out, tiled, 2)?;
    let grid = Grid::line((tiled[0] * columns).div_ceil(THREADS), THREADS as u32);
    let (stride, r, columns) = (w.stride() as u64, r as u32, columns as u32);
    let arguments = arguments![w, tiles, order, out, stride, r, columns];
    device.launch("permuted_mask", grid, &arguments)
}
