//! Compression of a block of rows: forward along its rows, dgrad along its columns, while it is in a near cache.
//!
//! Invariant: a mask that was checked. Deliberately absent: which threads do which rows.

use core::any::TypeId;

use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use sparse24_core::{
    Element,
    group::Pattern,
    prune::{self, ValueMap},
};

use crate::{
    convert, nibbles,
    simd::{self, Kernel, Vector},
};

/// Rows of a block: its columns give two cache lines of transposed f32 values, and whole words of metadata.
pub(super) const BLOCK_ROWS: usize = 64;

/// Words of four tiles that are rearranged at a time.
const WORDS: usize = 8;

/// Some rows of the weights, and where they go.
pub(super) struct Part<'a, T, U> {
    pub(super) w: ArrayView2<'a, T>,
    pub(super) tiles: &'a [u16],
    pub(super) map: ValueMap,
    pub(super) forward: Option<(&'a mut [U], &'a mut [u8])>,
    pub(super) dgrad: Option<(ArrayViewMut2<'a, U>, ArrayViewMut2<'a, u8>)>,
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
    /// Sixteen elements of a row; nibble `4*g` of `tiles` is the pattern of group g.
    fn carry<T: Element>(row: &[T; 16], tiles: u64, map: ValueMap) -> [f32; 16];
    fn deliver<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N];
    /// `LANES` of the sixteen, from lane `at` on.
    #[inline(always)]
    fn load<V: Vector, T: Element>(v: V, row: &[T; 16], at: usize, tiles: u64, map: ValueMap) -> V::F {
        v.load(&Self::carry(row, tiles, map)[at..])
    }
}

/// From a type to the same type: as bits, so that the payload of a NaN survives.
struct Bits;
/// By value.
struct Value;
/// By value, through [`prune::group`].
struct Mapped;

impl Carriage for Bits {
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], _: u64, _: ValueMap) -> [f32; 16] {
        row.map(convert::carry)
    }
    #[inline(always)]
    fn deliver<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N] {
        lanes.map(convert::deliver)
    }
    #[inline(always)]
    fn load<V: Vector, T: Element>(v: V, row: &[T; 16], at: usize, tiles: u64, map: ValueMap) -> V::F {
        match T::as_f32s(row) {
            Some(row) => v.load(&row[at..]),
            None => v.load(&Self::carry(row, tiles, map)[at..]),
        }
    }
}

impl Carriage for Value {
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], _: u64, _: ValueMap) -> [f32; 16] {
        row.map(convert::widen)
    }
    #[inline(always)]
    fn deliver<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N] {
        lanes.map(convert::narrow)
    }
    #[inline(always)]
    fn load<V: Vector, T: Element>(v: V, row: &[T; 16], at: usize, tiles: u64, map: ValueMap) -> V::F {
        match T::as_f32s(row) {
            Some(row) => v.load(&row[at..]),
            None => v.load(&Self::carry(row, tiles, map)[at..]),
        }
    }
}

impl Carriage for Mapped {
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], tiles: u64, map: ValueMap) -> [f32; 16] {
        soft_threshold(row.map(T::to_f32), tiles, map)
    }
    #[inline(always)]
    fn deliver<U: Element, const N: usize>(lanes: [f32; N]) -> [U; N] {
        Value::deliver(lanes)
    }
}

impl<T: Element, U: Element> Part<'_, T, U> {
    /// Block by block: its rows in order first, which hardware foresees; then, from a near cache, its columns.
    #[inline(always)]
    fn blocks<V: Vector, C: Carriage>(&mut self, v: V) {
        let (rows, q) = self.w.dim();
        for first in (0..rows).step_by(BLOCK_ROWS) {
            let height = BLOCK_ROWS.min(rows - first);
            // Rows that are not contiguous are empty here, and gathered.
            let mut slices: [&[T]; BLOCK_ROWS] = [&[]; BLOCK_ROWS];
            for (i, slice) in slices.iter_mut().enumerate().take(height) {
                *slice = self.w.index_axis_move(Axis(0), first + i).to_slice().unwrap_or_default();
            }
            if self.forward.is_some() {
                for strip in 0..height / 4 {
                    for column in (0..q).step_by(16 * WORDS) {
                        self.forward_strip::<V, C>(v, &slices, first, strip, column);
                    }
                }
            }
            if self.dgrad.is_some() {
                for column in (0..q).step_by(16) {
                    let width = 16.min(q - column);
                    if height == BLOCK_ROWS && width == 16 {
                        self.dgrad_block::<V, C, true>(v, &slices, [first, column], [BLOCK_ROWS, 16]);
                    } else {
                        self.dgrad_block::<V, C, false>(v, &slices, [first, column], [height, width]);
                    }
                }
            }
        }
    }

    /// Four tiles of a strip; missing ones are empty.
    #[inline(always)]
    fn tiles(&self, first: usize, strip: usize, column: usize) -> u64 {
        let q = self.w.ncols();
        let tiles = &self.tiles[(first / 4 + strip) * (q / 4) + column / 4..];
        match tiles.first_chunk::<4>() {
            Some(tiles) if column + 16 <= q => nibbles::word(tiles),
            _ => ragged_word(&tiles[..(q - column) / 4]),
        }
    }

    /// Sixteen elements of a row of a block; where they are apart they are gathered, missing ones are anything.
    #[inline(always)]
    fn row<'a>(&self, rows: &[&'a [T]; BLOCK_ROWS], first: usize, [row, column]: [usize; 2], gathered: &'a mut [T; 16]) -> &'a [T; 16] {
        match rows[row].get(column..).and_then(<[T]>::first_chunk) {
            Some(stored) => stored,
            None => {
                gather(self.w, [first + row, column], gathered);
                gathered
            }
        }
    }

    /// Compresses four rows of at most 128 columns.
    #[inline(always)]
    fn forward_strip<V: Vector, C: Carriage>(&mut self, v: V, rows: &[&[T]; BLOCK_ROWS], first: usize, strip: usize, column: usize) {
        let (q, map) = (self.w.ncols(), self.map);
        let stride = (q / 4).div_ceil(2);
        let count = WORDS.min((q - column).div_ceil(16));
        let mut words = [0; WORDS];
        for (at, word) in words.iter_mut().enumerate().take(count) {
            *word = self.tiles(first, strip, column + 16 * at);
        }
        let kept = words.map(nibbles::rows);
        let patterns = kept.map(nibbles::metadata);
        for i in 0..4 {
            let row = first + 4 * strip + i;
            let (values, metadata) = self.forward.as_mut().expect("called where there is a forward");
            let values = &mut values[row * (q / 2) + column / 2..];
            let metadata = &mut metadata[row * stride + column / 8..];
            let whole = rows[4 * strip + i].get(column..).and_then(<[T]>::first_chunk::<{ 16 * WORDS }>);
            if let (Some(x), Some(values), Some(metadata)) = (whole, values.first_chunk_mut(), metadata.first_chunk_mut()) {
                let (values, metadata): (&mut [U; 8 * WORDS], &mut [u8; 2 * WORDS]) = (values, metadata);
                for at in 0..WORDS {
                    let x = x[16 * at..].first_chunk().expect("16 of 128");
                    let packed = pack::<V, C, T, U>(v, x, kept[at] >> (16 * i), words[at] >> (4 * i), map);
                    values[8 * at..][..8].copy_from_slice(&packed);
                    metadata[2 * at..][..2].copy_from_slice(&((patterns[at] >> (16 * i)) as u16).to_le_bytes());
                }
                continue;
            }
            for at in 0..count {
                let width = 16.min(q - column - 16 * at);
                let mut gathered = [T::default(); 16];
                gather(self.w, [row, column + 16 * at], &mut gathered);
                let packed = pack::<V, C, T, U>(v, &gathered, kept[at] >> (16 * i), words[at] >> (4 * i), map);
                put(&mut values[8 * at..], &packed, width / 2);
                let present = (patterns[at] >> (16 * i)) as u16 & (u16::MAX >> (16 - width));
                put(&mut metadata[2 * at..], &present.to_le_bytes(), width.div_ceil(8));
            }
        }
    }

    /// Compresses the columns of at most 64 rows and 16 columns at `[first, column]`; where the block is `WHOLE`, its copies are moves.
    #[inline(always)]
    fn dgrad_block<V: Vector, C: Carriage, const WHOLE: bool>(
        &mut self,
        v: V,
        rows: &[&[T]; BLOCK_ROWS],
        [first, column]: [usize; 2],
        size: [usize; 2],
    ) {
        let [height, width] = if WHOLE { [BLOCK_ROWS, 16] } else { size };
        let mut transposed = [[0.0; BLOCK_ROWS / 2]; 16];
        let mut words = [0; BLOCK_ROWS / 4];
        for (strip, word) in words.iter_mut().enumerate().take(height / 4) {
            *word = self.tiles(first, strip, column);
        }
        let columns = words.map(nibbles::transpose_tiles);
        let kept = columns.map(nibbles::rows);
        let mut patterns = columns.map(nibbles::metadata);
        patterns[height / 4..].fill(0);
        let transposed_metadata = nibbles::transpose(patterns);
        let mut gathered = [[T::default(); 16]; 4];
        for strip in 0..height / 4 {
            self.ask_for(first, column + 16 + strip);
            let (word, kept, map, row) = (words[strip], kept[strip], self.map, 4 * strip);
            let [g0, g1, g2, g3] = &mut gathered;
            let a = self.row(rows, first, [row, column], g0);
            let b = self.row(rows, first, [row + 1, column], g1);
            let c = self.row(rows, first, [row + 2, column], g2);
            let e = self.row(rows, first, [row + 3, column], g3);
            for at in (0..16).step_by(V::LANES) {
                let (a, b) = (C::load(v, a, at, word, map), C::load(v, b, at, word >> 4, map));
                let (c, e) = (C::load(v, c, at, word >> 8, map), C::load(v, e, at, word >> 12, map));
                let tiles = v.transpose_tiles([a, b, c, e]);
                for (j, tile) in tiles.into_iter().enumerate() {
                    let mut packed = [0.0; 16];
                    v.store(v.pack_pairs(tile, lanes::<V>(kept >> (16 * j + at))), &mut packed);
                    for of in 0..V::LANES / 4 {
                        transposed[at + 4 * of + j][2 * strip..][..2].copy_from_slice(&packed[2 * of..][..2]);
                    }
                }
            }
        }
        let (values, metadata) = self.dgrad.as_mut().expect("called where there is a dgrad");
        let mut values = values.slice_mut(s![column..column + width, first / 2..(first + height) / 2]);
        for (values, transposed) in values.rows_mut().into_iter().zip(&transposed) {
            let values = values.into_slice().expect("values are row-major");
            put(values, &C::deliver::<U, { BLOCK_ROWS / 2 }>(*transposed), height / 2);
        }
        let bytes = height.div_ceil(8);
        let mut metadata = metadata.slice_mut(s![column..column + width, first / 8..first / 8 + bytes]);
        for (metadata, transposed) in metadata.rows_mut().into_iter().zip(&transposed_metadata) {
            put(metadata.into_slice().expect("metadata is row-major"), &transposed.to_le_bytes(), bytes);
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

/// Sixteen elements of a row whose elements are apart or too few; missing ones are left.
#[cold]
#[inline(never)]
fn gather<T: Element>(w: ArrayView2<'_, T>, [row, column]: [usize; 2], to: &mut [T; 16]) {
    to.iter_mut().zip(w.index_axis(Axis(0), row).iter().skip(column)).for_each(|(to, &from)| *to = from);
}

/// Fewer than four tiles.
#[cold]
#[inline(never)]
fn ragged_word(tiles: &[u16]) -> u64 {
    nibbles::word(tiles)
}

/// The kept of sixteen elements.
#[inline(always)]
fn pack<V: Vector, C: Carriage, T: Element, U: Element>(v: V, x: &[T; 16], kept: u64, tiles: u64, map: ValueMap) -> [U; 8] {
    let mut packed = [0.0; 16];
    for lane in (0..16).step_by(V::LANES) {
        let x = C::load(v, x, lane, tiles, map);
        v.store(v.pack_pairs(x, lanes::<V>(kept >> lane)), &mut packed[lane / 2..]);
    }
    C::deliver(*packed.first_chunk().expect("8 of 16"))
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
