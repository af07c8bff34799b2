//! What a mask leaves of a matrix: dense, or compressed both ways in one pass over the weights.
//!
//! Bit-identical to [`sparse24_core`] for any number of threads. Deliberately absent: which mask ([`crate::search`]).

use core::any::TypeId;

use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip, s};
use rayon::prelude::*;
use sparse24_core::{Element, Mask, MaskKind, compressed::Compressed24, group::Pattern, prune, prune::ValueMap};

use crate::{
    Error, convert, nibbles, shape,
    simd::{self, Available, Kernel, Vector},
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

/// Rows of a block: its columns give two cache lines of transposed f32 values, and whole words of metadata.
const BLOCK_ROWS: usize = 64;

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
    fn run<V: Vector>(self, v: V) {
        match (self.map, TypeId::of::<T>() == TypeId::of::<U>()) {
            (ValueMap::Identity, true) => self.blocks::<V, Bits>(v),
            (ValueMap::Identity, false) => self.blocks::<V, Value>(v),
            (ValueMap::SoftThreshold { .. }, _) => self.blocks::<V, Mapped>(v),
        }
    }
}

/// How an element travels in an f32 lane, which moves it and never computes with it.
trait Carriage {
    /// One row of a strip; nibble `4*g` of `tiles` is the pattern of group g.
    fn load<T: Element>(row: [T; 16], tiles: u64, map: ValueMap) -> [f32; 16];
    fn store<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N];
}

/// From a type to the same type: as bits, so that the payload of a NaN survives.
struct Bits;
/// By value.
struct Value;
/// By value, through [`prune::group`].
struct Mapped;

impl Carriage for Bits {
    #[inline(always)]
    fn load<T: Element>(row: [T; 16], _: u64, _: ValueMap) -> [f32; 16] {
        row.map(convert::carry)
    }
    #[inline(always)]
    fn store<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N] {
        lanes.map(convert::deliver)
    }
}

impl Carriage for Value {
    #[inline(always)]
    fn load<T: Element>(row: [T; 16], _: u64, _: ValueMap) -> [f32; 16] {
        row.map(convert::widen)
    }
    #[inline(always)]
    fn store<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N] {
        lanes.map(convert::narrow)
    }
}

impl Carriage for Mapped {
    #[inline(always)]
    fn load<T: Element>(row: [T; 16], tiles: u64, map: ValueMap) -> [f32; 16] {
        soft_threshold(row.map(T::to_f32), tiles, map)
    }
    #[inline(always)]
    fn store<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N] {
        Value::store(lanes)
    }
}

impl<T: Element, U: Element> Part<'_, T, U> {
    /// Block by block: its rows in order first, which hardware foresees; then, from a near cache, its columns.
    #[inline(always)]
    fn blocks<V: Vector, C: Carriage>(&mut self, v: V) {
        let (rows, q) = self.w.dim();
        for first in (0..rows).step_by(BLOCK_ROWS) {
            let height = BLOCK_ROWS.min(rows - first);
            let slice = |i| if i < height { self.w.index_axis_move(Axis(0), first + i).to_slice() } else { None };
            let slices: [Option<&[T]>; BLOCK_ROWS] = core::array::from_fn(slice);
            if self.forward.is_some() {
                for (strip, column) in (0..height / 4).flat_map(|strip| (0..q).step_by(16).map(move |column| (strip, column))) {
                    self.forward_strip::<V, C>(v, &slices, first, strip, column);
                }
            }
            if self.dgrad.is_some() {
                for column in (0..q).step_by(16) {
                    let width = 16.min(q - column);
                    if height == BLOCK_ROWS && width == 16 {
                        self.dgrad_block::<V, C>(v, &slices, [first, column], [BLOCK_ROWS, 16]);
                    } else {
                        self.dgrad_block::<V, C>(v, &slices, [first, column], [height, width]);
                    }
                }
            }
        }
    }

    /// Four tiles of a strip, missing ones empty, and their elements, missing ones anything.
    #[inline(always)]
    fn tiles<C: Carriage>(&self, slices: &[Option<&[T]>; BLOCK_ROWS], first: usize, strip: usize, column: usize) -> (u64, [[f32; 16]; 4]) {
        let q = self.w.ncols();
        let tiles = &self.tiles[(first / 4 + strip) * (q / 4) + column / 4..];
        let word = match tiles.first_chunk::<4>() {
            Some(tiles) if column + 16 <= q => nibbles::word(tiles),
            _ => nibbles::word(&tiles[..(q - column) / 4]),
        };
        let mut x = [[0.0; 16]; 4];
        for (i, x) in x.iter_mut().enumerate() {
            let row = 4 * strip + i;
            let stored = match slices[row].and_then(|row| row[column..].first_chunk()) {
                Some(row) => *row,
                None => core::array::from_fn(|j| self.w.get([first + row, column + j]).copied().unwrap_or_default()),
            };
            *x = C::load(stored, word >> (4 * i), self.map);
        }
        (word, x)
    }

    /// Compresses four rows of sixteen columns.
    #[inline(always)]
    fn forward_strip<V: Vector, C: Carriage>(
        &mut self,
        v: V,
        slices: &[Option<&[T]>; BLOCK_ROWS],
        first: usize,
        strip: usize,
        column: usize,
    ) {
        let q = self.w.ncols();
        let (word, x) = self.tiles::<C>(slices, first, strip, column);
        let (values, metadata) = self.forward.as_mut().expect("called where there is a forward");
        let (kept, patterns) = (nibbles::rows(word), nibbles::metadata(nibbles::rows(word)));
        let (stride, width) = ((q / 4).div_ceil(2), 16.min(q - column));
        for (i, x) in x.iter().enumerate() {
            let row = first + 4 * strip + i;
            let packed: [U; 8] = C::store(pack(v, x, kept >> (16 * i)));
            put(&mut values[row * (q / 2) + column / 2..], &packed, width / 2);
            let present = (patterns >> (16 * i)) as u16 & (u16::MAX >> (16 - width));
            put(&mut metadata[row * stride + column / 8..], &present.to_le_bytes(), width.div_ceil(8));
        }
    }

    /// Compresses the columns of at most 64 rows and 16 columns at `[first, column]`.
    #[inline(always)]
    fn dgrad_block<V: Vector, C: Carriage>(
        &mut self,
        v: V,
        slices: &[Option<&[T]>; BLOCK_ROWS],
        [first, column]: [usize; 2],
        [height, width]: [usize; 2],
    ) {
        let mut transposed = [[0.0; BLOCK_ROWS / 2]; 16];
        let mut transposed_metadata = [0_u64; 16];
        for strip in 0..height / 4 {
            self.ask_for(first, column + 16 + strip);
            let (word, x) = self.tiles::<C>(slices, first, strip, column);
            let columns = nibbles::transpose_tiles(word);
            let (kept, patterns) = (nibbles::rows(columns), nibbles::metadata(columns));
            for at in (0..16).step_by(V::LANES) {
                let tiles = v.transpose_tiles([v.load(&x[0][at..]), v.load(&x[1][at..]), v.load(&x[2][at..]), v.load(&x[3][at..])]);
                for (j, tile) in tiles.into_iter().enumerate() {
                    let mut packed = [0.0; 16];
                    v.store(v.pack_pairs(tile, lanes::<V>(kept >> (16 * j + at))), &mut packed);
                    for of in 0..V::LANES / 4 {
                        transposed[at + 4 * of + j][2 * strip..][..2].copy_from_slice(&packed[2 * of..][..2]);
                    }
                }
            }
            for (at, metadata) in transposed_metadata.iter_mut().enumerate() {
                *metadata |= (patterns >> (4 * at) & 0xf) << (4 * strip);
            }
        }
        let (values, metadata) = self.dgrad.as_mut().expect("called where there is a dgrad");
        for at in 0..width {
            let values = values.index_axis_mut(Axis(0), column + at).into_slice().expect("values are row-major");
            put(&mut values[first / 2..], &C::store::<U, { BLOCK_ROWS / 2 }>(transposed[at]), height / 2);
            let metadata = metadata.index_axis_mut(Axis(0), column + at).into_slice().expect("metadata is row-major");
            put(&mut metadata[first / 8..], &transposed_metadata[at].to_le_bytes(), height.div_ceil(8));
        }
    }

    /// Asks for the lines of `dgrad` that a block will write in one row: they lie apart, so that no hardware foresees them.
    #[inline(always)]
    fn ask_for(&self, first: usize, row: usize) {
        if let Some((values, metadata)) = &self.dgrad
            && row < values.nrows()
        {
            let values = values.index_axis(Axis(0), row).to_slice().expect("values are row-major");
            for line in (0..=BLOCK_ROWS / 2).step_by(64 / size_of::<U>()) {
                simd::prefetch(values, first / 2 + line);
            }
            simd::prefetch(metadata.index_axis(Axis(0), row).to_slice().expect("metadata is row-major"), first / 8);
        }
    }
}

/// The first eight lanes are the kept of sixteen.
#[inline(always)]
fn pack<V: Vector>(v: V, x: &[f32; 16], kept: u64) -> [f32; 8] {
    let mut packed = [0.0; 16];
    for at in (0..16).step_by(V::LANES) {
        v.store(v.pack_pairs(v.load(&x[at..]), lanes::<V>(kept >> at)), &mut packed[at / 2..]);
    }
    *packed.first_chunk().expect("8 of 16")
}

/// The lowest `LANES` bits.
#[inline(always)]
fn lanes<V: Vector>(bits: u64) -> u32 {
    (bits & ((1 << V::LANES) - 1)) as u32
}

/// The first `length` of `from` to the start of `to`.
#[inline(always)]
fn put<E: Copy, const N: usize>(to: &mut [E], from: &[E; N], length: usize) {
    if length == N {
        *to.first_chunk_mut().expect("as many as are put") = *from;
    } else {
        to[..length].copy_from_slice(&from[..length]);
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
