//! Bi-Mask's column-wise mask of masked weights in another order of rows. Bit-identical to
//! [`sparse24_core::permute`] for any number of threads.

use ndarray::ArrayView2;
use rayon::prelude::*;
use sparse24_core::{Element, Mask, prune::largest_two};

use crate::{Error, check, tasks};

/// The mask m m' of `w` `[r, q]`: `mask` restricted to the two largest masked magnitudes of every
/// group of four rows in `order`.
///
/// # Errors
/// [`Error::Shape`] unless both masks have the shape of `w` and `order` has one entry per row.
///
/// # Panics
/// Unless `order` has each row once.
pub fn permuted_mask<T: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    order: &[u32],
    out: &mut Mask,
) -> Result<(), Error> {
    const OPERATION: &str = "permuted mask";
    let (r, q) = w.dim();
    check::shape(OPERATION, "mask", [r, q], mask.shape())?;
    check::shape(OPERATION, "out", [r, q], out.shape())?;
    check::shape(OPERATION, "order", [1, r], [1, order.len()])?;
    if w.is_empty() {
        return Ok(());
    }
    // Four bits per tile and row, with rows in the new order.
    let tile_columns = q / 4;
    let mut rows = vec![0_u8; r * tile_columns];
    rows.par_chunks_mut(4 * tile_columns).zip(order.par_chunks(4)).for_each(|(out, group)| {
        for column in 0..q {
            let kept = [0, 1, 2, 3].map(|i| mask.keeps(group[i] as usize, column));
            let masked = [0, 1, 2, 3]
                .map(|i| if kept[i] { w[[group[i] as usize, column]].to_f32() } else { 0.0 });
            for i in largest_two(masked).indices().map(usize::from).into_iter().filter(|&i| kept[i])
            {
                out[i * tile_columns + column / 4] |= 1 << (column % 4);
            }
        }
    });
    // Each tile gathers the bits of its four rows.
    let mut places = vec![r; r];
    order.iter().enumerate().for_each(|(place, &row)| places[row as usize] = place);
    assert!(!places.contains(&r), "the order has each row once");
    let tile_rows = tasks::rows_per_task(q).div_ceil(4);
    tasks::for_chunks(out.tiles_mut(), tile_rows * tile_columns, |task, tiles| {
        for (at, tile) in tiles.iter_mut().enumerate() {
            let (first, column) = (4 * (task * tile_rows + at / tile_columns), at % tile_columns);
            *tile = (0..4).fold(0, |bits, i| {
                bits | u16::from(rows[places[first + i] * tile_columns + column]) << (4 * i)
            });
        }
    });
    Ok(())
}
