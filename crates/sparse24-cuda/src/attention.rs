//! Softmax attention, forward and backward, without a `[Tq, Tk]` matrix in memory.
//!
//! Every sum has a fixed order, so the bits depend on the operands alone. The backward pass
//! recomputes the probabilities from the log-sum-exp of their rows.
//! Sources: Vaswani et al., arXiv 1706.03762; Dao, arXiv 2307.08691.

use half::bf16;
use sparse24_core::op::{AttentionMask, AttentionShape, Dropout};

use crate::{
    Device, Error, Matrix, Result,
    device::Checks,
    dropout::MAX_ELEMENTS,
    kernels,
    launch::{Argument, Grid, arguments},
};

/// o = dropout(softmax(mask(q k^T / sqrt(head_dim)))) v for every sequence and head.
///
/// d = heads * head_dim; head h owns columns h * head_dim and on. A query that sees no key gets
/// o = 0 and lse = -infinity.
#[derive(Debug, Clone, Copy)]
pub struct AttentionForward {
    /// Sizes and mask; head_dim is a multiple of 8, at most [`MAX_HEAD_WIDTH`].
    pub shape: AttentionShape,
    /// Queries `[batch * Tq, d]`. Like k and v, often a column range of a wider matrix.
    pub q: Matrix<bf16>,
    /// Keys `[batch * Tk, d]`.
    pub k: Matrix<bf16>,
    /// Values `[batch * Tk, d]`.
    pub v: Matrix<bf16>,
    /// Key padding `[batch, 1]`: the queries of sequence b see at most its first `lengths[b]` keys.
    pub lengths: Option<Matrix<u32>>,
    /// Dropout of the probabilities, numbered as `[batch, heads, Tq, Tk]`.
    pub dropout: Option<AttentionDropout>,
    /// Output `[batch * Tq, d]`, overwritten.
    pub o: Matrix<bf16>,
    /// Log-sum-exp of the scores `[batch * heads, Tq]`, contiguous, overwritten.
    pub lse: Matrix<f32>,
}

/// Dropout of attention probabilities; the forward pass draws it and the backward pass reuses it.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDropout {
    /// Probability and random stream.
    pub drawn: Dropout,
    /// Which probabilities are kept `[batch * heads, shape.tile_words()]`, contiguous: written by
    /// the forward pass and read by the backward pass.
    pub kept: Matrix<u32>,
}

/// The gradient of [`AttentionForward`]. Keys beyond a sequence's length get zero gradients.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackward {
    /// The operands of the forward pass, with `o` and `lse` as it left them.
    pub forward: AttentionForward,
    /// Gradient of o `[batch * Tq, d]`.
    pub d_o: Matrix<bf16>,
    /// Gradient of q `[batch * Tq, d]`, overwritten. dq, dk and dv may be column ranges of one
    /// matrix.
    pub dq: Matrix<bf16>,
    /// Gradient of k `[batch * Tk, d]`, overwritten.
    pub dk: Matrix<bf16>,
    /// Gradient of v `[batch * Tk, d]`, overwritten.
    pub dv: Matrix<bf16>,
    /// Scratch of shape [`backward_scratch`], contiguous.
    pub scratch: Matrix<f32>,
}

/// The widest head.
pub const MAX_HEAD_WIDTH: usize = 128;
/// The widest head of the narrow kernels.
const NARROW: usize = 64;
/// Rows of a slab in shared memory, and rows that a block owns.
const ROWS: usize = 64;
/// Slabs for streamed operands: two matrices, with one slab in use and one being prefetched.
const STREAMED: usize = 4;

/// The shape of the backward pass's scratch: per query, the log-sum-exp in base 2 and the sum of
/// dO * O.
#[must_use]
pub const fn backward_scratch(shape: AttentionShape) -> [usize; 2] {
    [shape.batch * shape.heads, 2 * shape.queries]
}

/// Queues an [`AttentionForward`]. Sums are f32; probabilities are rounded to bf16 before they
/// multiply the values.
///
/// # Errors
/// [`Error::Shape`]; [`Error::OutOfRange`] for a dropout probability outside [0, 1);
/// [`Error::Alignment`] unless rows and heads are 16-byte aligned; [`Error::TooLarge`],
/// [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
pub fn attention_forward(device: &mut Device, op: &AttentionForward) -> Result {
    const OPERATION: &str = "attention forward";
    let (mut checks, [of_queries, _]) = op.check(device, OPERATION)?;
    let AttentionForward { shape, q, k, v, o, lse, .. } = *op;
    checks.limit(STRIDE, o.stride(), MAX_STRIDE)?.strided_output("o", o, of_queries, 16)?.output(
        "lse",
        lse,
        [shape.batch * shape.heads, shape.queries],
        4,
    )?;
    let entry = op.entry("forward", "");
    let mut arguments = arguments![q, k, v, o, lse].to_vec();
    arguments.extend([q, k, v, o].map(stride));
    arguments.extend(op.common(device));
    device.launch(entry, op.grid(shape.queries, 1 + STREAMED), &arguments)
}

/// Queues an [`AttentionBackward`]:
///
/// ```text
/// dP = dO V^T    dS = P * (dropout(dP) - rowsum(dO * O))
/// dV = dropout(P)^T dO    dQ = dS K / sqrt(head_dim)    dK = dS^T Q / sqrt(head_dim)
/// ```
///
/// P and dS are rounded to bf16 as operands; sums are f32.
///
/// # Errors
/// See [`attention_forward`].
pub fn attention_backward(device: &mut Device, op: &AttentionBackward) -> Result {
    const OPERATION: &str = "attention backward";
    let AttentionBackward { forward, d_o, dq, dk, dv, scratch } = *op;
    let (mut inputs, [of_queries, of_keys]) = forward.check(device, OPERATION)?;
    let AttentionForward { shape, q, k, v, o, lse, .. } = forward;
    inputs
        .strided("o", o, of_queries, 16)?
        .strided("d_o", d_o, of_queries, 16)?
        .input("lse", lse, [shape.batch * shape.heads, shape.queries], 4)?
        .output("scratch", scratch, backward_scratch(shape), 4)?;
    for matrix in [o, d_o, dq, dk, dv] {
        inputs.limit(STRIDE, matrix.stride(), MAX_STRIDE)?;
    }
    let gradients = [("dq", dq, of_queries), ("dk", dk, of_keys), ("dv", dv, of_keys)];
    for (i, &(output, matrix, shape)) in gradients.iter().enumerate() {
        let mut checks = inputs.clone();
        for &(other, earlier, shape) in &gradients[..i] {
            if !side_by_side(matrix, earlier) {
                checks.strided(other, earlier, shape, 16)?;
            }
        }
        checks.strided_output(output, matrix, shape, 16)?;
    }
    let [of_queries, of_keys] =
        ["_queries", "_keys"].map(|kernel| forward.entry("backward", kernel));
    // Besides the slabs, two floats for each query at hand.
    let grid = |rows: usize, queries: usize| {
        let grid = forward.grid(rows, 2 + STREAMED);
        Grid { shared: grid.shared + (queries * 2 * size_of::<f32>()) as u32, ..grid }
    };
    let common = forward.common(device);
    let mut arguments = arguments![q, k, v, o, d_o, lse, scratch, dq].to_vec();
    arguments.extend([q, k, v, o, d_o, dq].map(stride));
    arguments.extend(common);
    device.launch(of_queries, grid(shape.queries, ROWS), &arguments)?;
    let mut arguments = arguments![q, k, v, d_o, scratch, dk, dv].to_vec();
    arguments.extend([q, k, v, d_o, dk, dv].map(stride));
    arguments.extend(common);
    // For wide heads, dk and dv are computed by different blocks, since registers are short.
    let mut grid = grid(shape.keys, 2 * ROWS);
    grid.blocks[1] = if forward.width() <= NARROW { 1 } else { 2 };
    device.launch(of_keys, grid, &arguments)
}

const STRIDE: &str = "elements from row to row";
const MAX_STRIDE: usize = 1 << 24;

impl AttentionForward {
    fn width(&self) -> usize {
        self.q.shape()[1] / self.shape.heads.max(1)
    }

    /// The kernel of a pass for this head width, dropout and lengths.
    fn entry(&self, pass: &str, kernel: &str) -> &'static str {
        let dropout = if self.dropout.is_some() { "_dropout" } else { "" };
        let width = if self.width() <= NARROW { NARROW } else { MAX_HEAD_WIDTH };
        let lengths = if self.lengths.is_some() { "_lengths" } else { "" };
        kernels::entry(&format!("attention_{pass}{dropout}_{width}{lengths}{kernel}"))
    }

    /// A block for each [`ROWS`] of the `rows` of every head, with this many slabs.
    fn grid(&self, rows: usize, slabs: usize) -> Grid {
        let width = if self.width() <= NARROW { NARROW } else { MAX_HEAD_WIDTH };
        let heads = if self.width() == 0 { 0 } else { self.shape.batch * self.shape.heads };
        let shared = (slabs * ROWS * width * size_of::<bf16>()) as u32;
        Grid { shared, ..Grid::line(heads * rows.div_ceil(ROWS), 128) }
    }

    /// Checks the inputs of both passes; returns the shapes of queries and of keys too.
    fn check<'a>(
        &self,
        device: &'a Device,
        operation: &'static str,
    ) -> Result<(Checks<'a>, [[usize; 2]; 2])> {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let ([rows, d], width) = (self.q.shape(), self.width());
        if d != heads * width {
            let (expected, found) = ([rows, heads * width], [rows, d]);
            return Err(Error::Shape { operation, operand: "q", expected, found });
        }
        let (of_queries, of_keys) = ([batch * queries, d], [batch * keys, d]);
        let mut checks = device.checks(operation);
        checks
            .strided("q", self.q, of_queries, 16)?
            .strided("k", self.k, of_keys, 16)?
            .strided("v", self.v, of_keys, 16)?
            .optional("lengths", self.lengths, [batch, 1], 4)?;
        if !width.is_multiple_of(8) {
            return Err(Error::Alignment { operation, operand: "every head of q", bytes: 16 });
        }
        if let Some(AttentionDropout { drawn, kept }) = self.dropout {
            checks
                .below_one("the dropout probability", drawn.p)?
                .limit(
                    "the number of probabilities with dropout",
                    batch * heads * queries * keys,
                    MAX_ELEMENTS,
                )?
                .output("kept", kept, [batch * heads, self.shape.tile_words()], 4)?;
        }
        checks
            .limit("the head width", width, MAX_HEAD_WIDTH)?
            .limit("the number of queries", queries, 1 << 28)?
            .limit("the number of keys", keys, 1 << 28)?;
        for matrix in [self.q, self.k, self.v] {
            checks.limit(STRIDE, matrix.stride(), MAX_STRIDE)?;
        }
        Ok((checks, [of_queries, of_keys]))
    }

    /// The arguments that all kernels share.
    fn common(&self, device: &Device) -> [Argument; 11] {
        let AttentionShape { heads, queries, keys, mask, .. } = self.shape;
        let diagonal = match mask {
            AttentionMask::Causal => (keys as u32).wrapping_sub(queries as u32),
            AttentionMask::Full => keys as u32,
        };
        let (state, site, p) = match self.dropout {
            Some(AttentionDropout { drawn: Dropout { p, site }, .. }) => {
                (device.state(), site.word(), p)
            }
            None => (Argument::U64(0), 0, 0.0),
        };
        let kept = self.dropout.map(|dropout| dropout.kept);
        let (width, scale) = (self.width() as u32, (self.width() as f32).sqrt().recip());
        let [heads, queries, keys] = [heads, queries, keys].map(|length| length as u32);
        let lengths = self.lengths;
        arguments![heads, queries, keys, width, diagonal, scale, state, site, p, kept, lengths]
    }
}

fn stride(matrix: Matrix<bf16>) -> Argument {
    Argument::U32(u32::try_from(matrix.stride()).expect("strides were checked"))
}

/// Whether two matrices are disjoint column ranges of one matrix.
fn side_by_side(a: Matrix<bf16>, b: Matrix<bf16>) -> bool {
    let (row, size) = (a.stride() * size_of::<bf16>(), size_of::<bf16>());
    let apart = (b.address.wrapping_sub(a.address) as i64).rem_euclid(row.max(1) as i64) as usize;
    a.stride() == b.stride() && apart >= a.shape()[1] * size && apart + b.shape()[1] * size <= row
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use super::*;

    #[test]
    fn column_ranges_of_one_matrix_are_side_by_side() {
        let (shape, stride, element) = ([5, 24], 24, PhantomData);
        let whole = Matrix::<bf16> { mark: 0, address: 4096, shape, stride, element };
        let [q, k, v] = [0, 8, 16].map(|first| whole.columns(first..first + 8));
        let across = whole.columns(4..12);
        for (a, b, expected) in [
            (q, k, true),
            (k, q, true),
            (q, v, true),
            (v, k, true),
            (q, q, false),
            (q, across, false),
            (across, q, false),
            (whole, q, false),
        ] {
            assert_eq!(side_by_side(a, b), expected, "{a:?}, {b:?}");
        }
    }
}
