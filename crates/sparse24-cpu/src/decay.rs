//! Masked decay: pruned weights are pulled to zero through their gradients.
//!
//! Bit-identical to [`sparse24_core::decay`] for any number of threads. Deliberately absent: decay
//! on the weights (the optimizer's).

use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip, s};
use rayon::prelude::*;
use sparse24_core::Mask;

use crate::{
    Error, nibbles, shape,
    simd::{Available, Kernel, Vector},
    strips,
};

/// g <- g + lambda * (1 - m) * w, shapes `[r, q]`: the product rounded, then the sum; where the
/// mask keeps, g is unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless `w` and the mask have the shape of `g`.
pub fn masked_decay(
    g: ArrayViewMut2<'_, f32>,
    w: ArrayView2<'_, f32>,
    mask: &Mask,
    lambda: f32,
) -> Result<(), Error> {
    masked_decay_at(Available::best(), g, w, mask, lambda)
}

/// [`masked_decay`] at a chosen SIMD level; the result is the same.
///
/// # Errors
/// As [`masked_decay`].
pub fn masked_decay_at(
    level: Available,
    mut g: ArrayViewMut2<'_, f32>,
    w: ArrayView2<'_, f32>,
    mask: &Mask,
    lambda: f32,
) -> Result<(), Error> {
    let shape = [g.nrows(), g.ncols()];
    shape::check("masked decay", "w", shape, [w.nrows(), w.ncols()])?;
    shape::check("masked decay", "mask", shape, mask.shape())?;
    if g.is_empty() {
        return Ok(());
    }
    let (tile_columns, rows_per_task) = (g.ncols() / 4, strips::rows_per_task(g.ncols()));
    g.axis_chunks_iter_mut(Axis(0), rows_per_task).into_par_iter().enumerate().for_each(
        |(task, mut g)| {
            for (at, mut g) in g.rows_mut().into_iter().enumerate() {
                let row = task * rows_per_task + at;
                let tiles = &mask.tiles()[row / 4 * tile_columns..][..tile_columns];
                let w = w.slice(s![row, ..]);
                match (g.as_slice_mut(), w.to_slice()) {
                    (Some(g), Some(w)) => level.run(Row { g, w, tiles, row: row % 4, lambda }),
                    _ => Zip::indexed(&mut g).and(w).for_each(|column, g, &w| {
                        if !mask.keeps(row, column) {
                            *g += lambda * w;
                        }
                    }),
                }
            }
        },
    );
    Ok(())
}

struct Row<'a> {
    g: &'a mut [f32],
    w: &'a [f32],
    tiles: &'a [u16],
    row: usize,
    lambda: f32,
}

impl Kernel for Row<'_> {
    #[inline(always)]
    fn run<V: Vector>(self, _: V) {
        let lambda = self.lambda;
        for ((g, w), tiles) in
            self.g.chunks_mut(16).zip(self.w.chunks(16)).zip(self.tiles.chunks(4))
        {
            let kept = (nibbles::rows(nibbles::word(tiles)) >> (16 * self.row)) as u32;
            if let (Ok(g), Ok(w)) = (<&mut [f32; 16]>::try_from(&mut *g), <&[f32; 16]>::try_from(w))
            {
                for i in 0..16 {
                    let decayed = g[i] + lambda * w[i];
                    g[i] = if kept & 1 << i == 0 { decayed } else { g[i] };
                }
            } else {
                for i in 0..g.len() {
                    g[i] = if kept & 1 << i == 0 { g[i] + lambda * w[i] } else { g[i] };
                }
            }
        }
    }
}
