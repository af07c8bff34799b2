//! Compression of a block of weights: along its rows as they stream by, and along its columns by way of a panel in a near cache.
//!
//! Rows are walked at the width of a block, so that what is read and what the forward output gets are long runs; the panel holds a whole
//! block, so that each row of dgrad gets whole cache lines. Invariant: a mask that was checked. Deliberately absent: which threads do
//! which rows.

use core::any::TypeId;

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use sparse24_core::{
    Element,
    group::Pattern,
    prune::{self, ValueMap},
};

use crate::{
    convert, nibbles,
    simd::{self, Kernel, Stores, Vector},
};

/// Rows of a block: its columns give two cache lines of f32 values, and whole words of metadata.
pub(super) const BLOCK_ROWS: usize = 256;

/// Columns of a block: few enough for its panel to stay in the second-level cache, many enough for its rows to stream.
const BLOCK_COLUMNS: usize = 512;

/// Rows and columns of a piece: whole vectors across two strips, and eight words of the mask along each.
const ROWS: usize = 8;
const COLUMNS: usize = 128;
const WORDS: usize = COLUMNS / 16;

/// Pieces before its turn that a piece is asked for.
const AHEAD: usize = 2;

/// Some rows of the weights, and where they go.
pub(super) struct Part<'a, T, U> {
    pub(super) w: ArrayView2<'a, T>,
    pub(super) tiles: &'a [u16],
    pub(super) map: ValueMap,
    pub(super) forward: (&'a mut [U], &'a mut [u8]),
    pub(super) dgrad: Option<(ArrayViewMut2<'a, U>, ArrayViewMut2<'a, u8>)>,
    /// Bytes that all parts write.
    pub(super) bytes: usize,
}

/// What sixteen columns of a block give to dgrad.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Panel {
    /// Of each two strips and each j the kept elements of the columns `4*tile + j`, as [`Vector::pack_pairs`] leaves them.
    values: [[[f32; 16]; 4]; BLOCK_ROWS / ROWS],
    /// Of each strip the transposed tiles.
    tiles: [[u64; 16]; BLOCK_ROWS / 64],
}

/// Some rows of a block on their way.
struct Staging<T, U> {
    /// Stands in for rows that are too short, apart or absent.
    x: [[T; COLUMNS]; ROWS],
    carried: [[f32; COLUMNS]; ROWS],
    /// What the forward output gets of them.
    values: [[U; BLOCK_COLUMNS / 2]; ROWS],
    metadata: [[u8; BLOCK_COLUMNS / 8]; ROWS],
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
    /// Whether an f32 travels as it is.
    const STORED: bool = true;
    /// Sixteen elements of a row; nibble `4*g` of `tiles` is the pattern of group g.
    fn carry<T: Element>(row: &[T; 16], tiles: u64, map: ValueMap, to: &mut [f32; 16]);
    fn deliver<U: Element>(lane: f32) -> U;
}

/// From a type to the same type: as bits, so that the payload of a NaN survives.
struct Bits;
/// By value.
struct Value;
/// By value, through [`prune::group`].
struct Mapped;

impl Carriage for Bits {
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], _: u64, _: ValueMap, to: &mut [f32; 16]) {
        to.iter_mut().zip(row).for_each(|(to, &x)| *to = convert::carry(x));
    }
    #[inline(always)]
    fn deliver<U: Element>(lane: f32) -> U {
        convert::deliver(lane)
    }
}

impl Carriage for Value {
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], _: u64, _: ValueMap, to: &mut [f32; 16]) {
        to.iter_mut().zip(row).for_each(|(to, &x)| *to = convert::widen(x));
    }
    #[inline(always)]
    fn deliver<U: Element>(lane: f32) -> U {
        convert::narrow(lane)
    }
}

impl Carriage for Mapped {
    const STORED: bool = false;
    #[inline(always)]
    fn carry<T: Element>(row: &[T; 16], tiles: u64, map: ValueMap, to: &mut [f32; 16]) {
        for (g, (to, x)) in to.as_chunks_mut().0.iter_mut().zip(row.as_chunks::<4>().0).enumerate() {
            if let Some(pattern) = Pattern::from_bits((tiles >> (16 * g)) as u8 & 0xf) {
                *to = prune::group([x[0].to_f32(), x[1].to_f32(), x[2].to_f32(), x[3].to_f32()], pattern, map);
            }
        }
    }
    #[inline(always)]
    fn deliver<U: Element>(lane: f32) -> U {
        convert::narrow(lane)
    }
}

impl<'a, T: Element, U: Element> Part<'a, T, U> {
    /// Its first rows, a multiple of 8, and the others.
    pub(super) fn split(self, rows: usize) -> (Self, Self) {
        let q = self.w.ncols();
        let (w, w_rest) = self.w.split_at(Axis(0), rows);
        let (tiles, tiles_rest) = self.tiles.split_at(rows / 4 * (q / 4));
        let (values, values_rest) = self.forward.0.split_at_mut(rows * (q / 2));
        let (metadata, metadata_rest) = self.forward.1.split_at_mut(rows * stride(q));
        let columns = |(values, metadata): (ArrayViewMut2<'a, U>, ArrayViewMut2<'a, u8>)| {
            (values.split_at(Axis(1), rows / 2), metadata.split_at(Axis(1), rows / 8))
        };
        let (dgrad, dgrad_rest) = self.dgrad.map(columns).map(|((a, b), (c, d))| ((a, c), (b, d))).unzip();
        (
            Self { w, tiles, forward: (values, metadata), dgrad, ..self },
            Self { w: w_rest, tiles: tiles_rest, forward: (values_rest, metadata_rest), dgrad: dgrad_rest, ..self },
        )
    }
}

impl<T: Element, U: Element> Part<'_, T, U> {
    #[inline(always)]
    fn blocks<V: Vector, C: Carriage>(&mut self, v: V) {
        let (rows, q) = self.w.dim();
        let stores = Stores::new(v, self.bytes);
        let mut panels = vec![Panel { values: [[[0.0; 16]; 4]; BLOCK_ROWS / ROWS], tiles: [[0; 16]; BLOCK_ROWS / 64] }; BLOCK_COLUMNS / 16];
        let mut staging = Staging {
            x: [[T::default(); COLUMNS]; ROWS],
            carried: [[0.0; COLUMNS]; ROWS],
            values: [[U::default(); BLOCK_COLUMNS / 2]; ROWS],
            metadata: [[0; BLOCK_COLUMNS / 8]; ROWS],
        };
        for first in (0..rows).step_by(BLOCK_ROWS) {
            for column in (0..q).step_by(BLOCK_COLUMNS) {
                let [height, width] = [BLOCK_ROWS.min(rows - first), BLOCK_COLUMNS.min(q - column)];
                for row in (0..height).step_by(ROWS) {
                    for at in (0..width).step_by(COLUMNS) {
                        self.piece::<V, C>(v, [first + row, column + at], [row, at], &mut panels, &mut staging);
                    }
                    self.rows(&stores, [first + row, column], width, &staging);
                }
                if self.dgrad.is_some() {
                    for (panel, at) in panels.iter().zip((0..width).step_by(16)) {
                        self.columns::<V, C>(&stores, [first, column + at], [height, 16.min(width - at)], panel);
                    }
                }
            }
        }
    }

    /// Compresses at most 8 rows of at most 128 columns along their rows, and leaves in panels what they give to dgrad; `at` is their place
    /// in the block.
    #[inline(always)]
    fn piece<V: Vector, C: Carriage>(
        &self,
        v: V,
        [row, column]: [usize; 2],
        at: [usize; 2],
        panels: &mut [Panel],
        staging: &mut Staging<T, U>,
    ) {
        let (w, map, q) = (self.w, self.map, self.w.ncols());
        let [height, width] = [ROWS.min(w.nrows() - row), COLUMNS.min(q - column)];
        let (pair, panels) = (at[0] / ROWS, &mut panels[at[1] / 16..]);
        let mut words = [[0; WORDS]; 2];
        for (strip, words) in words.iter_mut().enumerate().take(height / 4) {
            let tiles = &self.tiles[(row / 4 + strip) * (q / 4) + column / 4..][..width / 4];
            match tiles.first_chunk::<{ 4 * WORDS }>() {
                Some(tiles) => words.iter_mut().zip(tiles.as_chunks::<4>().0).for_each(|(word, tiles)| *word = nibbles::word(tiles)),
                None => words.iter_mut().zip(tiles.chunks(4)).for_each(|(word, tiles)| *word = ragged_word(tiles)),
            }
        }
        let rows = each(&words, nibbles::rows);
        let patterns = each(&rows, nibbles::metadata);
        let tiles = each(&words, nibbles::transpose_tiles);
        let columns = quarters(&each(&tiles, nibbles::rows));
        let (rows, patterns) = (quarters(&rows), quarters(&patterns));

        let stored = |i: usize| match i < height {
            true => w.index_axis_move(Axis(0), row + i).to_slice()?[column..].first_chunk(),
            false => None,
        };
        for (i, to) in staging.x.iter_mut().enumerate().take(height) {
            if stored(i).is_none() {
                gather(w, [row + i, column], to);
            }
        }
        let mut x = [&[0.0; COLUMNS]; ROWS];
        for (i, (x, carried)) in x.iter_mut().zip(&mut staging.carried).enumerate() {
            *x = carry::<C, T>(stored(i).unwrap_or(&staging.x[i]), &words[i / 4], 4 * (i % 4), map, carried);
        }
        for (i, (values, metadata)) in staging.values.iter_mut().zip(&mut staging.metadata).enumerate() {
            let values = values[at[1] / 2..].first_chunk_mut::<{ COLUMNS / 2 }>().expect("a block is whole pieces");
            let metadata = metadata[at[1] / 8..].first_chunk_mut::<{ COLUMNS / 8 }>().expect("a block is whole pieces");
            for (at, to) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let mut packed = [0.0; 16];
                for lane in (0..32).step_by(2 * V::LANES) {
                    let [low, high] = [32 * at + lane, 32 * at + lane + V::LANES];
                    let kept = [lanes::<V>(rows[i / 4][low / 16][i % 4], low), lanes::<V>(rows[i / 4][high / 16][i % 4], high)];
                    v.store(v.pack_pairs([v.load(&x[i][low..]), v.load(&x[i][high..])], kept), &mut packed[lane / 2..]);
                }
                deliver::<C, U, 16>(&packed, to);
            }
            for (to, patterns) in metadata.as_chunks_mut().0.iter_mut().zip(&patterns[i / 4]) {
                *to = patterns[i % 4].to_le_bytes();
            }
        }
        let ahead = ahead(at[1], w.strides()[0]);
        for (at, panel) in panels.iter_mut().enumerate().take(WORDS) {
            for x in (0..ROWS).filter_map(stored) {
                simd::prefetch(&x[16 * at..], ahead);
            }
            panel.tiles.as_flattened_mut()[2 * pair..][..2].copy_from_slice(&[tiles[0][at], tiles[1][at]]);
            for lane in (0..16).step_by(V::LANES) {
                let mut strips = [[v.splat(0.0); 4]; 2];
                for (x, strip) in x.iter().zip(strips.as_flattened_mut()) {
                    *strip = v.load(&x[16 * at + lane..]);
                }
                let [upper, lower] = [v.transpose_tiles(strips[0]), v.transpose_tiles(strips[1])];
                for j in 0..4 {
                    let kept = [lanes::<V>(columns[0][at][j], lane), lanes::<V>(columns[1][at][j], lane)];
                    v.store(v.pack_pairs([upper[j], lower[j]], kept), &mut panel.values[pair][j][lane..]);
                }
            }
        }
    }

    /// Writes the forward values and metadata of at most 8 rows at the width of the block.
    #[inline(always)]
    fn rows<V: Vector>(&mut self, stores: &Stores<V>, [row, column]: [usize; 2], width: usize, staging: &Staging<T, U>) {
        let (q, (values, metadata)) = (self.w.ncols(), &mut self.forward);
        for (i, row) in (row..self.w.nrows().min(row + ROWS)).enumerate() {
            stores.write(&staging.values[i][..width / 2], &mut values[row * (q / 2) + column / 2..][..width / 2]);
            let to = &mut metadata[row * stride(q) + column / 8..][..width.div_ceil(8)];
            to.copy_from_slice(&staging.metadata[i][..width.div_ceil(8)]);
            if width % 8 != 0 {
                to[width / 8] &= 0xf;
            }
        }
    }

    /// Compresses at most 16 columns of a block from their panel.
    #[inline(always)]
    fn columns<V: Vector, C: Carriage>(&mut self, stores: &Stores<V>, [first, column]: [usize; 2], [height, width]: [usize; 2], panel: &Panel) {
        let Some((values, metadata)) = &mut self.dgrad else { return };
        let v = stores.vector();
        let mut patterns = [[[0; 8]; BLOCK_ROWS / 64]; 16];
        for (at, tiles) in panel.tiles.iter().enumerate() {
            let columns = nibbles::transpose(*tiles);
            for (patterns, kept) in patterns.iter_mut().zip(columns) {
                let absent = (64 * (at + 1)).saturating_sub(height).min(63);
                patterns[at] = (nibbles::metadata(kept) & (u64::MAX >> absent)).to_le_bytes();
            }
        }
        for (i, patterns) in patterns.iter().enumerate().take(width) {
            let mut to = metadata.index_axis_mut(Axis(0), column + i);
            copy(
                patterns.as_flattened().first_chunk::<{ BLOCK_ROWS / 8 }>().expect("as many"),
                &mut to.as_slice_mut().expect("metadata is row-major")[first / 8..],
                height.div_ceil(8),
            );
        }
        for j in 0..4 {
            let mut packed = [[0.0; BLOCK_ROWS / 2]; 4];
            for lane in (0..16).step_by(V::LANES) {
                for pair in (0..BLOCK_ROWS / ROWS).step_by(V::LANES / 4) {
                    let mut x = [v.splat(0.0); 4];
                    for (x, from) in x.iter_mut().zip(&panel.values[pair..]).take(V::LANES / 4) {
                        *x = v.load(&from[j][lane..]);
                    }
                    for (x, to) in v.transpose_pairs(x).into_iter().zip(&mut packed[lane / 4..]).take(V::LANES / 4) {
                        v.store(x, &mut to[4 * pair..]);
                    }
                }
            }
            for (i, packed) in (j..width).step_by(4).zip(&packed) {
                let mut to = values.index_axis_mut(Axis(0), column + i);
                let to = &mut to.as_slice_mut().expect("values are row-major")[first / 2..];
                let mut line = [U::default(); BLOCK_ROWS / 2];
                deliver::<C, U, _>(packed, &mut line);
                stores.write(&line[..height / 2], &mut to[..height / 2]);
            }
        }
    }
}

/// Bytes of metadata in a row of q columns.
fn stride(q: usize) -> usize {
    (q / 4).div_ceil(2)
}

/// Elements between a piece at column `at` of its block and the one that follows [`AHEAD`] later.
#[inline(always)]
fn ahead(at: usize, stride: isize) -> usize {
    let (rows, column) = ((at + AHEAD * COLUMNS) / BLOCK_COLUMNS * ROWS, (at + AHEAD * COLUMNS) % BLOCK_COLUMNS);
    (stride as usize).wrapping_mul(rows).wrapping_add(column).wrapping_sub(at)
}

/// Elements of a row whose elements are apart or too few; missing ones are left.
#[cold]
#[inline(never)]
fn gather<T: Element>(w: ArrayView2<'_, T>, [row, column]: [usize; 2], to: &mut [T]) {
    to.iter_mut().zip(w.index_axis(Axis(0), row).iter().skip(column)).for_each(|(to, &from)| *to = from);
}

/// At most four tiles.
#[cold]
#[inline(never)]
fn ragged_word(tiles: &[u16]) -> u64 {
    nibbles::word(tiles)
}

/// Elements of a row as they travel, themselves if they can; the pattern of group g is nibble `16*g + at` of `words`.
#[inline(always)]
fn carry<'a, C: Carriage, T: Element>(
    x: &'a [T; COLUMNS],
    words: &[u64; WORDS],
    at: usize,
    map: ValueMap,
    spare: &'a mut [f32; COLUMNS],
) -> &'a [f32; COLUMNS] {
    match T::as_f32s(x).and_then(<[f32]>::first_chunk) {
        Some(stored) if C::STORED => stored,
        _ => {
            for ((x, to), word) in x.as_chunks().0.iter().zip(spare.as_chunks_mut().0).zip(words) {
                C::carry(x, word >> at, map, to);
            }
            spare
        }
    }
}

/// `f` of each word; a loop, so that it is compiled with the instructions of the kernel around it.
#[inline(always)]
fn each(words: &[[u64; WORDS]; 2], f: impl Fn(u64) -> u64) -> [[u64; WORDS]; 2] {
    let mut out = *words;
    for word in out.as_flattened_mut() {
        *word = f(*word);
    }
    out
}

/// The four 16-bit parts of each word.
#[inline(always)]
fn quarters(words: &[[u64; WORDS]; 2]) -> [[[u16; 4]; WORDS]; 2] {
    let mut out = [[[0; 4]; WORDS]; 2];
    for (out, word) in out.as_flattened_mut().iter_mut().zip(words.as_flattened()) {
        *out = [*word as u16, (word >> 16) as u16, (word >> 32) as u16, (word >> 48) as u16];
    }
    out
}

/// The bits of the `LANES` lanes from `lane % 16` on.
#[inline(always)]
fn lanes<V: Vector>(kept: u16, lane: usize) -> u32 {
    u32::from(kept) >> (lane % 16) & ((1 << V::LANES) - 1)
}

/// Delivers all lanes.
#[inline(always)]
fn deliver<C: Carriage, U: Element, const N: usize>(lanes: &[f32; N], to: &mut [U; N]) {
    for i in 0..N {
        to[i] = C::deliver(lanes[i]);
    }
}

/// Copies the first `length`.
#[inline(always)]
fn copy<E: Copy, const N: usize>(from: &[E; N], to: &mut [E], length: usize) {
    match to.first_chunk_mut::<N>() {
        Some(to) if length == N => *to = *from,
        _ => to[..length].copy_from_slice(&from[..length]),
    }
}
