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
pub(super) const BLOCK_ROWS: usize = match option_env!("BR") { Some(x) => parse(x), None => 128 };
const fn parse(x: &str) -> usize { let b = x.as_bytes(); let mut i = 0; let mut n = 0; while i < b.len() { n = 10 * n + (b[i] - 48) as usize; i += 1; } n }

/// Columns of a block: few enough for its panel to stay in the second-level cache, many enough for its rows to stream.
const BLOCK_COLUMNS: usize = match option_env!("BC") { Some(x) => parse(x), None => 512 };

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

/// A word a column; the length is no power of two, so that words of a column do not share a set of a cache.
type Words = [u32; BLOCK_COLUMNS + 16];

/// What a block gives to dgrad.
struct Panel {
    /// Of each strip the two kept elements of each column: as bits, in one word or in two.
    words: Vec<Words>,
    /// Of each strip the transposed tiles, four a word.
    tiles: Vec<[u64; BLOCK_COLUMNS / 16]>,
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
    /// The bits of what is delivered.
    #[inline(always)]
    fn word<U: Element>(lane: f32) -> u32 {
        convert::carry(Self::deliver::<U>(lane)).to_bits()
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
        let words = vec![[0; BLOCK_COLUMNS + 16]; BLOCK_ROWS / 2];
        let mut panel = Panel { words, tiles: vec![[0; BLOCK_COLUMNS / 16]; BLOCK_ROWS / 4] };
        let mut lines = [[0; BLOCK_ROWS / 2]; 16];
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
                        self.piece::<V, C>(v, [first + row, column + at], [row, at], &mut panel, &mut staging);
                    }
                    self.rows(&stores, [first + row, column], width, &staging);
                }
                if self.dgrad.is_some() {
                    for at in (0..width).step_by(COLUMNS) {
                        self.column_metadata([first, column + at], [height, COLUMNS.min(width - at)], &panel.tiles, at / 16);
                    }
                    for at in (0..width).step_by(16) {
                        self.columns(&stores, [first, column + at], [height, 16.min(width - at)], &panel.words, at, &mut lines);
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
        panel: &mut Panel,
        staging: &mut Staging<T, U>,
    ) {
        let (w, map, q) = (self.w, self.map, self.w.ncols());
        let [height, width] = [ROWS.min(w.nrows() - row), COLUMNS.min(q - column)];
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
        let (rows, patterns) = (quarters(&rows), quarters(&patterns));

        let mut stored = [None; ROWS];
        for (i, (stored, to)) in stored.iter_mut().zip(&mut staging.x).enumerate().take(height) {
            *stored = w.index_axis_move(Axis(0), row + i).to_slice().and_then(|row| row[column..].first_chunk());
            if stored.is_none() {
                gather(w, [row + i, column], to);
            }
        }
        let mut x = [&[0.0; COLUMNS]; ROWS];
        for (i, (x, carried)) in x.iter_mut().zip(&mut staging.carried).enumerate() {
            *x = carry::<C, T>(stored[i].unwrap_or(&staging.x[i]), &words[i / 4], 4 * (i % 4), map, carried);
        }
        for (metadata, patterns) in staging.metadata.iter_mut().zip(patterns.as_flattened()) {
            let metadata = metadata[at[1] / 8..].first_chunk_mut::<{ COLUMNS / 8 }>().expect("a block is whole pieces");
            metadata.as_chunks_mut().0.iter_mut().zip(patterns).for_each(|(to, patterns)| *to = patterns.to_le_bytes());
        }
        let ahead = ahead(at[1], w.strides()[0]);
        let (strips, _) = x.as_chunks::<4>();
        for (strip, x) in strips.iter().enumerate() {
            for x in stored[4 * strip..4 * strip + 4].iter().flatten() {
                for line in (0..COLUMNS).step_by(64 / size_of::<T>()) {
                    simd::prefetch(&x[line..], ahead);
                }
            }
            for lane in (0..COLUMNS).step_by(2 * V::LANES) {
                let mut both = [[v.splat(0.0); 2]; 4];
                for (i, (both, x)) in both.iter_mut().zip(x).enumerate() {
                    *both = [v.load(&x[lane..]), v.load(&x[lane + V::LANES..])];
                    let patterns = nibbles_at::<V>(&patterns[strip][i], lane);
                    let mut packed = [0.0; 16];
                    v.store(v.pack_pairs(*both, patterns), &mut packed);
                    let values = &mut staging.values[4 * strip + i][(at[1] + lane) / 2..][..V::LANES];
                    values.iter_mut().zip(packed).for_each(|(to, lane)| *to = C::deliver(lane));
                }
                for half in 0..2 {
                    let lane = lane + half * V::LANES;
                    let [x0, x1, x2, x3] = [both[0][half], both[1][half], both[2][half], both[3][half]];
                    let kept = |i: usize| v.chosen(lanes::<V>(rows[strip][i][lane / 16], lane));
                    let upper = v.select(kept(0), x0, v.select(kept(1), x1, x2));
                    let lower = v.select(kept(3), x3, v.select(kept(2), x2, x1));
                    store_pair::<V, C, U>(v, [upper, lower], &mut panel.words, at[0] / 4 + strip, at[1] + lane);
                }
            }
        }
        for (to, tiles) in panel.tiles[at[0] / 4..].iter_mut().zip(&tiles) {
            to[at[1] / 16..][..WORDS].copy_from_slice(tiles);
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

    /// Writes the dgrad metadata of at most 128 columns of a block.
    #[inline(always)]
    fn column_metadata(&mut self, [first, column]: [usize; 2], [height, width]: [usize; 2], tiles: &[[u64; BLOCK_COLUMNS / 16]], at: usize) {
        let Some((_, metadata)) = &mut self.dgrad else { return };
        let mut bytes = [[[0; 8]; BLOCK_ROWS / 64]; COLUMNS];
        for (part, tiles) in tiles.as_chunks::<16>().0.iter().enumerate().take(height.div_ceil(64)) {
            let mut words = [[0; WORDS]; 16];
            words.iter_mut().zip(tiles).for_each(|(words, tiles)| words.copy_from_slice(&tiles[at..][..WORDS]));
            nibbles::transpose(&mut words);
            let absent = (64 * (part + 1)).saturating_sub(height);
            for (i, words) in words.iter().enumerate() {
                for (at, &kept) in words.iter().enumerate() {
                    bytes[16 * at + i][part] = (nibbles::metadata(kept) & (u64::MAX >> absent)).to_le_bytes();
                }
            }
        }
        for (i, bytes) in bytes.iter().enumerate().take(width) {
            let mut to = metadata.index_axis_mut(Axis(0), column + i);
            let bytes = bytes.as_flattened().first_chunk::<{ BLOCK_ROWS / 8 }>().expect("as many");
            copy(bytes, &mut to.as_slice_mut().expect("metadata is row-major")[first / 8..], height.div_ceil(8));
        }
    }

    /// Writes the dgrad values of at most 16 columns of a block.
    #[inline(always)]
    fn columns<V: Vector>(
        &mut self,
        stores: &Stores<V>,
        [first, column]: [usize; 2],
        [height, width]: [usize; 2],
        words: &[Words],
        place: usize,
        lines: &mut [[u32; BLOCK_ROWS / 2]; 16],
    ) {
        let Some((values, _)) = &mut self.dgrad else { return };
        let v = stores.vector();
        for at in (0..height / 2 / convert::elements_a_word::<U>()).step_by(V::LANES) {
            for lane in (0..16).step_by(V::LANES) {
                let mut square = [v.splat_u(0); 16];
                for (row, words) in square.iter_mut().zip(&words[at..]).take(V::LANES) {
                    *row = v.load_u(&words[place + lane..]);
                }
                v.transpose(&mut square);
                for (&row, line) in square.iter().zip(&mut lines[lane..]).take(V::LANES) {
                    v.store_u(row, &mut line[at..]);
                }
            }
        }
        for (i, line) in lines.iter().enumerate().take(width) {
            let mut to = values.index_axis_mut(Axis(0), column + i);
            stores.write_words(line, &mut to.as_slice_mut().expect("values are row-major")[first / 2..][..height / 2]);
        }
    }
}

/// The kept elements of a strip's columns, from `column` of the block on.
#[inline(always)]
fn store_pair<V: Vector, C: Carriage, U: Element>(v: V, pair: [V::F; 2], words: &mut [Words], strip: usize, column: usize) {
    if convert::is::<U, f32>() {
        v.store_u(v.bits(pair[0]), &mut words[2 * strip][column..]);
        return v.store_u(v.bits(pair[1]), &mut words[2 * strip + 1][column..]);
    }
    let mut lanes = [[0.0; 16]; 2];
    v.store(pair[0], &mut lanes[0]);
    v.store(pair[1], &mut lanes[1]);
    for i in 0..V::LANES {
        let [upper, lower] = [C::word::<U>(lanes[0][i]), C::word::<U>(lanes[1][i])];
        if convert::elements_a_word::<U>() == 2 {
            words[strip][column + i] = upper | lower << 16;
        } else {
            (words[2 * strip][column + i], words[2 * strip + 1][column + i]) = (upper, lower);
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

/// The four 16-bit parts of each word, those of one row side by side.
#[inline(always)]
fn quarters(words: &[[u64; WORDS]; 2]) -> [[[u16; WORDS]; 4]; 2] {
    let mut out = [[[0; WORDS]; 4]; 2];
    for (out, words) in out.iter_mut().zip(words) {
        for (i, out) in out.iter_mut().enumerate() {
            out.iter_mut().zip(words).for_each(|(out, word)| *out = (word >> (16 * i)) as u16);
        }
    }
    out
}

/// The nibbles of the groups of two vectors from `lane` on.
#[inline(always)]
fn nibbles_at<V: Vector>(patterns: &[u16; WORDS], lane: usize) -> u32 {
    match V::LANES {
        16 => u32::from(patterns[lane / 16]) | u32::from(patterns[lane / 16 + 1]) << 16,
        _ => u32::from(patterns[lane / 16]) >> (lane % 16),
    }
}

/// The bits of the `LANES` lanes from `lane % 16` on.
#[inline(always)]
fn lanes<V: Vector>(kept: u16, lane: usize) -> u32 {
    u32::from(kept) >> (lane % 16) & ((1 << V::LANES) - 1)
}

/// Copies the first `length`.
#[inline(always)]
fn copy<E: Copy, const N: usize>(from: &[E; N], to: &mut [E], length: usize) {
    match to.first_chunk_mut::<N>() {
        Some(to) if length == N => *to = *from,
        _ => to[..length].copy_from_slice(&from[..length]),
    }
}
