//! Softmax attention, forward and backward, in blocks of query rows.
//!
//! A task is one head of one sequence, and its query blocks run in order, so the bits do not depend
//! on the number of threads. Scratch memory is a few blocks of a head: no `[T, T]` matrix of the
//! batch exists, and the backward pass computes the probabilities again from the log-sum-exp of
//! their rows. Scores are kept in units of ln 2, so that their exponentials are powers of two.
//!
//! Source: Vaswani et al., "Attention is all you need", arXiv 1706.03762; Dao et al.,
//! "FlashAttention", arXiv 2205.14135.

use std::{
    cell::RefCell,
    f32::consts::{LN_2, LOG2_E},
    ops::Range,
};

use ndarray::{ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{
    op::{Accumulate, AttentionMask, AttentionShape, Dropout},
    philox::Stream,
};

use crate::{
    Error, check,
    dropout::{apply, draw},
    math,
    product::{Left, PAD, product},
    simd::vectorized,
};

/// Query rows per block.
const BLOCK: usize = 16;

/// For each sequence and head: S = Q K^T / sqrt(head_dim), P = softmax(S) over the visible keys,
/// O = dropout(P) V.
///
/// q and o are `[batch * Tq, d]`, k and v `[batch * Tk, d]`, and head h has the columns from
/// `h * d / heads` on. Rows may be further apart than their length (column slices of one matrix).
/// lse `[batch * heads, Tq]` is ln sum e^S. The mask hides keys from queries; `lengths` also hides,
/// from all queries of sequence b, the keys from `lengths[b]` on. A query that sees no key has
/// output 0 and log-sum-exp -infinity. Dropout numbers the elements of P as
/// `[batch, heads, Tq, Tk]`, draws from the given stream, and leaves what it keeps in words
/// `[batch * heads, shape.tile_words()]` for the backward pass.
///
/// # Errors
/// [`Error::Shape`] if heads do not divide d or an operand does not fit, such as a length beyond Tk
/// or words for other sizes; [`Error::Zero`] without heads.
#[expect(clippy::too_many_arguments, reason = "an equation of eight operands")]
pub fn attention_forward(
    shape: AttentionShape,
    q: ArrayView2<'_, f32>,
    k: ArrayView2<'_, f32>,
    v: ArrayView2<'_, f32>,
    lengths: Option<&[u32]>,
    mut o: ArrayViewMut2<'_, f32>,
    mut lse: ArrayViewMut2<'_, f32>,
    dropout: Option<(&Dropout, Stream, &mut [u32])>,
) -> Result<(), Error> {
    const OPERATION: &str = "attention_forward";
    let operands =
        [("q", q.dim()), ("k", k.dim()), ("v", v.dim()), ("o", o.dim()), ("lse", lse.dim())];
    let width = check(OPERATION, shape, lengths, q.ncols(), &operands)?;
    if let Some((.., kept)) = &dropout {
        check_kept(OPERATION, shape, kept)?;
    }
    if o.is_empty() {
        return Ok(());
    }
    let o = o.exact_chunks_mut((shape.queries, width));
    let (drawn, kept) = match dropout {
        Some((rule, stream, kept)) => (Some((rule, stream)), kept),
        None => (None, Default::default()),
    };
    let mut kept = kept.chunks_mut(shape.tile_words().max(1));
    let tasks = o.into_iter().zip(lse.rows_mut()).enumerate();
    let tasks: Vec<_> = tasks.map(|(index, task)| (index, task, kept.next())).collect();
    tasks.into_par_iter().for_each(|(index, (o, lse), kept)| {
        let task = Task::new(shape, index, lengths);
        let dropout = drawn.zip(kept);
        forward_head(&task, [task.queries(q), task.keys(k), task.keys(v)], o, lse, dropout);
    });
    Ok(())
}

/// The gradient of [`attention_forward`], given its o and lse, the same lengths, and what dropout
/// kept: dq, dk and dv are overwritten.
///
/// With D_i = sum of dO_i * O_i: dP = dO V^T, dS = P (dP - D), dV = P^T dO, dQ = dS K /
/// sqrt(head_dim), dK = dS^T Q / sqrt(head_dim). The gradients of hidden keys, and of queries that
/// see no key, are 0.
///
/// # Errors
/// Like [`attention_forward`].
#[expect(clippy::too_many_arguments, reason = "an equation of nine operands")]
pub fn attention_backward(
    shape: AttentionShape,
    q: ArrayView2<'_, f32>,
    k: ArrayView2<'_, f32>,
    v: ArrayView2<'_, f32>,
    lengths: Option<&[u32]>,
    o: ArrayView2<'_, f32>,
    lse: ArrayView2<'_, f32>,
    d_o: ArrayView2<'_, f32>,
    mut dq: ArrayViewMut2<'_, f32>,
    mut dk: ArrayViewMut2<'_, f32>,
    mut dv: ArrayViewMut2<'_, f32>,
    dropout: Option<(&Dropout, &[u32])>,
) -> Result<(), Error> {
    const OPERATION: &str = "attention_backward";
    let operands = [
        ("q", q.dim()),
        ("k", k.dim()),
        ("v", v.dim()),
        ("o", o.dim()),
        ("lse", lse.dim()),
        ("d_o", d_o.dim()),
        ("dq", dq.dim()),
        ("dk", dk.dim()),
        ("dv", dv.dim()),
    ];
    let width = check(OPERATION, shape, lengths, q.ncols(), &operands)?;
    if let Some((_, kept)) = dropout {
        check_kept(OPERATION, shape, kept)?;
    }
    if width == 0 || shape.batch == 0 {
        return Ok(());
    }
    if shape.queries == 0 || shape.keys == 0 {
        dq.fill(0.0);
        dk.fill(0.0);
        dv.fill(0.0);
        return Ok(());
    }
    // One chunk per head, in the order of the tasks.
    let dq = dq.exact_chunks_mut((shape.queries, width));
    let dk = dk.exact_chunks_mut((shape.keys, width));
    let dv = dv.exact_chunks_mut((shape.keys, width));
    let tasks: Vec<_> = dq.into_iter().zip(dk).zip(dv).enumerate().collect();
    tasks.into_par_iter().for_each(|(index, ((dq, dk), dv))| {
        let task = Task::new(shape, index, lengths);
        let words = shape.tile_words();
        let dropout = dropout.map(|(rule, kept)| (rule, &kept[index * words..][..words]));
        let inputs =
            [task.queries(q), task.keys(k), task.keys(v), task.queries(o), task.queries(d_o)];
        let lse = lse.row(index);
        let lse = lse.as_standard_layout();
        let lse = lse.as_slice().expect("standard layout");
        backward_head(&task, inputs, lse, [dq, dk, dv], dropout);
    });
    Ok(())
}

/// Checks all operands and returns the width of a head.
fn check(
    operation: &'static str,
    shape: AttentionShape,
    lengths: Option<&[u32]>,
    d: usize,
    operands: &[(&'static str, (usize, usize))],
) -> Result<usize, Error> {
    let AttentionShape { batch, heads, queries, keys, .. } = shape;
    if heads == 0 {
        return Err(Error::Zero { operation, operand: "the number of heads" });
    }
    let width = d / heads;
    for &(operand, found) in operands {
        let expected = match operand {
            "k" | "v" | "dk" | "dv" => [batch * keys, width * heads],
            "lse" => [batch * heads, queries],
            _ => [batch * queries, width * heads],
        };
        check::shape(operation, operand, expected, found.into())?;
    }
    if let Some(lengths) = lengths {
        let longest = lengths.iter().fold(0, |longest, &length| longest.max(length as usize));
        let (expected, found) = ([batch, keys], [lengths.len(), keys.max(longest)]);
        check::shape(operation, "lengths", expected, found)?;
    }
    Ok(width)
}

fn check_kept(operation: &'static str, shape: AttentionShape, kept: &[u32]) -> Result<(), Error> {
    let heads = shape.batch * shape.heads;
    check::shape(operation, "kept", [1, heads * shape.tile_words()], [1, kept.len()])
}

/// One head of one sequence.
struct Task {
    shape: AttentionShape,
    index: usize,
    /// Keys of the sequence that are not hidden by its length.
    limit: usize,
}

impl Task {
    fn new(shape: AttentionShape, index: usize, lengths: Option<&[u32]>) -> Self {
        let limit = lengths.map_or(shape.keys, |lengths| lengths[index / shape.heads] as usize);
        Self { shape, index, limit }
    }

    /// The number of leading keys that the queries before `end` see.
    fn visible(&self, end: usize) -> usize {
        let AttentionShape { queries, keys, mask, .. } = self.shape;
        match mask {
            AttentionMask::Full => self.limit,
            AttentionMask::Causal => (end + keys).saturating_sub(queries).min(self.limit),
        }
    }

    /// Elements from one row of scores to the next: never a large power of two, whose rows would
    /// share cache lines.
    fn score_stride(&self) -> usize {
        self.shape.keys.next_multiple_of(PAD) + PAD
    }

    /// The head's part of a matrix of queries.
    fn queries<'x>(&self, x: ArrayView2<'x, f32>) -> ArrayView2<'x, f32> {
        self.head(x, self.shape.queries)
    }

    /// The head's part of a matrix of keys.
    fn keys<'x>(&self, x: ArrayView2<'x, f32>) -> ArrayView2<'x, f32> {
        self.head(x, self.shape.keys)
    }

    fn head<'x>(&self, x: ArrayView2<'x, f32>, rows: usize) -> ArrayView2<'x, f32> {
        let heads = self.shape.heads;
        let (sequence, head, width) = (self.index / heads, self.index % heads, x.ncols() / heads);
        x.slice_move(s![sequence * rows..(sequence + 1) * rows, head * width..(head + 1) * width])
    }

    /// Where the words of what dropout keeps are, for a query and the keys that it sees.
    fn kept(&self, query: usize) -> Range<usize> {
        let first = query * self.shape.keys.div_ceil(64) * 2;
        first..first + self.visible(query + 1).div_ceil(32)
    }

    /// Draws what dropout keeps of the rows of some queries.
    fn draw(&self, queries: Range<usize>, dropout: (&Dropout, Stream), kept: &mut [u32]) {
        for query in queries {
            let first = (self.index * self.shape.queries + query) * self.shape.keys;
            draw(dropout, first as u64, &mut kept[self.kept(query)]);
        }
    }

    /// Applies dropout to the rows of some queries.
    fn drop_rows(
        &self,
        queries: Range<usize>,
        (rule, kept): (&Dropout, &[u32]),
        scores: &mut [f32],
        stride: usize,
    ) {
        for (query, scores) in queries.zip(scores.chunks_exact_mut(stride)) {
            apply(rule, &kept[self.kept(query)], &mut scores[..self.visible(query + 1)]);
        }
    }
}

fn forward_head(
    task: &Task,
    [q, k, v]: [ArrayView2<'_, f32>; 3],
    mut o: ArrayViewMut2<'_, f32>,
    mut lse: ArrayViewMut1<'_, f32>,
    mut dropout: Option<((&Dropout, Stream), &mut [u32])>,
) {
    let shape = task.shape;
    let (width, padded, stride) = (q.ncols(), q.ncols().next_multiple_of(PAD), task.score_stride());
    let scale = (width as f32).sqrt().recip();
    scratch(
        [width * stride, shape.keys * padded, BLOCK * padded, BLOCK * padded, BLOCK * stride],
        |[kt, v_head, q_block, o_block, scores]| {
            transpose(k, kt, stride);
            copy(v, v_head, padded, 1.0);
            for first in (0..shape.queries).step_by(BLOCK) {
                let end = (first + BLOCK).min(shape.queries);
                let (rows, keys) = (end - first, task.visible(end));
                copy(q.slice(s![first..end, ..]), q_block, padded, scale * LOG2_E);
                let seen = keys.next_multiple_of(PAD);
                product(
                    [rows, seen, width],
                    Left::Rows(q_block, padded),
                    (kt, stride),
                    (scores, stride),
                    Accumulate::Overwrite,
                );
                let (mut maxima, mut inverses) = ([0.0; BLOCK], [0.0; BLOCK]);
                vectorized(
                    #[inline(always)]
                    || {
                        for (row, scores) in scores.chunks_exact_mut(stride).take(rows).enumerate()
                        {
                            maxima[row] = hide(&mut scores[..seen], task.visible(first + row + 1));
                        }
                        for (row, scores) in scores.chunks_exact_mut(stride).take(rows).enumerate()
                        {
                            let sum = exponentials(&mut scores[..seen], maxima[row]);
                            inverses[row] =
                                if maxima[row] == f32::NEG_INFINITY { 0.0 } else { 1.0 / sum };
                            lse[first + row] = (maxima[row] + sum.log2()) * LN_2;
                        }
                    },
                );
                if let Some((drawn, kept)) = &mut dropout {
                    task.draw(first..end, *drawn, kept);
                    task.drop_rows(first..end, (drawn.0, kept), scores, stride);
                }
                product(
                    [rows, padded, keys],
                    Left::Rows(scores, stride),
                    (v_head, padded),
                    (o_block, padded),
                    Accumulate::Overwrite,
                );
                paste(o_block, padded, o.slice_mut(s![first..end, ..]), |row| inverses[row]);
            }
        },
    );
}

/// Sets the scores from `visible` on to -infinity and returns the largest. The length is a multiple
/// of [`PAD`].
#[inline(always)]
fn hide(scores: &mut [f32], visible: usize) -> f32 {
    let mut largest = [f32::NEG_INFINITY; PAD];
    let mut left = visible as i32;
    for chunk in scores.as_chunks_mut::<PAD>().0 {
        for (lane, (largest, score)) in largest.iter_mut().zip(chunk).enumerate() {
            *score = if (lane as i32) < left { *score } else { f32::NEG_INFINITY };
            *largest = math::larger(*largest, *score);
        }
        left -= PAD as i32;
    }
    math::fold(largest, math::larger)
}

/// Replaces scores by 2^(score - maximum), or by 0 if all are -infinity, and returns their sum. The
/// length is a multiple of [`PAD`].
#[inline(always)]
fn exponentials(scores: &mut [f32], maximum: f32) -> f32 {
    let maximum = maximum.max(f32::MIN);
    let mut sums = [0.0; PAD];
    for chunk in scores.as_chunks_mut::<PAD>().0 {
        for (score, sum) in chunk.iter_mut().zip(&mut sums) {
            *score = math::exp2(*score - maximum);
            *sum += *score;
        }
    }
    math::fold(sums, |a, b| a + b)
}

fn backward_head(
    task: &Task,
    [q, k, v, o, d_o]: [ArrayView2<'_, f32>; 5],
    lse: &[f32],
    [mut dq, dk, dv]: [ArrayViewMut2<'_, f32>; 3],
    dropout: Option<(&Dropout, &[u32])>,
) {
    let shape = task.shape;
    let (width, padded, stride) = (q.ncols(), q.ncols().next_multiple_of(PAD), task.score_stride());
    let scale = (width as f32).sqrt().recip();
    let (turned, head, block, square) =
        (width * stride, shape.keys * padded, BLOCK * padded, BLOCK * stride);
    scratch(
        [turned, turned, head, head, head, block, block, block, square, square],
        |[kt, vt, k_head, dk_head, dv_head, q_block, do_block, o_block, p, ds]| {
            transpose(k, kt, stride);
            transpose(v, vt, stride);
            copy(k, k_head, padded, 1.0);
            dk_head.fill(0.0);
            dv_head.fill(0.0);
            for first in (0..shape.queries).step_by(BLOCK) {
                let end = (first + BLOCK).min(shape.queries);
                let (rows, keys) = (end - first, task.visible(end));
                let seen = keys.next_multiple_of(PAD);
                copy(q.slice(s![first..end, ..]), q_block, padded, scale * LOG2_E);
                copy(d_o.slice(s![first..end, ..]), do_block, padded, 1.0);
                copy(o.slice(s![first..end, ..]), o_block, padded, 1.0);
                product(
                    [rows, seen, width],
                    Left::Rows(q_block, padded),
                    (kt, stride),
                    (p, stride),
                    Accumulate::Overwrite,
                );
                product(
                    [rows, seen, width],
                    Left::Rows(do_block, padded),
                    (vt, stride),
                    (ds, stride),
                    Accumulate::Overwrite,
                );
                if let Some(dropout) = dropout {
                    task.drop_rows(first..end, dropout, ds, stride);
                }
                vectorized(
                    #[inline(always)]
                    || {
                        let blocks =
                            do_block.chunks_exact(padded).zip(o_block.chunks_exact(padded));
                        let squares = p.chunks_exact_mut(stride).zip(ds.chunks_exact_mut(stride));
                        for (row, ((p, ds), (d_o, o))) in squares.zip(blocks).take(rows).enumerate()
                        {
                            let projection = math::sum2(d_o, o, |d_o, o| d_o * o);
                            gradient_row(
                                &mut p[..seen],
                                &mut ds[..seen],
                                task.visible(first + row + 1),
                                lse[first + row],
                                projection,
                            );
                        }
                    },
                );
                if let Some(dropout) = dropout {
                    task.drop_rows(first..end, dropout, p, stride);
                }
                product(
                    [keys, padded, rows],
                    Left::Columns(p, stride),
                    (do_block, padded),
                    (dv_head, padded),
                    Accumulate::Add,
                );
                product(
                    [keys, padded, rows],
                    Left::Columns(ds, stride),
                    (q_block, padded),
                    (dk_head, padded),
                    Accumulate::Add,
                );
                product(
                    [rows, padded, keys],
                    Left::Rows(ds, stride),
                    (k_head, padded),
                    (o_block, padded),
                    Accumulate::Overwrite,
                );
                paste(o_block, padded, dq.slice_mut(s![first..end, ..]), |_| scale);
            }
            // The queries were scaled by log2(e).
            paste(dk_head, padded, dk, |_| LN_2);
            paste(dv_head, padded, dv, |_| 1.0);
        },
    );
}

/// Replaces the scores `p` by probabilities, and `ds`, the gradient of the probabilities, by that
/// of the scores. Both become 0 from `visible` on. The lengths are multiples of [`PAD`].
#[inline(always)]
fn gradient_row(p: &mut [f32], ds: &mut [f32], visible: usize, lse: f32, projection: f32) {
    // If nothing is visible, the log-sum-exp is -infinity.
    let lse = (lse * LOG2_E).max(f32::MIN);
    let mut left = visible as i32;
    for (p, ds) in p.as_chunks_mut::<PAD>().0.iter_mut().zip(ds.as_chunks_mut::<PAD>().0) {
        for (lane, (p, ds)) in p.iter_mut().zip(ds).enumerate() {
            let score = if (lane as i32) < left { *p } else { f32::NEG_INFINITY };
            *p = math::exp2(score - lse);
            *ds = *p * (*ds - projection);
        }
        left -= PAD as i32;
    }
}

/// to = scale * x, with rows `stride` apart and padded with zeros.
fn copy(x: ArrayView2<'_, f32>, to: &mut [f32], stride: usize, scale: f32) {
    vectorized(
        #[inline(always)]
        || {
            for (row, to) in x.rows().into_iter().zip(to.chunks_exact_mut(stride)) {
                let (to, padding) = to.split_at_mut(row.len());
                padding.fill(0.0);
                match row.as_slice() {
                    Some(row) => to.iter_mut().zip(row).for_each(|(to, &x)| *to = x * scale),
                    None => to.iter_mut().zip(row).for_each(|(to, &x)| *to = x * scale),
                }
            }
        },
    );
}

/// to = x^T, with rows `stride` apart.
fn transpose(x: ArrayView2<'_, f32>, to: &mut [f32], stride: usize) {
    const TOGETHER: usize = 8;
    vectorized(
        #[inline(always)]
        || {
            for (i, rows) in x.axis_chunks_iter(Axis(0), TOGETHER).enumerate() {
                let mut slices = [&[] as &[f32]; TOGETHER];
                for (slice, row) in slices.iter_mut().zip(rows.rows()) {
                    *slice = row.to_slice().unwrap_or_default();
                }
                let turned = to[i * TOGETHER..].chunks_mut(stride).take(x.ncols()).enumerate();
                if slices.iter().all(|slice| slice.len() == x.ncols()) {
                    for (column, to) in turned {
                        to[..TOGETHER].copy_from_slice(&slices.map(|slice| slice[column]));
                    }
                } else {
                    for (column, to) in turned {
                        to.iter_mut().zip(rows.column(column)).for_each(|(to, &x)| *to = x);
                    }
                }
            }
        },
    );
}

/// Row i of to = scale(i) * row i of x; the rows of x are `stride` apart.
fn paste(x: &[f32], stride: usize, mut to: ArrayViewMut2<'_, f32>, scale: impl Fn(usize) -> f32) {
    vectorized(
        #[inline(always)]
        || {
            for (row, (x, mut to)) in x.chunks_exact(stride).zip(to.rows_mut()).enumerate() {
                let scale = scale(row);
                match to.as_slice_mut() {
                    Some(to) => to.iter_mut().zip(x).for_each(|(to, &x)| *to = x * scale),
                    None => to.iter_mut().zip(x).for_each(|(to, &x)| *to = x * scale),
                }
            }
        },
    );
}

/// Calls `work` with buffers of these lengths and arbitrary contents, from one allocation per
/// thread.
fn scratch<const N: usize>(lengths: [usize; N], work: impl FnOnce([&mut [f32]; N])) {
    thread_local! {
        static BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    BUFFER.with_borrow_mut(|buffer| {
        let total = lengths.iter().sum();
        if buffer.len() < total {
            buffer.resize(total, 0.0);
        }
        let mut rest = &mut buffer[..];
        work(
            lengths.map(|length| rest.split_off_mut(..length).expect("the buffer holds them all")),
        );
    });
}
