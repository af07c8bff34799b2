//! Softmax attention, forward and backward, in blocks of query rows.
//!
//! Invariant: one batch element's head is one task, whose query blocks run in order, so the bits
//! depend on no thread count. Scratch is bounded by a few blocks of a head: no `[T, T]` matrix of
//! the batch exists, and the backward computes the probabilities again from the log-sum-exp of
//! their rows. Scores are kept in units of ln 2, so that their exponentials are powers of two.
//! Source: Vaswani et al., arXiv 1706.03762; Dao et al., arXiv 2205.14135.

use std::{
    cell::RefCell,
    f32::consts::{LN_2, LOG2_E},
    ops::Range,
};

use ndarray::{ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use crate::{
    Error,
    dropout::Dropout,
    gemm::Beta,
    math,
    registers::{PAD, Product},
    shape,
};

/// Query rows of one block.
const BLOCK: usize = 16;

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionMask {
    /// Query i sees keys 0 ..= i + (Tk - Tq); none if that is negative: its output is 0 and its
    /// log-sum-exp -infinity.
    Causal,
    /// Every query sees every key.
    Full,
}

/// The lengths that the matrices do not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Heads, side by side in the columns.
    pub heads: usize,
    /// Query rows a sequence, Tq.
    pub queries: usize,
    /// Key rows a sequence, Tk.
    pub keys: usize,
    /// Which keys a query sees.
    pub mask: AttentionMask,
}

impl AttentionShape {
    /// How many keys, from the first on, the queries before `end` see.
    fn visible(self, end: usize) -> usize {
        match self.mask {
            AttentionMask::Full => self.keys,
            AttentionMask::Causal => (end + self.keys).saturating_sub(self.queries).min(self.keys),
        }
    }

    /// Elements from one row of scores to the next: never a large power of two, whose rows would
    /// share cache lines.
    fn score_stride(self) -> usize {
        self.keys.next_multiple_of(PAD) + PAD
    }

    fn check(
        self,
        operation: &'static str,
        rows: usize,
        d: usize,
        operands: &[(&'static str, [usize; 2])],
    ) -> Result<(), Error> {
        if self.heads == 0 || !d.is_multiple_of(self.heads) {
            let whole = d / self.heads.max(1) * self.heads;
            return Err(Error::Shape {
                operation,
                operand: "q",
                expected: [rows, whole],
                found: [rows, d],
            });
        }
        operands.iter().try_for_each(|&(operand, found)| {
            let expected = match operand {
                "k" | "v" | "dk" | "dv" => [self.batch * self.keys, d],
                "lse" => [self.batch * self.heads, self.queries],
                _ => [self.batch * self.queries, d],
            };
            shape::check(operation, operand, expected, found)
        })
    }
}

/// For each batch element and head: S = Q K^T / sqrt(head width), P = softmax(S) over the visible
/// keys, O = dropout(P) V.
///
/// q, o `[batch * Tq, d]`, k, v `[batch * Tk, d]`; head h owns columns h * d / heads and on. Rows
/// may be further apart than their length (column slices of one matrix). lse `[batch * heads, Tq]`
/// = ln sum e^S. Dropout numbers the elements of P as `[batch, heads, Tq, Tk]`.
///
/// # Errors
/// [`Error::Shape`] if the heads do not divide d or an operand does not fit.
pub fn attention_forward(
    shape: AttentionShape,
    q: ArrayView2<'_, f32>,
    k: ArrayView2<'_, f32>,
    v: ArrayView2<'_, f32>,
    mut o: ArrayViewMut2<'_, f32>,
    mut lse: ArrayViewMut2<'_, f32>,
    dropout: Option<&Dropout>,
) -> Result<(), Error> {
    let d = q.ncols();
    let operands = [
        ("q", shape::of(&q)),
        ("k", shape::of(&k)),
        ("v", shape::of(&v)),
        ("o", shape::of(&o)),
        ("lse", shape::of(&lse)),
    ];
    shape.check("attention_forward", q.nrows(), d, &operands)?;
    if o.is_empty() {
        return Ok(());
    }
    let width = d / shape.heads;
    let o = heads_mut(o.view_mut(), shape.queries, width);
    let tasks: Vec<_> = o.into_iter().zip(lse.rows_mut()).enumerate().collect();
    tasks.into_par_iter().for_each(|(task, (o, lse))| {
        let inputs = [
            head(q, task, shape.heads, shape.queries),
            head(k, task, shape.heads, shape.keys),
            head(v, task, shape.heads, shape.keys),
        ];
        forward_head(shape, task, inputs, o, lse, dropout);
    });
    Ok(())
}

/// The gradient of [`attention_forward`], with its o and lse and the same dropout: dq, dk, dv are
/// overwritten.
///
/// With D_i = sum of dO_i * O_i: dP = dO V^T, dS = P (dP - D), dV = P^T dO, dQ = dS K / sqrt(head
/// width), dK = dS^T Q / sqrt(head width).
///
/// # Errors
/// As [`attention_forward`].
#[expect(clippy::too_many_arguments, reason = "an equation of nine operands")]
pub fn attention_backward(
    shape: AttentionShape,
    q: ArrayView2<'_, f32>,
    k: ArrayView2<'_, f32>,
    v: ArrayView2<'_, f32>,
    o: ArrayView2<'_, f32>,
    lse: ArrayView2<'_, f32>,
    d_o: ArrayView2<'_, f32>,
    mut dq: ArrayViewMut2<'_, f32>,
    mut dk: ArrayViewMut2<'_, f32>,
    mut dv: ArrayViewMut2<'_, f32>,
    dropout: Option<&Dropout>,
) -> Result<(), Error> {
    let d = q.ncols();
    let operands = [
        ("q", shape::of(&q)),
        ("k", shape::of(&k)),
        ("v", shape::of(&v)),
        ("o", shape::of(&o)),
        ("lse", shape::of(&lse)),
        ("d_o", shape::of(&d_o)),
        ("dq", shape::of(&dq)),
        ("dk", shape::of(&dk)),
        ("dv", shape::of(&dv)),
    ];
    shape.check("attention_backward", q.nrows(), d, &operands)?;
    let width = d / shape.heads;
    if width == 0 || shape.batch == 0 {
        return Ok(());
    }
    if shape.queries == 0 || shape.keys == 0 {
        dq.fill(0.0);
        dk.fill(0.0);
        dv.fill(0.0);
        return Ok(());
    }
    let (dq, dk) = (
        heads_mut(dq.view_mut(), shape.queries, width),
        heads_mut(dk.view_mut(), shape.keys, width),
    );
    let dv = heads_mut(dv.view_mut(), shape.keys, width);
    let tasks: Vec<_> = dq.into_iter().zip(dk).zip(dv).enumerate().collect();
    tasks.into_par_iter().for_each(|(task, ((dq, dk), dv))| {
        let inputs = [
            head(q, task, shape.heads, shape.queries),
            head(k, task, shape.heads, shape.keys),
            head(v, task, shape.heads, shape.keys),
            head(o, task, shape.heads, shape.queries),
            head(d_o, task, shape.heads, shape.queries),
        ];
        let lse = lse.row(task);
        let lse = lse.as_standard_layout();
        backward_head(
            shape,
            task,
            inputs,
            lse.as_slice().expect("standard layout"),
            [dq, dk, dv],
            dropout,
        );
    });
    Ok(())
}

fn forward_head(
    shape: AttentionShape,
    task: usize,
    [q, k, v]: [ArrayView2<'_, f32>; 3],
    mut o: ArrayViewMut2<'_, f32>,
    mut lse: ArrayViewMut1<'_, f32>,
    dropout: Option<&Dropout>,
) {
    let (width, padded, stride) =
        (q.ncols(), q.ncols().next_multiple_of(PAD), shape.score_stride());
    let scale = (width as f32).sqrt().recip();
    scratch(
        [width * stride, shape.keys * padded, BLOCK * padded, BLOCK * padded, BLOCK * stride],
        |[kt, v_head, q_block, o_block, scores]| {
            transpose(k, kt, stride);
            copy(v, v_head, padded, 1.0);
            for first in (0..shape.queries).step_by(BLOCK) {
                let end = (first + BLOCK).min(shape.queries);
                let (rows, keys) = (end - first, shape.visible(end));
                copy(q.slice(s![first..end, ..]), q_block, padded, scale * LOG2_E);
                let seen = keys.next_multiple_of(PAD);
                product(
                    [rows, seen, width],
                    (q_block, [padded, 1]),
                    (kt, stride),
                    (scores, stride),
                    Beta::Overwrite,
                );
                let (mut maxima, mut inverses) = ([0.0; BLOCK], [0.0; BLOCK]);
                math::vectorised(
                    #[inline(always)]
                    || {
                        for (row, scores) in scores.chunks_exact_mut(stride).take(rows).enumerate()
                        {
                            maxima[row] = hide(&mut scores[..seen], shape.visible(first + row + 1));
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
                drop_rows(dropout, shape, task, first..end, scores, stride);
                product(
                    [rows, padded, keys],
                    (scores, [stride, 1]),
                    (v_head, padded),
                    (o_block, padded),
                    Beta::Overwrite,
                );
                paste(o_block, padded, o.slice_mut(s![first..end, ..]), |row| inverses[row]);
            }
        },
    );
}

/// Scores from `visible` on become -infinity; returns the largest. The length is a multiple of
/// [`PAD`].
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

/// Scores become 2^(score - maximum), 0 if all are -infinity; returns their sum. The length is a
/// multiple of [`PAD`].
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
    shape: AttentionShape,
    task: usize,
    [q, k, v, o, d_o]: [ArrayView2<'_, f32>; 5],
    lse: &[f32],
    [mut dq, dk, dv]: [ArrayViewMut2<'_, f32>; 3],
    dropout: Option<&Dropout>,
) {
    let (width, padded, stride) =
        (q.ncols(), q.ncols().next_multiple_of(PAD), shape.score_stride());
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
                let (rows, keys) = (end - first, shape.visible(end));
                let seen = keys.next_multiple_of(PAD);
                copy(q.slice(s![first..end, ..]), q_block, padded, scale * LOG2_E);
                copy(d_o.slice(s![first..end, ..]), do_block, padded, 1.0);
                copy(o.slice(s![first..end, ..]), o_block, padded, 1.0);
                product(
                    [rows, seen, width],
                    (q_block, [padded, 1]),
                    (kt, stride),
                    (p, stride),
                    Beta::Overwrite,
                );
                product(
                    [rows, seen, width],
                    (do_block, [padded, 1]),
                    (vt, stride),
                    (ds, stride),
                    Beta::Overwrite,
                );
                drop_rows(dropout, shape, task, first..end, ds, stride);
                math::vectorised(
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
                                shape.visible(first + row + 1),
                                lse[first + row],
                                projection,
                            );
                        }
                    },
                );
                drop_rows(dropout, shape, task, first..end, p, stride);
                product(
                    [keys, padded, rows],
                    (p, [1, stride]),
                    (do_block, padded),
                    (dv_head, padded),
                    Beta::Accumulate,
                );
                product(
                    [keys, padded, rows],
                    (ds, [1, stride]),
                    (q_block, padded),
                    (dk_head, padded),
                    Beta::Accumulate,
                );
                product(
                    [rows, padded, keys],
                    (ds, [stride, 1]),
                    (k_head, padded),
                    (o_block, padded),
                    Beta::Overwrite,
                );
                paste(o_block, padded, dq.slice_mut(s![first..end, ..]), |_| scale);
            }
            // The queries carry log2(e).
            paste(dk_head, padded, dk, |_| LN_2);
            paste(dv_head, padded, dv, |_| 1.0);
        },
    );
}

/// p: scores in, probabilities out; ds: gradient of the probabilities in, of the scores out. Both
/// become 0 from `visible` on. The lengths are multiples of [`PAD`].
#[inline(always)]
fn gradient_row(p: &mut [f32], ds: &mut [f32], visible: usize, lse: f32, projection: f32) {
    // Where nothing is visible the log-sum-exp is -infinity.
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

/// Drops from the rows of some queries what the stream says.
fn drop_rows(
    dropout: Option<&Dropout>,
    shape: AttentionShape,
    task: usize,
    queries: Range<usize>,
    scores: &mut [f32],
    stride: usize,
) {
    let Some(dropout) = dropout else { return };
    for (query, scores) in queries.zip(scores.chunks_exact_mut(stride)) {
        let first = (task * shape.queries + query) * shape.keys;
        dropout.apply(first as u64, &mut scores[..shape.visible(query + 1)]);
    }
}

/// Disjoint views of every batch element's heads, in task order.
fn heads_mut(x: ArrayViewMut2<'_, f32>, rows: usize, width: usize) -> Vec<ArrayViewMut2<'_, f32>> {
    let mut views = Vec::new();
    let (mut rest, d) = (x, width);
    while rest.nrows() > 0 {
        let (sequence, after) = rest.split_at(Axis(0), rows);
        let mut columns = sequence;
        while columns.ncols() > 0 {
            let (head, others) = columns.split_at(Axis(1), d);
            views.push(head);
            columns = others;
        }
        rest = after;
    }
    views
}

/// The rows and columns of one task.
fn head(x: ArrayView2<'_, f32>, task: usize, heads: usize, rows: usize) -> ArrayView2<'_, f32> {
    let width = x.ncols() / heads;
    let (sequence, column) = (task / heads * rows, task % heads * width);
    x.slice_move(s![sequence..sequence + rows, column..column + width])
}

/// to = scale * x, rows `stride` apart and padded with zeros.
fn copy(x: ArrayView2<'_, f32>, to: &mut [f32], stride: usize, scale: f32) {
    math::vectorised(
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

/// to = x^T, rows `stride` apart.
fn transpose(x: ArrayView2<'_, f32>, to: &mut [f32], stride: usize) {
    const TOGETHER: usize = 8;
    math::vectorised(
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

/// Row i of to = scale(i) * row i of x, where the rows of x are `stride` apart.
fn paste(x: &[f32], stride: usize, mut to: ArrayViewMut2<'_, f32>, scale: impl Fn(usize) -> f32) {
    math::vectorised(
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

fn product(
    shape: [usize; 3],
    (a, a_strides): (&[f32], [usize; 2]),
    (b, b_stride): (&[f32], usize),
    (c, c_stride): (&mut [f32], usize),
    beta: Beta,
) {
    Product { shape, a, a_strides, b, b_stride, c, c_stride, beta }.run();
}

/// Lends buffers of these lengths, whose contents are arbitrary, from one allocation a thread.
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
