//! Products with an operand half of which is zero.
//!
//! The operand A is cut into strips of four rows, and these into blocks of 128 columns. A block
//! lists its columns by the set of rows in which they are not zero. One loop per set multiplies:
//! it loads a row of B once, and adds its multiples to the sums of exactly these rows, which stay
//! in registers. Zeros cost nothing, and no row is chosen at run time. In a 2:4 operand a loaded
//! row serves two rows on average, so multiplications bound the speed, as in a dense product, and
//! there are half as many.

use core::cell::RefCell;
use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, Axis, parallel::prelude::*, s};
use sparse24_core::op::Accumulate;

use crate::{
    Error, check,
    product::{add, load},
    simd::{Available, Kernel, Vector},
    tasks,
};

/// Rows of a strip.
const ROWS: usize = 4;

/// Columns of a block. As many rows of a panel of B fill an L1 cache.
const BLOCK: usize = 128;

/// Columns of B that are multiplied together.
const PANEL: usize = 64;

/// A matrix `[m, k]` as strips, for [`matmul`].
///
/// It has one more byte than a dense matrix for every two elements, whatever they are.
#[derive(Debug, Clone)]
pub struct Strips {
    shape: [usize; 2],
    /// The strips of the first [`BLOCK`] columns, then those of the next.
    blocks: Vec<Block>,
}

#[derive(Debug, Clone)]
struct Block {
    /// The columns; zero beyond the matrix.
    values: [[f32; ROWS]; BLOCK],
    /// The rows in which each column is not zero: bit i is row i.
    kept: [u8; BLOCK],
    /// All columns, by `kept`, and ascending where it is the same.
    order: [u8; BLOCK],
    /// The number of columns up to each value of `kept`.
    ends: [u8; 1 << ROWS],
}

impl Strips {
    /// A matrix of zeros.
    #[must_use]
    pub fn zeros(shape: [usize; 2]) -> Self {
        let mut strips = Self { shape: [0; 2], blocks: Vec::new() };
        strips.reshape(shape);
        strips
    }

    /// Rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Bytes of a matrix of this shape.
    #[must_use]
    pub fn bytes([m, k]: [usize; 2]) -> usize {
        m.div_ceil(ROWS) * k.div_ceil(BLOCK) * size_of::<Block>()
    }

    fn reshape(&mut self, shape: [usize; 2]) {
        self.shape = shape;
        self.blocks.resize(Self::bytes(shape) / size_of::<Block>(), Block::ZERO);
    }

    /// Overwrites shape and elements with those of `a`. A transpose is a `.t()` view. Where the
    /// pattern of zeros is the old one, this is little more than a copy.
    pub fn pack(&mut self, a: ArrayView2<'_, f32>) {
        const TASK: usize = 16;
        self.reshape(a.dim().into());
        let strips = a.nrows().div_ceil(ROWS);
        tasks::for_chunks(&mut self.blocks, TASK, |task, blocks| {
            Available::best().run(Pack { a, strips, first: task * TASK, blocks });
        });
    }
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

    /// Brings `kept`, `order` and `ends` in line with `values`.
    #[inline(always)]
    fn sort(&mut self) {
        let mut nonzero = [0; ROWS * BLOCK];
        for (nonzero, &value) in nonzero.iter_mut().zip(self.values.as_flattened()) {
            *nonzero = u8::from(value != 0.0);
        }
        let mut kept = [0; BLOCK];
        for (kept, &nonzero) in kept.iter_mut().zip(nonzero.as_chunks().0) {
            // Moves the lowest bits of the four bytes next to each other.
            *kept = (u32::from_le_bytes(nonzero).wrapping_mul(0x0102_0408) >> 24) as u8;
        }
        if kept == self.kept {
            return;
        }
        let mut places = [0_u8; 1 << ROWS];
        kept.iter().for_each(|&kept| places[usize::from(kept % 16)] += 1);
        let mut columns = 0;
        for place in &mut places {
            (*place, columns) = (columns, columns + *place);
        }
        for (column, &kept) in kept.iter().enumerate() {
            let place = &mut places[usize::from(kept % 16)];
            self.order[usize::from(*place) % BLOCK] = column as u8;
            *place += 1;
        }
        (self.kept, self.ends) = (kept, places);
    }
}

/// Packs some blocks, the first of which has the number `first`.
struct Pack<'a> {
    a: ArrayView2<'a, f32>,
    strips: usize,
    first: usize,
    blocks: &'a mut [Block],
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        for (at, block) in self.blocks.iter_mut().enumerate() {
            let (column, strip) =
                ((self.first + at) / self.strips, (self.first + at) % self.strips);
            let a = within(self.a, ROWS, strip, BLOCK, column);
            read(v, a.reversed_axes(), &mut block.values);
            block.sort();
        }
    }
}

/// The part of a matrix with these numbers, among parts of these extents; smaller at its edge.
fn within(
    a: ArrayView2<'_, f32>,
    rows: usize,
    row: usize,
    columns: usize,
    column: usize,
) -> ArrayView2<'_, f32> {
    let (m, n) = a.dim();
    let range = |size: usize, at: usize, end: usize| size * at..end.min(size * (at + 1));
    a.slice_move(s![range(rows, row, m), range(columns, column, n)])
}

/// Copies a matrix into rows, which are filled up with zeros.
#[inline(always)]
fn read<V: Vector, const N: usize>(v: V, from: ArrayView2<'_, f32>, to: &mut [[f32; N]]) {
    let (rows, columns) = from.dim();
    for to in &mut to[rows..] {
        *to = [0.0; N];
    }
    if from.strides()[0] == 1 && from.strides()[1] != 1 {
        let empty = [0.0; BLOCK];
        for first in (0..N).step_by(4) {
            let column = |at: usize| match first + at < columns {
                true => from.index_axis_move(Axis(1), first + at).to_slice(),
                false => empty.get(..rows),
            };
            if let [Some(a), Some(b), Some(c), Some(d)] = [column(0), column(1), column(2), column(3)]
            {
                transpose(v, [a, b, c, d], |row, four| {
                    to[row][first..first + 4].copy_from_slice(&four);
                });
            }
        }
        return;
    }
    for (to, from) in to.iter_mut().zip(from.outer_iter()) {
        match from.to_slice() {
            Some(from) => to[..columns].copy_from_slice(from),
            None => to.iter_mut().zip(from).for_each(|(to, &from)| *to = from),
        }
        to[columns..].fill(0.0);
    }
}

/// Calls `put` with the columns of four rows.
#[inline(always)]
fn transpose<V: Vector>(v: V, rows: [&[f32]; 4], mut put: impl FnMut(usize, [f32; 4])) {
    let columns = rows[0].len();
    let rows = rows.map(|row| &row[..columns]);
    let mut at = 0;
    while columns - at >= V::LANES {
        let [a, b, c, d] = rows;
        let tiles = [v.load(&a[at..]), v.load(&b[at..]), v.load(&c[at..]), v.load(&d[at..])];
        for (i, row) in v.transpose_tiles(tiles).into_iter().enumerate() {
            let mut stored = [0.0; 16];
            v.store(row, &mut stored);
            for (tile, &four) in stored.as_chunks().0[..V::LANES / 4].iter().enumerate() {
                put(at + 4 * tile + i, four);
            }
        }
        at += V::LANES;
    }
    for at in at..columns {
        put(at, [rows[0][at], rows[1][at], rows[2][at], rows[3][at]]);
    }
}

/// C = A B + bias in every column, or C += that: A `[m, k]`, B `[k, n]`, bias `[m]`, C `[m, n]`.
///
/// With A = S(W), B = X^T and C = Z^T this is the forward product, with A = S(W)^T dgrad, and with
/// A = MVUE(dZ^T) and B = X wgrad. B and C may be row-major or column-major (a transpose is a
/// `.t()` view).
///
/// Elements of A that are zero are left out, so an infinity in B reaches C only through others. The
/// sum starts from the bias, and goes over blocks of 128 columns of A. In a block it goes over the
/// sets of rows of the strip that keep a column, as binary numbers, and over the columns of a set
/// in order. Every term is added with [FMA](f32::mul_add) at the SIMD levels that have it. So the
/// bits depend on A's zeros and on FMA, but on neither the number of threads nor n.
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
    let height = task_rows(m, n);
    c.axis_chunks_iter_mut(Axis(1), PANEL).into_par_iter().enumerate().for_each(|(j, mut c)| {
        let b = within(b, k, 0, PANEL, j);
        c.axis_chunks_iter_mut(Axis(0), height).into_par_iter().enumerate().for_each(|(i, c)| {
            SCRATCH.with_borrow_mut(|scratch| {
                level.run(Task { a, b, bias, first: i * height, c, accumulate, scratch });
            });
        });
    });
    Ok(())
}

/// Rows of C per task: at most 512, so that their sums stay in the L2 cache, and fewer, down to 64,
/// where that gives at least 8 tasks.
fn task_rows(m: usize, n: usize) -> usize {
    let tasks = 8_usize.div_ceil(n.div_ceil(PANEL)).max(m.div_ceil(512)).min(m.div_ceil(64));
    m.div_ceil(tasks).next_multiple_of(ROWS)
}

/// Rows of B, aligned to cache lines.
#[repr(align(64))]
struct Panel([[f32; PANEL]; BLOCK]);

/// The sums of a strip.
#[derive(Clone)]
#[repr(align(64))]
struct Sums([[f32; PANEL]; ROWS]);

struct Scratch {
    panel: Box<Panel>,
    sums: Vec<Sums>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        panel: Box::new(Panel([[0.0; PANEL]; BLOCK])),
        sums: Vec::new(),
    });
}

/// At most [`PANEL`] columns of B and C, and the rows of C from `first` on.
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
    fn run<V: Vector>(self, v: V) {
        let (rows, columns) = self.c.dim();
        let strips = rows.div_ceil(ROWS);
        let Scratch { panel, sums } = self.scratch;
        sums.resize(sums.len().max(strips), Sums([[0.0; PANEL]; ROWS]));
        let sums = &mut sums[..strips];
        for (row, sums) in sums.iter_mut().flat_map(|Sums(sums)| sums).take(rows).enumerate() {
            sums.fill(self.bias.map_or(0.0, |bias| bias[self.first + row]));
        }
        let of_task = self.first / ROWS..self.first / ROWS + strips;
        let columns_of_a = self.a.blocks.chunks_exact(self.a.shape[0].div_ceil(ROWS));
        for (at, blocks) in columns_of_a.enumerate() {
            read(v, within(self.b, BLOCK, at, PANEL, 0), &mut panel.0);
            for (block, sums) in blocks[of_task.clone()].iter().zip(&mut *sums) {
                let mut first = 0;
                while first < columns {
                    first += match (columns - first).div_ceil(V::LANES) {
                        1 => add_block::<V, 1>(v, block, panel, sums, first),
                        // AVX-512 has registers for four rows of four vectors.
                        3.. if V::LANES == 16 => add_block::<V, 4>(v, block, panel, sums, first),
                        _ => add_block::<V, 2>(v, block, panel, sums, first),
                    };
                }
            }
        }
        write(v, sums, self.c, self.accumulate);
    }
}

/// sums += block panel, for N vectors of columns from `first` on; returns their number.
#[inline(always)]
fn add_block<V: Vector, const N: usize>(
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

/// Adds the columns of the block that are not zero in the rows of a set, and are in all others.
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
        for row in 0..ROWS {
            if SET >> row & 1 == 1 {
                add(v, &mut sums[row], block.values[column][row], &b);
            }
        }
    }
}

/// c = sums, or c += sums.
#[inline(always)]
fn write<V: Vector>(v: V, sums: &[Sums], mut c: ArrayViewMut2<'_, f32>, accumulate: Accumulate) {
    let (rows, columns) = c.dim();
    let put = |to: &mut f32, sum: f32| match accumulate {
        Accumulate::Overwrite => *to = sum,
        Accumulate::Add => *to += sum,
    };
    if c.strides()[0] == 1 && c.strides()[1] != 1 {
        for (strip, Sums([a, b, x, y])) in sums.iter().enumerate() {
            let rows = ROWS * strip..rows.min(ROWS * (strip + 1));
            let sums = [&a[..columns], &b[..columns], &x[..columns], &y[..columns]];
            transpose(v, sums, |column, four| {
                let mut c = c.index_axis_mut(Axis(1), column);
                let c = c.as_slice_mut().expect("columns are contiguous");
                c[rows.clone()].iter_mut().zip(four).for_each(|(c, sum)| put(c, sum));
            });
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
