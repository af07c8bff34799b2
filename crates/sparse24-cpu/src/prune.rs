//! What a mask leaves of a matrix: dense, or compressed both ways in one pass over the weights.
//!
//! Bit-identical to [`sparse24_core`] for any number of threads. Deliberately absent: which mask ([`crate::search`]).

use core::any::Any;

use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip, s};
use rayon::prelude::*;
use sparse24_core::{Element, Mask, MaskKind, compressed::Compressed24, group::Pattern, prune, prune::ValueMap};

use crate::{
    Error, nibbles, shape,
    simd::{Available, Kernel},
    strips,
};

/// S(w) `[r, q]`: pruned elements are +0, kept ones are unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless the mask and `out` have the shape of `w`.
pub fn masked<T: Element>(w: ArrayView2<'_, T>, mask: &Mask, mut out: ArrayViewMut2<'_, T>) -> Result<(), Error> {
    let shape = [w.nrows(), w.ncols()];
    shape::check("prune", "mask", shape, mask.shape())?;
    shape::check("prune", "out", shape, [out.nrows(), out.ncols()])?;
    if w.is_empty() {
        return Ok(());
    }
    let level = Available::best();
    let (tile_columns, rows_per_task) = (w.ncols() / 4, strips::rows_per_task(w.ncols()));
    out.axis_chunks_iter_mut(Axis(0), rows_per_task).into_par_iter().enumerate().for_each(|(task, mut out)| {
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
    });
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
    fn run(self) {
        let select = |kept: u32, w: &[T], out: &mut [T]| {
            for i in 0..w.len() {
                out[i] = if kept & 1 << i == 0 { T::default() } else { w[i] };
            }
        };
        for ((out, w), tiles) in self.out.chunks_mut(16).zip(self.w.chunks(16)).zip(self.tiles.chunks(4)) {
            let kept = (nibbles::rows(nibbles::word(tiles)) >> (16 * self.row)) as u32;
            // A known length lets the loop become selects.
            match (<&mut [T; 16]>::try_from(&mut *out), <&[T; 16]>::try_from(w)) {
                (Ok(out), Ok(w)) => select(kept, w, out),
                _ => select(kept, w, out),
            }
        }
    }
}

/// Compresses S(w) and its transpose in one pass: `forward` is `[r, q]`, `dgrad` is `[q, r]`, both of the same values.
///
/// S(w) is [`prune::group`] of every row group with the mask's pattern, rounded to `U`; with [`ValueMap::Identity`] and `U` = `T` kept
/// values are unchanged to the bit. (S-STE defines its soft threshold for row-wise magnitude masks; with a transposable mask the
/// threshold is still the second-smallest magnitude of the row group.)
///
/// # Errors
/// [`Error::Shape`] unless the mask and both outputs fit `w`; [`Error::Semantics`] unless the mask is transposable.
pub fn compress_weight<T: Element, U: Element>(
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
    check_mask(mask, MaskKind::Transposable)?;
    compress_both(Available::best(), w, mask, map, Some(forward), Some(dgrad));
    Ok(())
}

/// Compresses S(w) along its rows only, as [`compress_weight`] does: for masks that are row-wise and not transposable.
///
/// # Errors
/// [`Error::Shape`] unless the mask and the output have the shape of `w`; [`Error::Semantics`] unless the mask is row-wise 2:4.
pub fn compress_forward<T: Element, U: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: &mut Compressed24<U>,
) -> Result<(), Error> {
    let shape = [w.nrows(), w.ncols()];
    shape::check("compress weight", "mask", shape, mask.shape())?;
    shape::check("compress weight", "forward", shape, forward.shape())?;
    check_mask(mask, MaskKind::RowWise)?;
    compress_both(Available::best(), w, mask, map, Some(forward), None);
    Ok(())
}

/// [`Mask::check`], four tiles at a time.
fn check_mask(mask: &Mask, expected: MaskKind) -> Result<(), Error> {
    let whole = mask.tiles().chunks_exact(4);
    let rest_admitted = whole.remainder().iter().all(|&bits| expected.admits(bits));
    let admitted = whole.map(nibbles::word).fold(true, |admitted, word| {
        let rows = nibbles::all_pairs(word);
        let columns = nibbles::all_pairs(nibbles::transpose_tiles(word));
        admitted
            & match expected {
                MaskKind::Transposable => rows & columns,
                MaskKind::RowWise => rows,
                MaskKind::ColumnWise => columns,
            }
    });
    if admitted && rest_admitted { Ok(()) } else { Ok(mask.check(expected)?) }
}

/// Rows of a block: its columns give whole cache lines of transposed f32 values.
const BLOCK_ROWS: usize = 32;

/// Cuts the rows into tasks and gives each its rows of `forward` and its columns of `dgrad`.
fn compress_both<T: Element, U: Element>(
    level: Available,
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: Option<&mut Compressed24<U>>,
    dgrad: Option<&mut Compressed24<U>>,
) {
    if w.is_empty() {
        return;
    }
    let (r, q) = w.dim();
    let rows = strips::rows_per_task(q).next_multiple_of(BLOCK_ROWS);
    let tasks = r.div_ceil(rows);
    let mut parts: Vec<_> = (0..tasks)
        .map(|task| {
            let (first, end) = (task * rows, r.min((task + 1) * rows));
            let tiles = &mask.tiles()[first / 4 * (q / 4)..end / 4 * (q / 4)];
            Part { w: w.slice_move(s![first..end, ..]), tiles, map, forward: None, dgrad: None }
        })
        .collect();
    if let Some(forward) = forward {
        let stride = forward.metadata_stride();
        let (values, metadata) = forward.parts_mut();
        let values = values.into_slice().expect("values are row-major");
        for ((part, values), metadata) in parts.iter_mut().zip(values.chunks_mut(rows * q / 2)).zip(metadata.chunks_mut(rows * stride)) {
            part.forward = Some((values, metadata));
        }
    }
    let (mut dgrad_values, mut dgrad_metadata);
    if let Some(dgrad) = dgrad {
        let stride = dgrad.metadata_stride();
        let (values, metadata) = dgrad.parts_mut();
        dgrad_values = values;
        dgrad_metadata = ArrayViewMut2::from_shape((q, stride), metadata).expect("metadata has a row for each row of values");
        let values = dgrad_values.axis_chunks_iter_mut(Axis(1), rows / 2);
        for ((part, values), metadata) in parts.iter_mut().zip(values).zip(dgrad_metadata.axis_chunks_iter_mut(Axis(1), rows / 8)) {
            part.dgrad = Some((values, metadata));
        }
    }
    strips::for_chunks(&mut parts, 1, |_, parts| {
        for part in parts {
            level.run(part);
        }
    });
}

/// Some rows of the weights, and where they go.
struct Part<'a, T, U> {
    w: ArrayView2<'a, T>,
    tiles: &'a [u16],
    map: ValueMap,
    forward: Option<(&'a mut [U], &'a mut [u8])>,
    dgrad: Option<(ArrayViewMut2<'a, U>, ArrayViewMut2<'a, u8>)>,
}

impl<T: Element, U: Element> Kernel for &mut Part<'_, T, U> {
    #[inline(always)]
    fn run(self) {
        let (rows, q) = self.w.dim();
        for first in (0..rows).step_by(BLOCK_ROWS) {
            let height = BLOCK_ROWS.min(rows - first);
            let slice = |i| if i < height { self.w.index_axis_move(Axis(0), first + i).to_slice() } else { None };
            let slices: [Option<&[T]>; BLOCK_ROWS] = core::array::from_fn(slice);
            for column in (0..q).step_by(16) {
                self.block(&slices, [first, column], [height, 16.min(q - column)]);
            }
        }
    }
}

impl<T: Element, U: Element> Part<'_, T, U> {
    /// Compresses the block of at most 32 rows and 16 columns at `[first, column]`.
    #[inline(always)]
    fn block(&mut self, slices: &[Option<&[T]>; BLOCK_ROWS], [first, column]: [usize; 2], [height, width]: [usize; 2]) {
        let q = self.w.ncols();
        let mut transposed = [[U::default(); BLOCK_ROWS / 2]; 16];
        let mut transposed_metadata = [0_u32; 16];
        for strip in 0..height / 4 {
            let word = nibbles::word(&self.tiles[(first / 4 + strip) * (q / 4) + column / 4..][..width / 4]);
            let mut x: [[U; 16]; 4] = core::array::from_fn(|i| {
                let row = 4 * strip + i;
                match slices[row].and_then(|row| row[column..].first_chunk()) {
                    Some(row) => row.map(convert),
                    None => core::array::from_fn(|j| if j < width { convert(self.w[[first + row, column + j]]) } else { U::default() }),
                }
            });
            if let ValueMap::SoftThreshold { .. } = self.map {
                for (i, j) in (0..4).flat_map(|i| (0..width).step_by(4).map(move |j| (i, j))) {
                    let pattern = Pattern::from_bits((word >> (4 * j + 4 * i)) as u8 & 0xf).expect("the mask was checked");
                    let group = core::array::from_fn(|at| self.w[[first + 4 * strip + i, column + j + at]].to_f32());
                    let mapped = prune::group(group, pattern, self.map);
                    (0..4).for_each(|at| x[i][j + at] = U::from_f32(mapped[at]));
                }
            }
            if let Some((values, metadata)) = &mut self.forward {
                let patterns = nibbles::metadata(nibbles::rows(word));
                let stride = (q / 4).div_ceil(2);
                for (i, x) in x.iter().enumerate() {
                    let row = first + 4 * strip + i;
                    let patterns = (patterns >> (16 * i)) as u16;
                    let kept: [U; 8] = core::array::from_fn(|at| x[at / 2 * 4 + usize::from(patterns >> (2 * at) & 3)]);
                    values[row * (q / 2) + column / 2..][..width / 2].copy_from_slice(&kept[..width / 2]);
                    let present = patterns & (u16::MAX >> (16 - width));
                    let bytes = width.div_ceil(8);
                    metadata[row * stride + column / 8..][..bytes].copy_from_slice(&present.to_le_bytes()[..bytes]);
                }
            }
            let patterns = nibbles::metadata(nibbles::transpose_tiles(word));
            for column in 0..16 {
                let pattern = (patterns >> (4 * column)) as u32 & 0xf;
                transposed[column][2 * strip] = x[(pattern & 3) as usize][column];
                transposed[column][2 * strip + 1] = x[(pattern >> 2) as usize][column];
                transposed_metadata[column] |= pattern << (4 * strip);
            }
        }
        if let Some((values, metadata)) = &mut self.dgrad {
            for at in 0..width {
                let values = values.index_axis_mut(Axis(0), column + at).into_slice().expect("values are row-major");
                values[first / 2..][..height / 2].copy_from_slice(&transposed[at][..height / 2]);
                let metadata = metadata.index_axis_mut(Axis(0), column + at).into_slice().expect("metadata is row-major");
                let bytes = height.div_ceil(8);
                metadata[first / 8..][..bytes].copy_from_slice(&transposed_metadata[at].to_le_bytes()[..bytes]);
            }
        }
    }
}

/// The element in another storage type; to the bit where the type is the same.
#[inline(always)]
fn convert<T: Element, U: Element>(x: T) -> U {
    match (&x as &dyn Any).downcast_ref() {
        Some(&same) => same,
        None => U::from_f32(x.to_f32()),
    }
}
