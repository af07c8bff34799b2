//! Softmax attention, forward and backward, with no `[T, T]` matrix in memory.
//!
//! Invariant: every sum has a fixed order, so the bits depend on nothing but the operands. The
//! backward computes the probabilities again from the log-sum-exp of their rows, and dropout from
//! its stream. Source: Vaswani et al., arXiv 1706.03762; Dao, arXiv 2307.08691.

use half::bf16;

use crate::{
    Device, Error, Matrix,
    dropout::{Dropout, MAX_ELEMENTS},
    launch::{Argument, Grid},
    operand::check_packed,
};

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
    /// Heads, side by side in the columns; each is a multiple of 8 wide, at most 128.
    pub heads: usize,
    /// Query rows a sequence, Tq.
    pub queries: usize,
    /// Key rows a sequence, Tk.
    pub keys: usize,
    /// Which keys a query sees.
    pub mask: AttentionMask,
}

/// o = dropout(softmax(mask(q k^T / sqrt(head width)))) v for every sequence and head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionForward {
    /// Lengths and mask.
    pub shape: AttentionShape,
    /// Queries `[batch * Tq, d]`; head h owns columns h * d / heads and on. As k and v, often a
    /// column range of a wider matrix.
    pub q: Matrix<bf16>,
    /// Keys `[batch * Tk, d]`.
    pub k: Matrix<bf16>,
    /// Values `[batch * Tk, d]`.
    pub v: Matrix<bf16>,
    /// On the probabilities, numbered as `[batch, heads, Tq, Tk]`.
    pub dropout: Option<Dropout>,
    /// `[batch * Tq, d]`, overwritten.
    pub o: Matrix<bf16>,
    /// ln of the sums of exponentials `[batch * heads, Tq]`, contiguous, overwritten.
    pub lse: Matrix<f32>,
}

/// The gradient of [`AttentionForward`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackward {
    /// As in the forward; `o` and `lse` as it left them.
    pub forward: AttentionForward,
    /// Gradient of o.
    pub d_o: Matrix<bf16>,
    /// Gradients of q, k, v, overwritten; they may be column ranges of one matrix.
    pub dqkv: [Matrix<bf16>; 3],
    /// Of [`backward_scratch`], contiguous, overwritten.
    pub scratch: Matrix<f32>,
}

/// The shape of the backward's scratch: of every query the log-sum-exp in units of ln 2 and the sum
/// of dO * O.
#[must_use]
pub const fn backward_scratch(shape: AttentionShape) -> [usize; 2] {
    [shape.batch * shape.heads, 2 * shape.queries]
}

/// See [`AttentionForward`]. Sums are f32; probabilities are rounded to bf16 where they meet the
/// values.
///
/// # Errors
/// [`Error::Shape`]; [`Error::OutOfRange`] for a probability of dropout outside of [0, 1);
/// [`Error::Alignment`] unless rows and heads begin at multiples of 16 bytes; [`Error::TooLarge`];
/// [`Error::Alias`]; [`Error::Stale`]; [`Error::Driver`].
pub fn attention_forward(device: &mut Device, op: &AttentionForward) -> Result<(), Error> {
    const OPERATION: &str = "attention forward";
    op.check(device, OPERATION)?;
    let inputs = [("q", op.q.span()), ("k", op.k.span()), ("v", op.v.span())];
    device.check_apart(OPERATION, ("o", op.o.span()), &inputs)?;
    device.check_apart(OPERATION, ("lse", op.lse.span()), &inputs)?;
    device.check_apart(OPERATION, ("lse", op.lse.span()), &[("o", op.o.span())])?;
    let entry = match (op.dropout.is_some(), op.width() <= NARROW) {
        (false, true) => "attention_forward_64",
        (false, false) => "attention_forward_128",
        (true, true) => "attention_forward_dropout_64",
        (true, false) => "attention_forward_dropout_128",
    };
    let mut arguments: Vec<Argument> =
        vec![op.q.into(), op.k.into(), op.v.into(), op.o.into(), op.lse.into()];
    arguments.extend([op.q, op.k, op.v, op.o].map(stride));
    arguments.extend(op.common(device));
    let grid = op.grid(op.shape.queries, 1 + STREAMED);
    device.launch(entry, grid, &arguments)
}

/// See [`AttentionBackward`]. dP = dO V^T, dS = P (dropout(dP) - sum of dO * O), dV = dropout(P)^T
/// dO, dQ = dS K / sqrt(head width), dK = dS^T Q / sqrt(head width); P and dS are rounded to bf16
/// as operands, sums are f32.
///
/// # Errors
/// As [`attention_forward`].
pub fn attention_backward(device: &mut Device, op: &AttentionBackward) -> Result<(), Error> {
    const OPERATION: &str = "attention backward";
    let AttentionBackward { forward, d_o, dqkv: [dq, dk, dv], scratch } = *op;
    let (AttentionForward { shape, q, k, v, o, lse, .. }, [_, d]) = (forward, forward.q.shape());
    forward.check(device, OPERATION)?;
    for (operand, matrix, rows) in [
        ("d_o", d_o, shape.queries),
        ("dq", dq, shape.queries),
        ("dk", dk, shape.keys),
        ("dv", dv, shape.keys),
    ] {
        device.check(OPERATION, operand, matrix, [shape.batch * rows, d])?;
        device.check_aligned(OPERATION, operand, matrix, 16)?;
    }
    check_packed(device, OPERATION, "scratch", scratch, backward_scratch(shape), 4)?;
    let inputs = [
        ("q", q.span()),
        ("k", k.span()),
        ("v", v.span()),
        ("o", o.span()),
        ("d_o", d_o.span()),
        ("lse", lse.span()),
    ];
    let gradients = [("dq", dq), ("dk", dk), ("dv", dv)];
    device.check_apart(OPERATION, ("scratch", scratch.span()), &inputs)?;
    for (i, (output, matrix)) in gradients.into_iter().enumerate() {
        device.check_apart(OPERATION, (output, matrix.span()), &inputs)?;
        device.check_apart(OPERATION, (output, matrix.span()), &[("scratch", scratch.span())])?;
        for (other, earlier) in
            gradients.into_iter().take(i).filter(|&(_, earlier)| !beside(matrix, earlier))
        {
            device.check_apart(OPERATION, (output, matrix.span()), &[(other, earlier.span())])?;
        }
    }
    let [of_queries, of_keys] = match (forward.dropout.is_some(), forward.width() <= NARROW) {
        (false, true) => ["attention_backward_64_queries", "attention_backward_64_keys"],
        (false, false) => ["attention_backward_128_queries", "attention_backward_128_keys"],
        (true, true) => {
            ["attention_backward_dropout_64_queries", "attention_backward_dropout_64_keys"]
        }
        (true, false) => {
            ["attention_backward_dropout_128_queries", "attention_backward_dropout_128_keys"]
        }
    };
    // Beside the slabs, two numbers of every query at hand.
    let grid = |rows: usize, queries: usize| {
        let grid = forward.grid(rows, 2 + STREAMED);
        Grid { shared: grid.shared + (queries * 2 * size_of::<f32>()) as u32, ..grid }
    };
    let common = forward.common(device);
    let mut arguments: Vec<Argument> = vec![
        q.into(),
        k.into(),
        v.into(),
        o.into(),
        d_o.into(),
        lse.into(),
        scratch.into(),
        dq.into(),
    ];
    arguments.extend([q, k, v, o, d_o, dq].map(stride).into_iter().chain(common));
    device.launch(of_queries, grid(shape.queries, ROWS), &arguments)?;
    let mut arguments: Vec<Argument> =
        vec![q.into(), k.into(), v.into(), d_o.into(), scratch.into(), dk.into(), dv.into()];
    arguments.extend([q, k, v, d_o, dk, dv].map(stride).into_iter().chain(common));
    // Wide heads: dk and dv in blocks of their own, for want of registers.
    let mut grid = grid(shape.keys, 2 * ROWS);
    grid.blocks[1] = if forward.width() <= NARROW { 1 } else { 2 };
    device.launch(of_keys, grid, &arguments)
}

/// The widest head.
pub const MAX_HEAD_WIDTH: usize = 128;
/// The widest head of the narrow kernels.
const NARROW: usize = 64;
/// Rows of a slab of a matrix in shared memory; a block owns as many.
const ROWS: usize = 64;
/// Slabs in shared memory for what streams past: two matrices, one slab on its way and one in use.
const STREAMED: usize = 4;

impl AttentionForward {
    fn width(&self) -> usize {
        self.q.shape()[1] / self.shape.heads.max(1)
    }

    /// Heads of all sequences; none if they have no columns.
    fn tasks(&self) -> usize {
        if self.width() == 0 { 0 } else { self.shape.batch * self.shape.heads }
    }

    /// A block for every [`ROWS`] of each task's `rows`, with so many slabs.
    fn grid(&self, rows: usize, slabs: usize) -> Grid {
        let slab =
            ROWS * if self.width() <= NARROW { NARROW } else { 2 * NARROW } * size_of::<bf16>();
        Grid {
            shared: (slabs * slab) as u32,
            ..Grid::line(self.tasks() * rows.div_ceil(ROWS), 128)
        }
    }

    fn check(&self, device: &Device, operation: &'static str) -> Result<(), Error> {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let ([rows, d], width) = (self.q.shape(), self.width());
        if d != heads * width {
            return Err(Error::Shape {
                operation,
                operand: "q",
                expected: [rows, heads * width],
                found: [rows, d],
            });
        }
        for (operand, matrix, rows) in [
            ("q", self.q, queries),
            ("k", self.k, keys),
            ("v", self.v, keys),
            ("o", self.o, queries),
        ] {
            device.check(operation, operand, matrix, [batch * rows, d])?;
            device.check_aligned(operation, operand, matrix, 16)?;
        }
        check_packed(device, operation, "lse", self.lse, [batch * heads, queries], 4)?;
        if !width.is_multiple_of(8) {
            return Err(Error::Alignment { operation, operand: "every head of q", bytes: 16 });
        }
        self.dropout.map_or(Ok(()), |dropout| dropout.check(operation))?;
        let elements = self.dropout.map_or(0, |_| batch * heads * queries * keys);
        for (what, found, limit) in [
            ("the head width", width, MAX_HEAD_WIDTH),
            (
                "elements from row to row",
                [self.q, self.k, self.v, self.o]
                    .map(Matrix::stride)
                    .into_iter()
                    .fold(0, usize::max),
                1 << 24,
            ),
            ("queries", queries, 1 << 28),
            ("keys", keys, 1 << 28),
            ("elements that dropout numbers", elements, MAX_ELEMENTS),
        ] {
            if found > limit {
                return Err(Error::TooLarge { operation, what, found, limit });
            }
        }
        Ok(())
    }

    /// What every kernel is told.
    fn common(&self, device: &Device) -> [Argument; 9] {
        let AttentionShape { heads, queries, keys, mask, .. } = self.shape;
        let diagonal = match mask {
            AttentionMask::Causal => (keys as u32).wrapping_sub(queries as u32),
            AttentionMask::Full => keys as u32,
        };
        let (state, site, p) = match self.dropout {
            Some(dropout) => (device.state(), dropout.site.word(), dropout.p),
            None => (Argument::Address(0), 0, 0.0),
        };
        let scale = (self.width() as f32).sqrt().recip();
        let lengths =
            [heads, queries, keys, self.width()].map(|length| Argument::U32(length as u32));
        let [heads, queries, keys, width] = lengths;
        [heads, queries, keys, width, diagonal.into(), scale.into(), state, site.into(), p.into()]
    }
}

fn stride(matrix: Matrix<bf16>) -> Argument {
    Argument::U32(u32::try_from(matrix.stride()).expect("a row is counted in 32 bits"))
}

/// Whether two matrices are disjoint column ranges of one.
fn beside(a: Matrix<bf16>, b: Matrix<bf16>) -> bool {
    let (row, size) = (a.stride() * size_of::<bf16>(), size_of::<bf16>());
    let apart = (b.address.wrapping_sub(a.address) as i64).rem_euclid(row.max(1) as i64) as usize;
    a.stride() == b.stride() && apart >= a.shape()[1] * size && apart + b.shape()[1] * size <= row
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use super::*;

    #[test]
    fn column_ranges_of_one_matrix_are_beside_each_other() {
        let whole = Matrix::<bf16> {
            mark: 0,
            address: 4096,
            shape: [5, 24],
            stride: 24,
            element: PhantomData,
        };
        let [q, k, v] = [0, 8, 16].map(|first| whole.columns(first..first + 8));
        assert!(beside(q, k) && beside(k, q) && beside(q, v) && beside(v, k));
        assert!(
            !beside(q, q)
                && !beside(q, whole.columns(4..12))
                && !beside(whole.columns(4..12), q)
                && !beside(whole, q)
        );
    }
}
