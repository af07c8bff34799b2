//! Masks of whole matrices: the exact transposable search, group-wise pruning, the greedy baseline, and the L1-norm gap.
//!
//! Every mask equals that of [`sparse24_core::search`] bit for bit, at every SIMD level and for any number of threads. Deliberately
//! absent: the definition of the search and of its ties, which is core's.

use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{Element, Mask, MaskKind, flip, group::Pattern, prune, search, tile};

use crate::{
    Error, shape,
    simd::{Available, Kernel},
    strips,
};

/// The mask of `w` `[r, q]`: exact transposable search, or the two largest magnitudes of every group of four.
///
/// Any element type, any strides; rows that are contiguous are fastest. NaN counts as the largest magnitude; ties are core's.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`] unless the mask has the shape of `w`.
pub fn mask_search<T: Element>(w: ArrayView2<'_, T>, kind: MaskKind, mask: &mut Mask) -> Result<(), Error> {
    mask_search_at(Available::best(), w, kind, mask)
}

/// [`mask_search`] at a chosen SIMD level; the mask is the same.
///
/// # Errors
/// As [`mask_search`].
pub fn mask_search_at<T: Element>(level: Available, w: ArrayView2<'_, T>, kind: MaskKind, mask: &mut Mask) -> Result<(), Error> {
    search_with(w, mask, |rows, tiles| level.run(Strip { kind, rows, tiles }))
}

/// The transposable mask of core's greedy 2-approximation, the baseline of the exact search.
///
/// # Errors
/// As [`mask_search`].
pub fn mask_search_greedy<T: Element>(w: ArrayView2<'_, T>, mask: &mut Mask) -> Result<(), Error> {
    search_with(w, mask, |rows, tiles| {
        for (at, bits) in tiles.iter_mut().enumerate() {
            *bits = search::greedy(&tile_of(rows, at)).bits();
        }
    })
}

/// The L1-norm gap of every tile of `w` `[r, q]`: kept norm of its best pattern minus that of the best other one; `out` is `[r/4, q/4]`.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`] unless `out` has one element a tile.
pub fn tile_gap<T: Element>(w: ArrayView2<'_, T>, mut out: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    let (r, q) = w.dim();
    shape::check_tiled("tile gap", [r, q])?;
    shape::check("tile gap", "out", [r / 4, q / 4], [out.nrows(), out.ncols()])?;
    out.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(tile_row, mut out)| {
        strips::strip(w.slice(s![4 * tile_row..4 * tile_row + 4, ..]), |first, rows| {
            for at in 0..rows[0].len() / 4 {
                out[first / 4 + at] = flip::tile_gap(&tile_of(rows, at));
            }
        });
    });
    Ok(())
}

/// Runs `kernel` on four rows and their tiles, over all of `w`.
fn search_with<T: Element>(w: ArrayView2<'_, T>, mask: &mut Mask, kernel: impl Fn([&[f32]; 4], &mut [u16]) + Sync) -> Result<(), Error> {
    let (r, q) = w.dim();
    shape::check_tiled("mask search", [r, q])?;
    shape::check("mask search", "mask", [r, q], mask.shape())?;
    if w.is_empty() {
        return Ok(());
    }
    let strips_per_task = strips::rows_per_task(4 * q);
    strips::for_chunks(mask.tiles_mut(), strips_per_task * (q / 4), |task, tiles| {
        for (at, tiles) in tiles.chunks_exact_mut(q / 4).enumerate() {
            let row = 4 * (task * strips_per_task + at);
            strips::strip(w.slice(s![row..row + 4, ..]), |first, rows| {
                kernel(rows, &mut tiles[first / 4..first / 4 + rows[0].len() / 4]);
            });
        }
    });
    Ok(())
}

/// The row-major tile `at` of four rows.
#[inline(always)]
fn tile_of(rows: [&[f32]; 4], at: usize) -> [f32; 16] {
    core::array::from_fn(|i| rows[i / 4][4 * at + i % 4])
}

/// The search of one strip in plain Rust.
struct Strip<'a> {
    kind: MaskKind,
    rows: [&'a [f32]; 4],
    tiles: &'a mut [u16],
}

impl Kernel for Strip<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { kind, rows, tiles } = self;
        let rows_of = |tile: [f32; 16]| {
            (0..4).fold(0, |bits, row| {
                let group: Pattern = prune::largest_two(core::array::from_fn(|j| tile[4 * row + j]));
                bits | u16::from(group.bits()) << (4 * row)
            })
        };
        for (at, bits) in tiles.iter_mut().enumerate() {
            let tile = tile_of(rows, at);
            *bits = match kind {
                MaskKind::Transposable => search::CODES[usize::from(search::code(&tile))],
                MaskKind::RowWise => rows_of(tile),
                MaskKind::ColumnWise => tile::transpose(rows_of(core::array::from_fn(|at| tile[at % 4 * 4 + at / 4]))),
            };
        }
    }
}
