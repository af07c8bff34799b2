//! Softmax attention, forward and backward, in blocks of query rows.
//!
//! Invariant: one batch element's head is one task, whose query blocks run in order, so the bits depend on no thread count. Scratch is
//! bounded by a few blocks of a head: no `[T, T]` matrix of the batch exists, and the backward computes the probabilities again
//! from the log-sum-exp of their rows. Source: Vaswani et al., arXiv 1706.03762; Dao et al., arXiv 2205.14135.

use std::cell::RefCell;

use faer::{Accum, MatMut, MatRef, Par, linalg::matmul::matmul};
use ndarray::{ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use crate::{Error, dropout::Dropout, math, shape};

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionMask {
    /// Query i sees keys 0 ..= i + (Tk - Tq); none if that is negative: its output is 0 and its log-sum-exp -infinity.
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

    /// Query rows of one block: 64, or fewer for long sequences, so that a block of scores stays near 256 KiB.
    fn block(self) -> usize {
        (65_536 / self.keys.max(1)).clamp(8, 64).min(self.queries.max(1))
    }

    fn check(self, operation: &'static str, rows: usize, d: usize, operands: &[(&'static str, [usize; 2])]) -> Result<(), Error> {
        if self.heads == 0 || d % self.heads != 0 {
            let whole = d / self.heads.max(1) * self.heads;
            return Err(Error::Shape { operation, operand: "q", expected: [rows, whole], found: [rows, d] });
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

/// For each batch element and head: S = Q K^T / sqrt(head width), P = softmax(S) over the visible keys, O = dropout(P) V.
///
/// q, o `[batch * Tq, d]`, k, v `[batch * Tk, d]`; head h owns columns h * d / heads and on. Rows may be further apart than their length
/// (column slices of one matrix). lse `[batch * heads, Tq]` = ln sum e^S. Dropout numbers the elements of P as
/// `[batch, heads, Tq, Tk]`.
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
    let operands = [("q", shape::of(&q)), ("k", shape::of(&k)), ("v", shape::of(&v)), ("o", shape::of(&o)), ("lse", shape::of(&lse))];
    shape.check("attention_forward", q.nrows(), d, &operands)?;
    if o.is_empty() {
        return Ok(());
    }
    let width = d / shape.heads;
    let o = heads_mut(o.view_mut(), shape.queries, width);
    let tasks: Vec<_> = o.into_iter().zip(lse.rows_mut()).enumerate().collect();
    tasks.into_par_iter().for_each(|(task, (o, lse))| {
        let inputs =
            [head(q, task, shape.heads, shape.queries), head(k, task, shape.heads, shape.keys), head(v, task, shape.heads, shape.keys)];
        forward_head(shape, task, inputs, o, lse, dropout);
    });
    Ok(())
}

/// The gradient of [`attention_forward`], with its o and lse and the same dropout: dq, dk, dv are overwritten.
///
/// With D_i = sum of dO_i * O_i: dP = dO V^T, dS = P (dP - D), dV = P^T dO, dQ = dS K / sqrt(head width), dK = dS^T Q / sqrt(head width).
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
    let (dq, dk) = (heads_mut(dq.view_mut(), shape.queries, width), heads_mut(dk.view_mut(), shape.keys, width));
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
        backward_head(shape, task, inputs, lse.as_slice().expect("standard layout"), [dq, dk, dv], dropout);
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
    let (width, block) = (q.ncols(), shape.block());
    scratch([shape.keys * width, shape.keys * width, block * width, block * shape.keys], |[k_head, v_head, block_head, scores]| {
        copy(k, k_head, 1.0);
        copy(v, v_head, 1.0);
        for first in (0..shape.queries).step_by(block) {
            let end = (first + block).min(shape.queries);
            let (rows, keys) = (end - first, shape.visible(end));
            let (small, scores) = (&mut block_head[..rows * width], &mut scores[..rows * keys]);
            if keys > 0 {
                copy(q.slice(s![first..end, ..]), small, (width as f32).sqrt().recip());
                product(scores, Accum::Replace, by_rows(small, width), by_rows(&k_head[..keys * width], width).transpose());
            }
            for row in 0..rows {
                let (visible, at) = (shape.visible(first + row + 1), first + row);
                let scores = &mut scores[row * keys..(row + 1) * keys];
                lse[at] = math::vectorised(
                    #[inline(always)]
                    || softmax(scores, visible),
                );
                if let Some(dropout) = dropout {
                    dropout.apply(((task * shape.queries + at) * shape.keys) as u64, &mut scores[..visible]);
                }
            }
            product(small, Accum::Replace, by_rows_of(scores, rows), by_rows(&v_head[..keys * width], width));
            paste(small, o.slice_mut(s![first..end, ..]), 1.0);
        }
    });
}

/// Probabilities of the first `visible` scores, 0 for the others; returns the log-sum-exp.
#[inline(always)]
fn softmax(scores: &mut [f32], visible: usize) -> f32 {
    let (seen, unseen) = scores.split_at_mut(visible);
    unseen.fill(0.0);
    let maximum = math::maximum(seen);
    for score in seen.iter_mut() {
        *score = math::exp(*score - maximum);
    }
    let sum = math::reduce([seen], |[x]| x);
    let inverse = 1.0 / sum;
    for score in seen.iter_mut() {
        *score *= inverse;
    }
    maximum + sum.ln()
}

fn backward_head(
    shape: AttentionShape,
    task: usize,
    [q, k, v, o, d_o]: [ArrayView2<'_, f32>; 5],
    lse: &[f32],
    [mut dq, dk, dv]: [ArrayViewMut2<'_, f32>; 3],
    dropout: Option<&Dropout>,
) {
    let (width, block) = (q.ncols(), shape.block());
    let scale = (width as f32).sqrt().recip();
    let (head, small, square) = (shape.keys * width, block * width, block * shape.keys);
    scratch(
        [head, head, head, head, small, small, small, square, square],
        |[k_head, v_head, dk_head, dv_head, q_block, do_block, o_block, p, ds]| {
            copy(k, k_head, 1.0);
            copy(v, v_head, 1.0);
            dk_head.fill(0.0);
            dv_head.fill(0.0);
            for first in (0..shape.queries).step_by(block) {
                let end = (first + block).min(shape.queries);
                let (rows, keys) = (end - first, shape.visible(end));
                if keys == 0 {
                    dq.slice_mut(s![first..end, ..]).fill(0.0);
                    continue;
                }
                let (q_block, do_block, o_block) =
                    (&mut q_block[..rows * width], &mut do_block[..rows * width], &mut o_block[..rows * width]);
                let (p, ds) = (&mut p[..rows * keys], &mut ds[..rows * keys]);
                copy(q.slice(s![first..end, ..]), q_block, scale);
                copy(d_o.slice(s![first..end, ..]), do_block, 1.0);
                copy(o.slice(s![first..end, ..]), o_block, 1.0);
                product(p, Accum::Replace, by_rows(q_block, width), by_rows(&k_head[..keys * width], width).transpose());
                product(ds, Accum::Replace, by_rows(do_block, width), by_rows(&v_head[..keys * width], width).transpose());
                for row in 0..rows {
                    let (visible, at) = (shape.visible(first + row + 1), first + row);
                    let run = row * keys..(row + 1) * keys;
                    let (p, ds) = (&mut p[run.clone()], &mut ds[run]);
                    if let Some(dropout) = dropout {
                        dropout.apply(((task * shape.queries + at) * shape.keys) as u64, &mut ds[..visible]);
                    }
                    let element = row * width..(row + 1) * width;
                    math::vectorised(
                        #[inline(always)]
                        || {
                            let projection = math::reduce([&do_block[element.clone()], &o_block[element.clone()]], |[d_o, o]| d_o * o);
                            gradient_row(p, ds, visible, lse[at], projection);
                        },
                    );
                    if let Some(dropout) = dropout {
                        dropout.apply(((task * shape.queries + at) * shape.keys) as u64, &mut p[..visible]);
                    }
                }
                product(&mut dv_head[..keys * width], Accum::Add, by_rows_of(p, rows).transpose(), by_rows(do_block, width));
                product(&mut dk_head[..keys * width], Accum::Add, by_rows_of(ds, rows).transpose(), by_rows(q_block, width));
                product(o_block, Accum::Replace, by_rows_of(ds, rows), by_rows(&k_head[..keys * width], width));
                paste(o_block, dq.slice_mut(s![first..end, ..]), scale);
            }
            paste(dk_head, dk, 1.0);
            paste(dv_head, dv, 1.0);
        },
    );
}

/// p: scores in, probabilities out; ds: gradient of the probabilities in, of the scores out. Both are 0 from `visible` on.
#[inline(always)]
fn gradient_row(p: &mut [f32], ds: &mut [f32], visible: usize, lse: f32, projection: f32) {
    p[visible..].fill(0.0);
    ds[visible..].fill(0.0);
    for (p, ds) in p[..visible].iter_mut().zip(&mut ds[..visible]) {
        *p = math::exp(*p - lse);
        *ds = *p * (*ds - projection);
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

fn copy(x: ArrayView2<'_, f32>, to: &mut [f32], scale: f32) {
    for (row, to) in x.rows().into_iter().zip(to.chunks_exact_mut(x.ncols())) {
        for (&x, to) in row.iter().zip(to) {
            *to = x * scale;
        }
    }
}

fn paste(x: &[f32], mut to: ArrayViewMut2<'_, f32>, scale: f32) {
    let width = to.ncols();
    for (x, mut to) in x.chunks_exact(width).zip(to.rows_mut()) {
        for (&x, to) in x.iter().zip(&mut to) {
            *to = x * scale;
        }
    }
}

fn by_rows(x: &[f32], columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(x, x.len() / columns, columns)
}

fn by_rows_of(x: &[f32], rows: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(x, rows, x.len() / rows)
}

fn product(c: &mut [f32], beta: Accum, a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    matmul(MatMut::from_row_major_slice_mut(c, a.nrows(), b.ncols()), beta, a, b, 1.0, Par::Seq);
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
        work(lengths.map(|length| rest.split_off_mut(..length).expect("the buffer holds them all")));
    });
}
