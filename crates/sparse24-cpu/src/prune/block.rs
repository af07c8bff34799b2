//! Compression of a block of weights: along its rows as they stream by, and along its columns by
//! way of a panel in a near cache.
//!
//! Rows are walked at the width of a block, so that what is read and what the forward output gets
//! are long runs; the panel holds a whole block, so that each row of dgrad gets whole cache lines.
//! Invariant: a mask that was checked. Deliberately absent: which threads do which rows.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use sparse24_core::{Element, prune::ValueMap};

use super::carriage::{Bits, Carriage, Mapped, Value};
use crate::{
    convert, nibbles,
    simd::{self, Kernel, Stores, Vector},
};

/// Words that a block gives to a column of dgrad: four cache lines, as shorter runs are written at
/// a fraction of the speed.
const BLOCK_WORDS: usize = 64;

/// Most rows of a block: a word is the kept pair of a strip, or one of the two.
const BLOCK_ROWS: usize = 4 * BLOCK_WORDS;

/// Columns of a block: few enough for its panel to stay in the second-level cache, many enough for
/// its rows to stream.
const BLOCK_COLUMNS: usize = 512;

/// Rows and columns of a piece: whole vectors across two strips, and eight words of the mask along
/// each.
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

/// Rows and columns that are compressed together; none of them by default.
#[derive(Clone, Copy, Default)]
struct Block {
    at: [usize; 2],
    size: [usize; 2],
}

/// A word a column; the length is no power of two, so that words of a column do not share a set of
/// a cache.
type Words = [u32; BLOCK_COLUMNS + 16];

/// What blocks give to dgrad, of one that is being compressed and of the one before it.
pub(super) struct Panels([Panel; 2]);

impl Panels {
    pub(super) fn new() -> Self {
        Self([(); 2].map(|()| Panel {
            words: vec![[0; BLOCK_COLUMNS + 16]; BLOCK_WORDS],
            tiles: vec![[0; BLOCK_COLUMNS / 16]; BLOCK_ROWS / 4],
        }))
    }
}

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

impl<T: Element, U: Element> Kernel for (&mut Part<'_, T, U>, &mut Panels) {
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let (part, panels) = self;
        match (part.map, convert::is::<T, U>()) {
            (ValueMap::Identity, true) => part.blocks::<V, Bits>(v, panels),
            (ValueMap::Identity, false) => part.blocks::<V, Value>(v, panels),
            (ValueMap::SoftThreshold { .. }, _) => part.blocks::<V, Mapped>(v, panels),
        }
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
        let (dgrad, dgrad_rest) =
            self.dgrad.map(columns).map(|((a, b), (c, d))| ((a, c), (b, d))).unzip();
        (
            Self { w, tiles, forward: (values, metadata), dgrad, ..self },
            Self {
                w: w_rest,
                tiles: tiles_rest,
                forward: (values_rest, metadata_rest),
                dgrad: dgrad_rest,
                ..self
            },
        )
    }
}

impl<T: Element, U: Element> Part<'_, T, U> {
    /// The columns of a block are written while the next one is compressed, so that neither memory
    /// nor arithmetic waits for the other.
    #[inline(always)]
    fn blocks<V: Vector, C: Carriage>(&mut self, v: V, Panels([filled, panel]): &mut Panels) {
        let (rows, q) = self.w.dim();
        let stores = Stores::new(v, self.bytes);
        let mut lines = [[0; BLOCK_WORDS]; 16];
        let mut staging = Staging {
            x: [[T::default(); COLUMNS]; ROWS],
            carried: [[0.0; COLUMNS]; ROWS],
            values: [[U::default(); BLOCK_COLUMNS / 2]; ROWS],
            metadata: [[0; BLOCK_COLUMNS / 8]; ROWS],
        };
        let height = 2 * BLOCK_WORDS * convert::elements_a_word::<U>();
        let blocks = (0..rows)
            .step_by(height)
            .flat_map(|row| (0..q).step_by(BLOCK_COLUMNS).map(move |column| [row, column]));
        let blocks = blocks
            .map(|at| Block { at, size: [height.min(rows - at[0]), BLOCK_COLUMNS.min(q - at[1])] });
        let mut before = Block::default();
        for block in blocks.chain([Block::default()]) {
            let across = block.size[1].div_ceil(COLUMNS);
            let pieces = block.size[0].div_ceil(ROWS) * across;
            let sixteens = if self.dgrad.is_some() { before.size[1].div_ceil(16) } else { 0 };
            let mut written = 0;
            for piece in 0..pieces.max(1) {
                if piece < pieces {
                    let [row, column] = [piece / across * ROWS, piece % across * COLUMNS];
                    self.piece::<V, C>(v, block, [row, column], panel, &mut staging);
                    if column + COLUMNS >= block.size[1] {
                        self.rows(&stores, block, row, &staging);
                    }
                }
                while written * pieces.max(1) < (piece + 1) * sixteens {
                    self.columns(&stores, before, 16 * written, filled, &mut lines);
                    written += 1;
                }
            }
            core::mem::swap(filled, panel);
            before = block;
        }
    }

    /// Compresses at most 8 rows of at most 128 columns, `at` in the block, along their rows, and
    /// leaves in the panel what they give to dgrad.
    #[inline(always)]
    fn piece<V: Vector, C: Carriage>(
        &self,
        v: V,
        block: Block,
        at: [usize; 2],
        panel: &mut Panel,
        staging: &mut Staging<T, U>,
    ) {
        let (w, map, q) = (self.w, self.map, self.w.ncols());
        let [row, column] = [block.at[0] + at[0], block.at[1] + at[1]];
        let [height, width] = [ROWS.min(w.nrows() - row), COLUMNS.min(q - column)];
        let mut words = [[0; WORDS]; 2];
        for (strip, words) in words.iter_mut().enumerate().take(height / 4) {
            let tiles = &self.tiles[(row / 4 + strip) * (q / 4) + column / 4..][..width / 4];
            simd::prefetch(tiles, ahead(at[1], (q / 4) as isize) / 4);
            match tiles.first_chunk::<{ 4 * WORDS }>() {
                Some(tiles) => words
                    .iter_mut()
                    .zip(tiles.as_chunks::<4>().0)
                    .for_each(|(word, tiles)| *word = nibbles::word(tiles)),
                None => words
                    .iter_mut()
                    .zip(tiles.chunks(4))
                    .for_each(|(word, tiles)| *word = ragged_word(tiles)),
            }
        }
        let rows = each(&words, nibbles::rows);
        let patterns = each(&rows, nibbles::metadata);
        let tiles = each(&words, nibbles::transpose_tiles);
        let (rows, patterns) = (quarters(&rows), quarters(&patterns));

        let mut stored = [None; ROWS];
        for (i, (stored, to)) in stored.iter_mut().zip(&mut staging.x).enumerate().take(height) {
            *stored = w
                .index_axis_move(Axis(0), row + i)
                .to_slice()
                .and_then(|row| row[column..].first_chunk());
            if stored.is_none() {
                gather(w, [row + i, column], to);
            }
        }
        let mut stored =
            stored.into_iter().zip(&staging.x).map(|(stored, spare)| stored.unwrap_or(spare));
        let stored: [_; ROWS] = core::array::from_fn(|_| stored.next().expect("as many"));
        let mut x = [&[0.0; COLUMNS]; ROWS];
        for (i, (x, carried)) in x.iter_mut().zip(&mut staging.carried).enumerate() {
            *x = carry::<C, T>(stored[i], &words[i / 4], 4 * (i % 4), map, carried);
        }
        for (metadata, patterns) in staging.metadata.iter_mut().zip(patterns.as_flattened()) {
            let metadata = metadata[at[1] / 8..]
                .first_chunk_mut::<{ COLUMNS / 8 }>()
                .expect("a block is whole pieces");
            metadata
                .as_chunks_mut()
                .0
                .iter_mut()
                .zip(patterns)
                .for_each(|(to, patterns)| *to = patterns.to_le_bytes());
        }
        let ahead = ahead(at[1], w.strides()[0]);
        let (strips, _) = x.as_chunks::<4>();
        for (strip, x) in strips.iter().enumerate() {
            for lane in (0..COLUMNS).step_by(2 * V::LANES) {
                let mut both = [[v.splat(0.0); 2]; 4];
                for (i, (both, x)) in both.iter_mut().zip(x).enumerate() {
                    *both = [v.load(&x[lane..]), v.load(&x[lane + V::LANES..])];
                    for line in (lane..lane + 2 * V::LANES).step_by(64 / size_of::<T>()) {
                        simd::prefetch(&stored[4 * strip + i][line..], ahead);
                    }
                    let patterns = nibbles_at::<V>(&patterns[strip][i], lane);
                    let mut packed = [0.0; 16];
                    v.store(v.pack_pairs(*both, patterns), &mut packed);
                    let values =
                        &mut staging.values[4 * strip + i][(at[1] + lane) / 2..][..V::LANES];
                    values.iter_mut().zip(packed).for_each(|(to, lane)| *to = C::deliver(lane));
                }
                for half in [0, 1] {
                    let lane = lane + half * V::LANES;
                    let [x0, x1, x2, x3] =
                        [both[0][half], both[1][half], both[2][half], both[3][half]];
                    let kept = |i: usize| v.chosen(lanes::<V>(rows[strip][i][lane / 16], lane));
                    let upper = v.select(kept(0), x0, v.select(kept(1), x1, x2));
                    let lower = v.select(kept(3), x3, v.select(kept(2), x2, x1));
                    store_pair::<V, C, U>(
                        v,
                        [upper, lower],
                        &mut panel.words,
                        at[0] / 4 + strip,
                        at[1] + lane,
                    );
                }
            }
        }
        for (to, tiles) in panel.tiles[at[0] / 4..].iter_mut().zip(&tiles) {
            to[at[1] / 16..][..WORDS].copy_from_slice(tiles);
        }
    }

    /// Writes the forward values and metadata of at most 8 rows of a block, from its row `at` on.
    #[inline(always)]
    fn rows<V: Vector>(
        &mut self,
        stores: &Stores<V>,
        block: Block,
        at: usize,
        staging: &Staging<T, U>,
    ) {
        let (q, (values, metadata)) = (self.w.ncols(), &mut self.forward);
        let ([first, column], [height, width]) = (block.at, block.size);
        for (i, row) in (first + at..first + height.min(at + ROWS)).enumerate() {
            stores.write(
                &staging.values[i][..width / 2],
                &mut values[row * (q / 2) + column / 2..][..width / 2],
            );
            let to = &mut metadata[row * stride(q) + column / 8..][..width.div_ceil(8)];
            to.copy_from_slice(&staging.metadata[i][..width.div_ceil(8)]);
            if width % 8 != 0 {
                to[width / 8] &= 0xf;
            }
        }
    }

    /// Writes the dgrad values of at most 16 columns of a block, from its column `at` on, and of as
    /// many as a piece has their metadata.
    #[inline(always)]
    fn columns<V: Vector>(
        &mut self,
        stores: &Stores<V>,
        block: Block,
        at: usize,
        panel: &Panel,
        lines: &mut [[u32; BLOCK_WORDS]; 16],
    ) {
        let Some((values, metadata)) = &mut self.dgrad else { return };
        let ([first, column], [height, width]) = (block.at, block.size);
        if at.is_multiple_of(COLUMNS) {
            for (i, bytes) in
                column_metadata(height, &panel.tiles, at).iter().enumerate().take(width - at)
            {
                let mut to = metadata.index_axis_mut(Axis(0), column + at + i);
                let to = &mut to.as_slice_mut().expect("metadata is row-major")[first / 8..]
                    [..height.div_ceil(8)];
                to.chunks_mut(8).zip(bytes).for_each(|(to, bytes)| copy(bytes, to));
            }
        }
        let v = stores.vector();
        for word in (0..height / 2 / convert::elements_a_word::<U>()).step_by(V::LANES) {
            for lane in (0..16).step_by(V::LANES) {
                let mut square = [v.splat_u(0); 16];
                for (row, words) in square.iter_mut().zip(&panel.words[word..]).take(V::LANES) {
                    *row = v.load_u(&words[at + lane..]);
                }
                v.transpose(&mut square);
                for (&row, line) in square.iter().zip(&mut lines[lane..]).take(V::LANES) {
                    v.store_u(row, &mut line[word..]);
                }
            }
        }
        for (i, line) in lines.iter().enumerate().take(width - at) {
            let mut to = values.index_axis_mut(Axis(0), column + at + i);
            stores.write_words(
                line,
                &mut to.as_slice_mut().expect("values are row-major")[first / 2..][..height / 2],
            );
        }
    }
}

/// The metadata of the columns of a piece, from column `at` of a block on: a word for 64 rows.
#[inline(always)]
fn column_metadata(
    height: usize,
    tiles: &[[u64; BLOCK_COLUMNS / 16]],
    at: usize,
) -> [[[u8; 8]; BLOCK_ROWS / 64]; COLUMNS] {
    let mut bytes = [[[0; 8]; BLOCK_ROWS / 64]; COLUMNS];
    for (part, tiles) in tiles.as_chunks::<16>().0.iter().enumerate().take(height.div_ceil(64)) {
        let mut words = [[0; WORDS]; 16];
        words
            .iter_mut()
            .zip(tiles)
            .for_each(|(words, tiles)| words.copy_from_slice(&tiles[at / 16..][..WORDS]));
        nibbles::transpose(&mut words);
        let absent = (64 * (part + 1)).saturating_sub(height);
        for (i, words) in words.iter().enumerate() {
            for (at, &kept) in words.iter().enumerate() {
                bytes[16 * at + i][part] =
                    (nibbles::metadata(kept) & (u64::MAX >> absent)).to_le_bytes();
            }
        }
    }
    bytes
}

/// The kept elements of a strip's columns, from `column` of the block on.
#[inline(always)]
fn store_pair<V: Vector, C: Carriage, U: Element>(
    v: V,
    pair: [V::F; 2],
    words: &mut [Words],
    strip: usize,
    column: usize,
) {
    if convert::is::<U, f32>() {
        v.store_u(v.bits(pair[0]), &mut words[2 * strip][column..]);
        return v.store_u(v.bits(pair[1]), &mut words[2 * strip + 1][column..]);
    }
    let mut lanes = [[0.0; 16]; 2];
    v.store(pair[0], &mut lanes[0]);
    v.store(pair[1], &mut lanes[1]);
    let mut bits = [[0; 16]; 2];
    for i in 0..V::LANES {
        let [upper, lower] = [C::word::<U>(lanes[0][i]), C::word::<U>(lanes[1][i])];
        (bits[0][i], bits[1][i]) = if convert::elements_a_word::<U>() == 2 {
            (upper | lower << 16, 0)
        } else {
            (upper, lower)
        };
    }
    let each = convert::elements_a_word::<U>();
    for (bits, words) in bits.iter().zip(&mut words[2 / each * strip..]).take(2 / each) {
        v.store_u(v.load_u(bits), &mut words[column..]);
    }
}

/// Bytes of metadata in a row of q columns.
fn stride(q: usize) -> usize {
    (q / 4).div_ceil(2)
}

/// Elements between a piece at column `at` of its block and the one that follows [`AHEAD`] later.
#[inline(always)]
fn ahead(at: usize, stride: isize) -> usize {
    let (rows, column) =
        ((at + AHEAD * COLUMNS) / BLOCK_COLUMNS * ROWS, (at + AHEAD * COLUMNS) % BLOCK_COLUMNS);
    (stride as usize).wrapping_mul(rows).wrapping_add(column).wrapping_sub(at)
}

/// Elements of a row whose elements are apart or too few; missing ones are left.
#[cold]
#[inline(never)]
fn gather<T: Element>(w: ArrayView2<'_, T>, [row, column]: [usize; 2], to: &mut [T]) {
    to.iter_mut()
        .zip(w.index_axis(Axis(0), row).iter().skip(column))
        .for_each(|(to, &from)| *to = from);
}

/// At most four tiles.
#[cold]
#[inline(never)]
fn ragged_word(tiles: &[u16]) -> u64 {
    nibbles::word(tiles)
}

/// Elements of a row as they travel, themselves if they can; the pattern of group g is nibble
/// `16*g + at` of `words`.
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

/// Copies as many as there is room for.
#[inline(always)]
fn copy<E: Copy, const N: usize>(from: &[E; N], to: &mut [E]) {
    match to.first_chunk_mut::<N>() {
        Some(to) => *to = *from,
        None => to.copy_from_slice(&from[..to.len()]),
    }
}
