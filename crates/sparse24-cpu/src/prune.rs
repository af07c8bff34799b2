//! What a mask leaves of a matrix: dense, or compressed both ways in one pass over the weights.
//!
//! Bit-identical to [`sparse24_core`] for any number of threads. Deliberately absent: which mask
//! ([`crate::search`]).

mod block;
mod carriage;

use std::sync::atomic::{AtomicBool, Ordering};

use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip};
use rayon::prelude::*;
use sparse24_core::{Element, Mask, MaskKind, compressed::Compressed24, prune::ValueMap};

use self::block::{Panels, Part};
use crate::{
    Error, nibbles, shape,
    simd::{self, Available, Kernel, Vector},
    strips,
};

/// S(w) `[r, q]`: pruned elements are +0, kept ones are unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless the mask and `out` have the shape of `w`.
pub fn masked<T: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    mut out: ArrayViewMut2<'_, T>,
) -> Result<(), Error> {
    let shape = [w.nrows(), w.ncols()];
    shape::check("prune", "mask", shape, mask.shape())?;
    shape::check("prune", "out", shape, [out.nrows(), out.ncols()])?;
    if w.is_empty() {
        return Ok(());
    }
    let level = Available::best();
    let (tile_columns, rows_per_task) = (w.ncols() / 4, strips::rows_per_task(w.ncols()));
    out.axis_chunks_iter_mut(Axis(0), rows_per_task).into_par_iter().enumerate().for_each(
        |(task, mut out)| {
            for (at, mut out) in out.rows_mut().into_iter().enumerate() {
                let row = task * rows_per_task + at;
                let w = w.index_axis(Axis(0), row);
                let tiles = &mask.tiles()[row / 4 * tile_columns..][..tile_columns];
                match (out.as_slice_mut(), w.to_slice()) {
                    (Some(out), Some(w)) => level.run(MaskedRow { w, out, tiles, row: row % 4 }),
                    _ => Zip::indexed(&mut out).and(w).for_each(|column, out, &w| {
                        *out = if mask.keeps(row, column) { w } else { T::default() };
                    }),
                }
            }
        },
    );
    Ok(())
}

struct MaskedRow<'a, T> {
    w: &'a [T],
    out: &'a mut [T],
    tiles: &'a [u16],
    row: usize,
}

impl<T: Element> Kernel for MaskedRow<'_, T> {
    #[inline(always)]
    fn run<V: Vector>(self, _: V) {
        for ((out, w), tiles) in
            self.out.chunks_mut(16).zip(self.w.chunks(16)).zip(self.tiles.chunks(4))
        {
            let kept = (nibbles::rows(nibbles::word(tiles)) >> (16 * self.row)) as u32;
            let select = |(i, (out, &w)): (usize, (&mut T, &T))| {
                *out = if kept & 1 << i == 0 { T::default() } else { w }
            };
            match (out.first_chunk_mut::<16>(), w.first_chunk::<16>()) {
                (Some(out), Some(w)) => out.iter_mut().zip(w).enumerate().for_each(select),
                _ => out.iter_mut().zip(w).enumerate().for_each(select),
            }
        }
    }
}

/// Compresses S(w) and its transpose in one pass: `forward` is `[r, q]`, `dgrad` is `[q, r]`, both
/// of the same values.
///
/// S(w) is [`sparse24_core::prune::group`] of every row group with the mask's pattern, rounded to
/// `U`; with [`ValueMap::Identity`] and `U` = `T` kept values are unchanged to the bit. (S-STE
/// defines its soft threshold for row-wise magnitude masks; with a transposable mask the threshold
/// is still the second-smallest magnitude of the row group.)
///
/// # Errors
/// [`Error::Shape`] unless the mask and both outputs fit `w`; [`Error::Semantics`] unless the mask
/// is transposable.
pub fn compress_weight<T: Element, U: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: &mut Compressed24<U>,
    dgrad: &mut Compressed24<U>,
) -> Result<(), Error> {
    compress_weight_at(Available::best(), w, mask, map, forward, dgrad)
}

/// [`compress_weight`] at a given level.
///
/// # Errors
/// Those of [`compress_weight`].
pub fn compress_weight_at<T: Element, U: Element>(
    level: Available,
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: &mut Compressed24<U>,
    dgrad: &mut Compressed24<U>,
) -> Result<(), Error> {
    let [r, q] = [w.nrows(), w.ncols()];
    shape::check("compress weight", "mask", [r, q], mask.shape())?;
    shape::check("compress weight", "forward", [r, q], forward.shape())?;
    shape::check("compress weight", "dgrad", [q, r], dgrad.shape())?;
    check_mask(level, mask, MaskKind::Transposable)?;
    compress(level, w, mask, map, forward, Some(dgrad));
    Ok(())
}

/// Compresses S(w) along its rows only, as [`compress_weight`] does: for masks that are row-wise
/// and not transposable.
///
/// # Errors
/// [`Error::Shape`] unless the mask and the output have the shape of `w`; [`Error::Semantics`]
/// unless the mask is row-wise 2:4.
pub fn compress_forward<T: Element, U: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: &mut Compressed24<U>,
) -> Result<(), Error> {
    let shape = [w.nrows(), w.ncols()];
    shape::check("compress weight", "mask", shape, mask.shape())?;
    shape::check("compress weight", "forward", shape, forward.shape())?;
    let level = Available::best();
    check_mask(level, mask, MaskKind::RowWise)?;
    compress(level, w, mask, map, forward, None);
    Ok(())
}

/// [`Mask::check`], in parallel and many tiles at a time.
fn check_mask(level: Available, mask: &Mask, expected: MaskKind) -> Result<(), Error> {
    const TASK: usize = 1 << 14;
    let found = AtomicBool::new(false);
    let check = |tiles: &[u16]| level.run(Check { tiles, expected, found: &found });
    match mask.tiles() {
        tiles if tiles.len() <= TASK => check(tiles),
        tiles => tiles.par_chunks(TASK).for_each(check),
    }
    if found.into_inner() { Ok(mask.check(expected)?) } else { Ok(()) }
}

/// Whether a tile lacks the structure.
struct Check<'a> {
    tiles: &'a [u16],
    expected: MaskKind,
    found: &'a AtomicBool,
}

impl Kernel for Check<'_> {
    #[inline(always)]
    fn run<V: Vector>(self, _: V) {
        let (rows, columns) = match self.expected {
            MaskKind::Transposable => (u64::MAX, u64::MAX),
            MaskKind::RowWise => (u64::MAX, 0),
            MaskKind::ColumnWise => (0, u64::MAX),
        };
        let mut lacking = 0;
        let whole = self.tiles.chunks_exact(4);
        for &bits in whole.remainder() {
            lacking |= u64::from(!self.expected.admits(bits));
        }
        for tiles in whole {
            let word = nibbles::word(tiles);
            lacking |= nibbles::not_pairs(word) & rows;
            lacking |= nibbles::not_pairs(nibbles::transpose_tiles(word)) & columns;
        }
        if lacking != 0 {
            self.found.store(true, Ordering::Relaxed);
        }
    }
}

/// Cuts the rows into tasks and gives each its rows of `forward` and its columns of `dgrad`.
fn compress<T: Element, U: Element>(
    level: Available,
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: &mut Compressed24<U>,
    dgrad: Option<&mut Compressed24<U>>,
) {
    if w.is_empty() {
        return;
    }
    let (r, q) = w.dim();
    let bytes = forward.values().len() * size_of::<U>() * (1 + usize::from(dgrad.is_some()));
    let (values, metadata) = forward.parts_mut();
    let forward = (values.into_slice().expect("values are row-major"), metadata);
    let dgrad = dgrad.map(|dgrad| {
        let stride = dgrad.metadata_stride();
        let (values, metadata) = dgrad.parts_mut();
        (
            values,
            ArrayViewMut2::from_shape((q, stride), metadata)
                .expect("metadata has a row for each row of values"),
        )
    });
    // Blocks end where cache lines of dgrad's rows do.
    let lead =
        dgrad.as_ref().map_or(0, |(values, _)| 2 * simd::before_a_line(values.as_ptr(), r / 2));
    let rows = strips::rows_per_task(q).next_multiple_of(256);
    let (mut parts, mut rest) =
        (Vec::new(), Part { w, tiles: mask.tiles(), map, forward, dgrad, bytes });
    if lead.is_multiple_of(8) && (1..r).contains(&lead) {
        let (part, others) = rest.split(lead);
        parts.push(part);
        rest = others;
    }
    while rest.w.nrows() > rows {
        let (part, others) = rest.split(rows);
        parts.push(part);
        rest = others;
    }
    parts.push(rest);
    let run = |panels: &mut Panels, part| level.run((part, panels));
    match &mut parts[..] {
        [part] => run(&mut Panels::new(), part),
        parts => parts.par_iter_mut().for_each_init(Panels::new, run),
    }
}
