//! Products with a sparse operand, such as a 2:4 one.
//!
//! The operand A is cut into strips of four rows, and each strip into blocks of 128 columns. A
//! block sorts its columns by the set of rows in which they are not zero. There is one loop per
//! set: for each column of the set, it loads a row of B once, and adds its multiples to the sums of
//! exactly these rows of C, which stay in registers. Zeros cost nothing, and the inner loops do not
//! branch on rows. In a 2:4 operand, a loaded row serves two rows of C on average, so the speed is
//! bound by multiplications, as in a dense product, and there are half as many.

use core::cell::RefCell;
use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, Axis, ShapeBuilder, parallel::prelude::*, s};
use rayon::slice::ParallelSliceMut;
use sparse24_core::op::Accumulate;

use crate::{
    Error, check,
    product::{add, load},
    simd::{Available, Kernel, Vector},
};

/// Rows of a strip.
const ROWS: usize = 4;

/// Columns of a block. A panel of as many rows of B fills an L1 cache.
const BLOCK: usize = 128;

/// Strips that are packed together.
const STRIPS: usize = 16;

/// Columns of a panel of B.
const PANEL: usize = 64;

/// A matrix `[m, k]` as strips, for [`matmul`].
///
/// It needs one byte more than a dense matrix for every two elements, whether they are zero or not.
#[derive(Debug, Clone, Default)]
pub struct Strips {
    shape: [usize; 2],
    /// The strips of the first [`BLOCK`] columns, then those of the next.
    blocks: Vec<Block>,
}

#[derive(Debug, Clone)]
struct Block {
    /// The values, by column and row; zero beyond the matrix.
    values: [[f32; ROWS]; BLOCK],
    /// The set of rows in which each column is not zero: bit i is row i.
    kept: [u8; BLOCK],
    /// All columns, sorted by `kept` and then ascending.
    order: [u8; BLOCK],
    /// For each value of `kept`, the number of columns whose value is at most that.
    ends: [u8; 1 << ROWS],
}

impl Strips {
    /// A matrix of zeros.
    ///
    /// # Errors
    /// [`Error::Memory`] if memory does not suffice.
    pub fn zeros(shape: [usize; 2]) -> Result<Self, Error> {
        let (bytes, mut strips) = (Self::bytes(shape), Self::default());
        let blocks = usize::try_from(bytes).unwrap_or(usize::MAX) / size_of::<Block>();
        strips.blocks.try_reserve_exact(blocks).map_err(|_| Error::Memory { bytes })?;
        strips.reshape(shape);
        Ok(strips)
    }

    /// Rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Bytes of a matrix of this shape.
    #[must_use]
    pub fn bytes([m, k]: [usize; 2]) -> u64 {
        let blocks = (m.div_ceil(ROWS) as u64).saturating_mul(k.div_ceil(BLOCK) as u64);
        blocks.saturating_mul(size_of::<Block>() as u64)
    }

    /// Bytes of the largest matrix that it has held.
    #[must_use]
    pub fn allocated(&self) -> usize {
        size_of_val(&self.blocks[..])
    }

    /// The blocks of a matrix of this shape.
    fn reshape(&mut self, [m, k]: [usize; 2]) -> &mut [Block] {
        self.shape = [m, k];
        let blocks = m.div_ceil(ROWS) * k.div_ceil(BLOCK);
        self.blocks.resize(self.blocks.len().max(blocks), Block::ZERO);
        &mut self.blocks[..blocks]
    }

    /// Overwrites shape and elements with those of `a`. A transpose is a `.t()` view. Where the
    /// zeros are in the same places as before, this is little more than a copy.
    pub fn pack(&mut self, a: ArrayView2<'_, f32>) {
        self.pack_parts(a.dim().into(), |rows, columns, blocks| {
            Available::best().run(Pack { a: a.slice(s![rows, columns]), blocks });
        });
    }

    /// Like [`Self::pack`], with parts of A that `fill` writes: it is called with the rows and
    /// columns of a part, and with the transposed part to overwrite.
    pub(crate) fn pack_transposed(
        &mut self,
        shape: [usize; 2],
        fill: impl Fn(Range<usize>, Range<usize>, ArrayViewMut2<'_, f32>) + Sync,
    ) {
        self.pack_parts(shape, |rows, columns, blocks| {
            let mut part = [[0.0; ROWS * STRIPS]; BLOCK];
            let shape = (columns.len(), rows.len()).strides((ROWS * STRIPS, 1));
            let mut part = ArrayViewMut2::from_shape(shape, part.as_flattened_mut())
                .expect("the part is in the buffer");
            fill(rows, columns, part.view_mut());
            Available::best().run(Pack { a: part.t(), blocks });
        });
    }

    /// Calls `pack` with the rows and columns of each part of A, and with its blocks.
    fn pack_parts(
        &mut self,
        [m, k]: [usize; 2],
        pack: impl Fn(Range<usize>, Range<usize>, &mut [Block]) + Sync,
    ) {
        let blocks = self.reshape([m, k]);
        if m == 0 {
            return;
        }
        blocks.par_chunks_mut(m.div_ceil(ROWS)).enumerate().for_each(|(j, blocks)| {
            blocks.par_chunks_mut(STRIPS).enumerate().for_each(|(i, blocks)| {
                pack(part(ROWS * STRIPS, i, m), part(BLOCK, j, k), blocks);
            });
        });
    }
}

/// Part number `at` of `0..end`, among parts of this size.
fn part(size: usize, at: usize, end: usize) -> Range<usize> {
    size * at..end.min(size * (at + 1))
}

impl Block {
    const ZERO: Self = Self {
        values: [[0.0; ROWS]; BLOCK],
        kept: [0; BLOCK],
        order: {
            let mut order = [0; BLOCK];
            let mut column = 0;
            while column < BLOCK {
                order[column] = column as u8;
                column += 1;
            }
            order
        },
        ends: [BLOCK as u8; 1 << ROWS],
    };

    /// Updates `kept`, `order` and `ends` to match `values`.
    #[inline(always)]
    fn sort<V: Vector>(&mut self, v: V) {
        let mut nonzero = [0; ROWS * BLOCK];
        for (nonzero, &value) in nonzero.iter_mut().zip(self.values.as_flattened()) {
            *nonzero = u8::from(value != 0.0);
        }
        let mut kept = [0; BLOCK];
        for (kept, &nonzero) in kept.iter_mut().zip(nonzero.as_chunks().0) {
            // Gathers the lowest bits of the four bytes.
            *kept = (u32::from_le_bytes(nonzero).wrapping_mul(0x0102_0408) >> 24) as u8;
        }
        if kept == self.kept {
            return;
        }
        (self.kept, self.ends) = (kept, v.sort(&kept, &mut self.order));
    }
}

/// Packs the blocks of a part of A.
struct Pack<'a> {
    a: ArrayView2<'a, f32>,
    blocks: &'a mut [Block],
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { a, blocks } = self;
        let (rows, columns) = a.dim();
        for block in &mut *blocks {
            block.values[columns..].fill([0.0; ROWS]);
        }
        if rows % ROWS != 0 {
            blocks[rows / ROWS].values = [[0.0; ROWS]; BLOCK];
        }
        if a.strides()[0] == 1 {
            for (at, column) in a.axis_iter(Axis(1)).enumerate() {
                let column = column.to_slice().expect("columns are contiguous");
                for (block, rows) in blocks.iter_mut().zip(column.chunks(ROWS)) {
                    match rows.first_chunk() {
                        Some(&rows) => block.values[at] = rows,
                        None => block.values[at][..rows.len()].copy_from_slice(rows),
                    }
                }
            }
        } else {
            for (block, a) in blocks.iter_mut().zip(a.axis_chunks_iter(Axis(0), ROWS)) {
                match rows_of(a) {
                    Some(rows) => transpose4(v, rows, &mut block.values[..columns]),
                    None => a.indexed_iter().for_each(|((i, j), &a)| block.values[j][i] = a),
                }
            }
        }
        for block in blocks {
            block.sort(v);
        }
    }
}

/// The rows of a matrix, if it has N of them and they are contiguous.
#[inline(always)]
fn rows_of<const N: usize>(a: ArrayView2<'_, f32>) -> Option<[&[f32]; N]> {
    if a.nrows() != N {
        return None;
    }
    let mut rows = [&[][..]; N];
    for (at, row) in rows.iter_mut().enumerate() {
        *row = a.index_axis_move(Axis(0), at).to_slice()?;
    }
    Some(rows)
}

/// Copies a part of B to a panel.
#[inline(always)]
fn read<V: Vector>(v: V, b: ArrayView2<'_, f32>, Panel(panel): &mut Panel) {
    if b.strides()[0] == 1 {
        for (j, b) in b.axis_chunks_iter(Axis(1), 16).enumerate() {
            match rows_of(b.reversed_axes()) {
                Some(columns) => transpose16(v, columns, |at, row| {
                    store16(v, row, &mut panel[at][16 * j..]);
                }),
                None => b.indexed_iter().for_each(|((at, i), &b)| panel[at][16 * j + i] = b),
            }
        }
        return;
    }
    for (panel, b) in panel.iter_mut().zip(b.outer_iter()) {
        match b.to_slice() {
            Some(b) => panel[..b.len()].copy_from_slice(b),
            None => panel.iter_mut().zip(b).for_each(|(panel, &b)| *panel = b),
        }
    }
}

/// Calls `put` with the index and the vectors of each column of sixteen rows.
#[inline(always)]
fn transpose16<V: Vector>(v: V, rows: [&[f32]; 16], mut put: impl FnMut(usize, &[V::F])) {
    let columns = rows[0].len();
    let rows = rows.map(|row| &row[..columns]);
    let mut first = 0;
    while columns > first {
        // The last columns are loaded from a padded copy.
        let mut copies = [[0.0; 16]; 16];
        let whole = columns - first >= V::LANES;
        if !whole {
            for (copy, row) in copies.iter_mut().zip(rows) {
                copy[..columns - first].copy_from_slice(&row[first..]);
            }
        }
        let mut tiles = [[v.splat(0.0); 4]; 4];
        for (tiles, (rows, copies)) in
            tiles.iter_mut().zip(rows.as_chunks::<4>().0.iter().zip(copies.as_chunks::<4>().0))
        {
            let row = |at: usize| if whole { &rows[at][first..] } else { &copies[at][..] };
            *tiles =
                v.transpose_tiles([v.load(row(0)), v.load(row(1)), v.load(row(2)), v.load(row(3))]);
        }
        let [a, b, c, d] = tiles;
        for i in 0..4 {
            let quads = v.transpose_quads([a[i], b[i], c[i], d[i]]);
            for (tile, column) in quads.chunks_exact(16 / V::LANES).enumerate() {
                if first + 4 * tile + i < columns {
                    put(first + 4 * tile + i, column);
                }
            }
        }
        first += V::LANES;
    }
}

#[inline(always)]
fn store16<V: Vector>(v: V, column: &[V::F], to: &mut [f32]) {
    for (&column, to) in column.iter().zip(to[..16].chunks_exact_mut(V::LANES)) {
        v.store(column, to);
    }
}

/// Transposes four rows.
#[inline(always)]
fn transpose4<V: Vector>(v: V, rows: [&[f32]; 4], to: &mut [[f32; 4]]) {
    let [a, b, c, d] = rows.map(|row| &row[..to.len()]);
    let mut at = 0;
    while to.len() - at >= V::LANES {
        let tiles = [v.load(&a[at..]), v.load(&b[at..]), v.load(&c[at..]), v.load(&d[at..])];
        for (i, row) in v.transpose_tiles(tiles).into_iter().enumerate() {
            let mut stored = [0.0; 16];
            v.store(row, &mut stored);
            for (tile, &four) in stored.as_chunks().0[..V::LANES / 4].iter().enumerate() {
                to[at + 4 * tile + i] = four;
            }
        }
        at += V::LANES;
    }
    for at in at..to.len() {
        to[at] = [a[at], b[at], c[at], d[at]];
    }
}

/// C = A B + bias in every column, or C += that: A `[m, k]`, B `[k, n]`, bias `[m]`, C `[m, n]`.
///
/// With A = S(W), B = X^T and C = Z^T, this is the forward product; with A = S(W)^T, B = dZ^T and
/// C = dX^T, dgrad; with A = MVUE(dZ^T), B = X and C = dW, wgrad. B and C may be row-major or
/// column-major (a transpose is a `.t()` view).
///
/// Zeros of A are skipped, so an infinity in B reaches C only through nonzero elements. A sum
/// starts with the bias, and goes over the blocks of 128 columns of A in order; in a block over the
/// sets of rows, in the order of their binary numbers; and in a set over its columns in order.
/// Terms are added with [FMA](f32::mul_add) at the SIMD levels that have it. So the bits depend on
/// A's zeros and on FMA, but on neither the number of threads nor n.
///
/// # Errors
/// [`Error::Shape`] if B, the bias or C does not fit.
pub fn matmul(
    a: &Strips,
    b: ArrayView2<'_, f32>,
    bias: Option<ArrayView1<'_, f32>>,
    c: ArrayViewMut2<'_, f32>,
    accumulate: Accumulate,
) -> Result<(), Error> {
    matmul_at(Available::best(), a, b, bias, c, accumulate)
}

/// [`matmul`] at a given SIMD level.
///
/// # Errors
/// Like [`matmul`].
pub fn matmul_at(
    level: Available,
    a: &Strips,
    b: ArrayView2<'_, f32>,
    bias: Option<ArrayView1<'_, f32>>,
    mut c: ArrayViewMut2<'_, f32>,
    accumulate: Accumulate,
) -> Result<(), Error> {
    let ([m, k], n) = (a.shape, b.ncols());
    check::matrix("strips matmul", "b", &b, [k, n])?;
    check::matrix("strips matmul", "c", &c, [m, n])?;
    if let Some(bias) = bias {
        check::vector("strips matmul", "bias", &bias, m)?;
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    let [height, width] = task(a.shape, n);
    c.axis_chunks_iter_mut(Axis(1), width).into_par_iter().enumerate().for_each(|(j, mut c)| {
        let b = b.slice(s![.., part(width, j, n)]);
        c.axis_chunks_iter_mut(Axis(0), height).into_par_iter().enumerate().for_each(|(i, c)| {
            SCRATCH.with_borrow_mut(|scratch| {
                level.run(Task { a, b, bias, first: i * height, c, accumulate, scratch });
            });
        });
    });
    Ok(())
}

/// Rows and columns of C per task. If A does not fit the L2 cache, 256 of each, so that a part of A
/// serves many columns; otherwise 1024 rows of one panel. Fewer rows, but at least 64, if there
/// would be fewer than 8 tasks.
fn task(a: [usize; 2], n: usize) -> [usize; 2] {
    let [height, width] = if Strips::bytes(a) > 1 << 19 { [256, 4 * PANEL] } else { [1024, PANEL] };
    let m = a[0];
    let tasks = 8_usize.div_ceil(n.div_ceil(width)).max(m.div_ceil(height)).min(m.div_ceil(64));
    [m.div_ceil(tasks).next_multiple_of(16), width]
}

/// Rows of B, aligned to cache lines.
#[derive(Clone)]
#[repr(align(64))]
struct Panel([[f32; PANEL]; BLOCK]);

/// The sums of a strip.
#[derive(Clone)]
#[repr(align(64))]
struct Sums([[f32; PANEL]; ROWS]);

#[derive(Default)]
struct Scratch {
    panels: Vec<Panel>,
    /// The sums of the first panel, then those of the next.
    sums: Vec<Sums>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The part of a product in some columns of B and C, and in the rows of C from `first` on.
struct Task<'a> {
    a: &'a Strips,
    b: ArrayView2<'a, f32>,
    bias: Option<ArrayView1<'a, f32>>,
    first: usize,
    c: ArrayViewMut2<'a, f32>,
    accumulate: Accumulate,
    scratch: &'a mut Scratch,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(mut self, v: V) {
        let (rows, columns) = self.c.dim();
        let (strips, count) = (rows.div_ceil(ROWS), columns.div_ceil(PANEL));
        let Scratch { panels, sums } = self.scratch;
        panels.resize(panels.len().max(count), Panel([[0.0; PANEL]; BLOCK]));
        sums.resize(sums.len().max(count * strips), Sums([[0.0; PANEL]; ROWS]));
        let sums = &mut sums[..count * strips];
        for sums in sums.chunks_exact_mut(strips) {
            for (row, sums) in sums.iter_mut().flat_map(|Sums(sums)| sums).take(rows).enumerate() {
                sums.fill(self.bias.map_or(0.0, |bias| bias[self.first + row]));
            }
        }
        let of_task = self.first / ROWS..self.first / ROWS + strips;
        let [m, k] = self.a.shape;
        let of_columns = self.a.blocks.chunks_exact(m.div_ceil(ROWS)).take(k.div_ceil(BLOCK));
        for (at, blocks) in of_columns.enumerate() {
            let b = self.b.slice(s![part(BLOCK, at, k), ..]);
            let parts = b.axis_chunks_iter(Axis(1), PANEL);
            for ((panel, b), sums) in
                panels.iter_mut().zip(parts).zip(sums.chunks_exact_mut(strips))
            {
                read(v, b, panel);
                for (block, sums) in blocks[of_task.clone()].iter().zip(sums) {
                    add_block(v, block, panel, sums, b.ncols());
                }
            }
        }
        let parts = self.c.axis_chunks_iter_mut(Axis(1), PANEL);
        for (sums, c) in sums.chunks_exact(strips).zip(parts) {
            write(v, sums, c, self.accumulate);
        }
    }
}

/// sums += block panel, for some columns of the panel.
#[inline(always)]
fn add_block<V: Vector>(v: V, block: &Block, panel: &Panel, sums: &mut Sums, columns: usize) {
    let mut first = 0;
    while first < columns {
        first += match (columns - first).div_ceil(V::LANES) {
            1 => add_part::<V, 1>(v, block, panel, sums, first),
            // AVX-512 has enough registers for four rows of four vectors.
            3.. if V::LANES == 16 => add_part::<V, 4>(v, block, panel, sums, first),
            _ => add_part::<V, 2>(v, block, panel, sums, first),
        };
    }
}

/// sums += block panel, for N vectors of columns from `first` on; returns their number.
#[inline(always)]
fn add_part<V: Vector, const N: usize>(
    v: V,
    block: &Block,
    panel: &Panel,
    Sums(stored): &mut Sums,
    first: usize,
) -> usize {
    let columns = first..first + N * V::LANES;
    let mut sums = [[v.splat(0.0); N]; ROWS];
    for (sums, stored) in sums.iter_mut().zip(&*stored) {
        *sums = load(v, &stored[columns.clone()]);
    }
    macro_rules! add_sets {
        ($($set:literal)+) => {
            $(add_set::<V, N, $set>(v, block, panel, &columns, &mut sums);)+
        };
    }
    add_sets!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    for (sums, stored) in sums.iter().zip(stored) {
        for (&sum, stored) in sums.iter().zip(stored[columns.clone()].chunks_exact_mut(V::LANES)) {
            v.store(sum, stored);
        }
    }
    columns.len()
}

/// Adds the products of the columns that are nonzero in exactly the rows of a set.
#[inline(always)]
fn add_set<V: Vector, const N: usize, const SET: usize>(
    v: V,
    block: &Block,
    Panel(panel): &Panel,
    columns: &Range<usize>,
    sums: &mut [[V::F; N]; ROWS],
) {
    let [start, end] = [block.ends[SET - 1], block.ends[SET]].map(usize::from);
    for &column in &block.order[start..end] {
        let column = usize::from(column) % BLOCK;
        let b = load(v, &panel[column][columns.clone()]);
        for (row, sums) in sums.iter_mut().enumerate() {
            if SET >> row & 1 == 1 {
                add(v, sums, block.values[column][row], &b);
            }
        }
    }
}

/// c = sums, or c += sums.
#[inline(always)]
fn write<V: Vector>(v: V, sums: &[Sums], mut c: ArrayViewMut2<'_, f32>, accumulate: Accumulate) {
    let put = |to: &mut f32, sum: f32| match accumulate {
        Accumulate::Overwrite => *to = sum,
        Accumulate::Add => *to += sum,
    };
    if c.strides()[0] == 1 {
        let (rows, columns) = c.dim();
        let mut c: Vec<_> = c
            .axis_iter_mut(Axis(1))
            .map(|c| c.into_slice().expect("columns are contiguous"))
            .collect();
        for (at, sums) in sums.chunks(4).enumerate() {
            let first = 16 * at;
            let mut of_rows = [&[][..]; 16];
            let all = sums.iter().flat_map(|Sums(sums)| sums).take(rows - first);
            of_rows.iter_mut().zip(all).for_each(|(row, sums)| *row = &sums[..columns]);
            if rows - first >= 16 && accumulate == Accumulate::Overwrite {
                transpose16(v, of_rows, |at, column| store16(v, column, &mut c[at][first..]));
            } else {
                for (row, sums) in of_rows.into_iter().enumerate() {
                    c.iter_mut().zip(sums).for_each(|(c, &sum)| put(&mut c[first + row], sum));
                }
            }
        }
        return;
    }
    let sums = sums.iter().flat_map(|Sums(sums)| sums);
    for (mut c, sums) in c.outer_iter_mut().zip(sums) {
        match c.as_slice_mut() {
            Some(c) => c.iter_mut().zip(sums).for_each(|(c, &sum)| put(c, sum)),
            None => c.iter_mut().zip(sums).for_each(|(c, &sum)| put(c, sum)),
        }
    }
}
