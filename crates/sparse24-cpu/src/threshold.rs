//! The soft threshold of S-STE, dense.
//!
//! Bit-identical to [`sparse24_core::prune::group`] for any number of threads. Deliberately absent:
//! the scale, which is chosen once.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;
use sparse24_core::{
    Mask,
    prune::{ValueMap, group},
};

use crate::{Error, shape, strips};

/// S(w) `[r, q]`: 0 where pruned, else `copysign(max(|w| - t, 0), w) * scale`, t the
/// second-smallest magnitude of the row group.
///
/// # Errors
/// [`Error::Shape`] unless the mask and `out` have the shape of `w`; [`Error::Semantics`] for a
/// row-wise mask that has not two of every group.
pub fn soft_threshold(
    w: ArrayView2<'_, f32>,
    mask: &Mask,
    scale: f32,
    mut out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "soft threshold";
    let shape = shape::of(&w);
    shape::check(OPERATION, "mask", shape, mask.shape())?;
    shape::check(OPERATION, "out", shape, shape::of(&out))?;
    mask.check(sparse24_core::MaskKind::RowWise)?;
    if w.is_empty() {
        return Ok(());
    }
    let (tile_columns, rows_per_task) = (shape[1] / 4, strips::rows_per_task(shape[1]));
    out.axis_chunks_iter_mut(Axis(0), rows_per_task).into_par_iter().enumerate().for_each(
        |(task, mut out)| {
            for (at, mut out) in out.rows_mut().into_iter().enumerate() {
                let row = task * rows_per_task + at;
                let (w, tiles) =
                    (w.row(row), &mask.tiles()[row / 4 * tile_columns..][..tile_columns]);
                for (column, bits) in
                    tiles.iter().map(|tile| (tile >> (row % 4 * 4) & 15) as u8).enumerate()
                {
                    let x = [0, 1, 2, 3].map(|i| w[4 * column + i]);
                    let pattern = sparse24_core::group::Pattern::from_bits(bits)
                        .expect("the mask was checked");
                    let mapped = group(x, pattern, ValueMap::SoftThreshold { scale });
                    (0..4).for_each(|i| out[4 * column + i] = mapped[i]);
                }
            }
        },
    );
    Ok(())
}
