//! What a mask leaves of a matrix: dense, or compressed both ways in one pass over the weights.
//!
//! Bit-identical to [`sparse24_core`] for any number of threads. Deliberately absent: which mask ([`crate::search`]).

use core::any::{Any, TypeId};

use half::{bf16, f16};
use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip, s};
use rayon::prelude::*;
use sparse24_core::{Element, Mask, MaskKind, compressed::Compressed24, group::Pattern, prune, prune::ValueMap};

use crate::{
    Error, nibbles, shape,
    simd::{Available, Kernel, Vector},
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
    fn run<V: Vector>(self, _: V) {
        for ((out, w), tiles) in self.out.chunks_mut(16).zip(self.w.chunks(16)).zip(self.tiles.chunks(4)) {
            let kept = (nibbles::rows(nibbles::word(tiles)) >> (16 * self.row)) as u32;
            let select = |i: usize, w: T| if kept & 1 << i == 0 { T::default() } else { w };
            match w.first_chunk::<16>() {
                Some(w) => out.copy_from_slice(&core::array::from_fn::<T, 16, _>(|i| select(i, w[i]))),
                None => out.iter_mut().zip(w).enumerate().for_each(|(i, (out, &w))| *out = select(i, w)),
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
    let carriage = match (map, TypeId::of::<T>() == TypeId::of::<U>()) {
        (ValueMap::Identity, true) => Carriage::Bits,
        _ => Carriage::Value,
    };
    let (r, q) = w.dim();
    let rows = strips::rows_per_task(q).next_multiple_of(BLOCK_ROWS);
    let tasks = r.div_ceil(rows);
    let mut parts: Vec<_> = (0..tasks)
        .map(|task| {
            let (first, end) = (task * rows, r.min((task + 1) * rows));
            let tiles = &mask.tiles()[first / 4 * (q / 4)..end / 4 * (q / 4)];
            Part { w: w.slice_move(s![first..end, ..]), tiles, map, carriage, forward: None, dgrad: None }
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
    carriage: Carriage,
    forward: Option<(&'a mut [U], &'a mut [u8])>,
    dgrad: Option<(ArrayViewMut2<'a, U>, ArrayViewMut2<'a, u8>)>,
}

impl<T: Element, U: Element> Kernel for &mut Part<'_, T, U> {
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let (rows, q) = self.w.dim();
        for first in (0..rows).step_by(BLOCK_ROWS) {
            let height = BLOCK_ROWS.min(rows - first);
            let slice = |i| if i < height { self.w.index_axis_move(Axis(0), first + i).to_slice() } else { None };
            let slices: [Option<&[T]>; BLOCK_ROWS] = core::array::from_fn(slice);
            for column in (0..q).step_by(16) {
                self.block(v, &slices, [first, column], [height, 16.min(q - column)]);
            }
        }
    }
}

impl<T: Element, U: Element> Part<'_, T, U> {
    /// Compresses the block of at most 32 rows and 16 columns at `[first, column]`.
    #[inline(always)]
    fn block<V: Vector>(&mut self, v: V, slices: &[Option<&[T]>; BLOCK_ROWS], [first, column]: [usize; 2], [height, width]: [usize; 2]) {
        let q = self.w.ncols();
        let lanes = (1_u64 << V::LANES) - 1;
        let mut transposed = [[0.0; BLOCK_ROWS / 2]; 16];
        let mut transposed_metadata = [0_u32; 16];
        for strip in 0..height / 4 {
            let word = nibbles::word(&self.tiles[(first / 4 + strip) * (q / 4) + column / 4..][..width / 4]);
            let mut x = [[0.0; 16]; 4];
            for (i, x) in x.iter_mut().enumerate() {
                let row = 4 * strip + i;
                let stored = match slices[row].and_then(|row| row[column..].first_chunk()) {
                    Some(row) => *row,
                    None => core::array::from_fn(|j| self.w.get([first + row, column + j]).copied().unwrap_or_default()),
                };
                *x = match self.carriage {
                    Carriage::Bits => stored.map(carry_bits),
                    Carriage::Value => stored.map(T::to_f32),
                };
                if let ValueMap::SoftThreshold { .. } = self.map {
                    *x = soft_threshold(*x, word >> (4 * i), self.map);
                }
            }
            if let Some((values, metadata)) = &mut self.forward {
                let (kept, patterns) = (nibbles::rows(word), nibbles::metadata(nibbles::rows(word)));
                let stride = (q / 4).div_ceil(2);
                for (i, x) in x.iter().enumerate() {
                    let row = first + 4 * strip + i;
                    let mut packed = [0.0; 16];
                    for at in (0..16).step_by(V::LANES) {
                        v.store(v.pack_pairs(v.load(&x[at..]), (kept >> (16 * i + at) & lanes) as u32), &mut packed[at / 2..]);
                    }
                    let packed = deliver::<U, 8>(self.carriage, *packed.first_chunk().expect("8 of 16"));
                    values[row * (q / 2) + column / 2..][..width / 2].copy_from_slice(&packed[..width / 2]);
                    let present = (patterns >> (16 * i)) as u16 & (u16::MAX >> (16 - width));
                    let bytes = width.div_ceil(8);
                    metadata[row * stride + column / 8..][..bytes].copy_from_slice(&present.to_le_bytes()[..bytes]);
                }
            }
            if self.dgrad.is_some() {
                let columns = nibbles::transpose_tiles(word);
                let (kept, patterns) = (nibbles::rows(columns), nibbles::metadata(columns));
                for at in (0..16).step_by(V::LANES) {
                    let tiles = v.transpose_tiles([v.load(&x[0][at..]), v.load(&x[1][at..]), v.load(&x[2][at..]), v.load(&x[3][at..])]);
                    for (j, tile) in tiles.into_iter().enumerate() {
                        let mut packed = [0.0; 16];
                        v.store(v.pack_pairs(tile, (kept >> (16 * j + at) & lanes) as u32), &mut packed);
                        for of in 0..V::LANES / 4 {
                            transposed[at + 4 * of + j][2 * strip..][..2].copy_from_slice(&packed[2 * of..][..2]);
                        }
                    }
                }
                for (at, metadata) in transposed_metadata.iter_mut().enumerate() {
                    *metadata |= ((patterns >> (4 * at)) as u32 & 0xf) << (4 * strip);
                }
            }
        }
        if let Some((values, metadata)) = &mut self.dgrad {
            for at in 0..width {
                let values = values.index_axis_mut(Axis(0), column + at).into_slice().expect("values are row-major");
                let transposed = deliver::<U, { BLOCK_ROWS / 2 }>(self.carriage, transposed[at]);
                values[first / 2..][..height / 2].copy_from_slice(&transposed[..height / 2]);
                let metadata = metadata.index_axis_mut(Axis(0), column + at).into_slice().expect("metadata is row-major");
                let bytes = height.div_ceil(8);
                metadata[first / 8..][..bytes].copy_from_slice(&transposed_metadata[at].to_le_bytes()[..bytes]);
            }
        }
    }
}

/// How an element travels in an f32 lane, which moves it and never computes with it.
#[derive(Clone, Copy)]
enum Carriage {
    /// Its bits, from a type to the same type: the payload of a NaN survives.
    Bits,
    /// Its value.
    Value,
}

/// The bits of the 16-bit types zero-extended; the value of any other.
#[inline(always)]
fn carry_bits<T: Element>(x: T) -> f32 {
    let any: &dyn Any = &x;
    match (any.downcast_ref::<bf16>(), any.downcast_ref::<f16>()) {
        (Some(x), _) => f32::from_bits(x.to_bits().into()),
        (_, Some(x)) => f32::from_bits(x.to_bits().into()),
        _ => x.to_f32(),
    }
}

#[inline(always)]
fn deliver<U: Element, const N: usize>(carriage: Carriage, x: [f32; N]) -> [U; N] {
    match carriage {
        Carriage::Bits => x.map(deliver_bits),
        Carriage::Value => x.map(U::from_f32),
    }
}

/// The inverse of [`carry_bits`].
#[inline(always)]
fn deliver_bits<U: Element>(x: f32) -> U {
    let bits = x.to_bits() as u16;
    let (brain, half): (&dyn Any, &dyn Any) = (&bf16::from_bits(bits), &f16::from_bits(bits));
    match (brain.downcast_ref(), half.downcast_ref()) {
        (Some(&x), _) | (_, Some(&x)) => x,
        _ => U::from_f32(x),
    }
}

/// [`prune::group`] of four groups; nibble `4*g` of `tiles` is the pattern of group g.
#[inline(always)]
fn soft_threshold(x: [f32; 16], tiles: u64, map: ValueMap) -> [f32; 16] {
    let mut mapped = [0.0; 16];
    for (g, (mapped, x)) in mapped.chunks_exact_mut(4).zip(x.chunks_exact(4)).enumerate() {
        if let Some(pattern) = Pattern::from_bits((tiles >> (16 * g)) as u8 & 0xf) {
            mapped.copy_from_slice(&prune::group([x[0], x[1], x[2], x[3]], pattern, map));
        }
    }
    mapped
}
