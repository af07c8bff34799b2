//! Softmax attention and its gradient, with the probabilities recomputed.

use sparse24_core::op::{AttentionMask, AttentionShape, Dropout};

use crate::{Device, Error, Matrix, WORKGROUP, error::check_shape, kernels};

/// Maximum head dimension: a head's columns stay in registers.
pub const MAX_HEAD_WIDTH: usize = 128;

/// Rows per workgroup.
const ROWS: usize = 32;

/// o = dropout(softmax(mask(q k^T / sqrt(width)))) v for every sequence and head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionForward {
    /// Batch, heads, queries, keys and mask.
    pub shape: AttentionShape,
    /// `[batch * queries, heads * width]`.
    pub q: Matrix,
    /// `[batch * keys, heads * width]`.
    pub k: Matrix,
    /// `[batch * keys, heads * width]`.
    pub v: Matrix,
    /// Number of keys of each sequence that are not padding, u32 `[batch, 1]`; all keys if absent.
    pub lengths: Option<Matrix>,
    /// Dropout of the probabilities.
    pub dropout: Option<Dropout>,
    /// `[batch * queries, heads * width]`, overwritten.
    pub o: Matrix,
    /// Log of the sum of exponentials `[batch * heads, queries]`, overwritten.
    pub lse: Matrix,
}

/// The gradient of [`AttentionForward`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackward {
    /// The operands of the forward pass, with its results `o` and `lse`.
    pub forward: AttentionForward,
    /// Gradient of o.
    pub d_o: Matrix,
    /// Gradients of q, k and v, overwritten; they may be columns of one buffer.
    pub dqkv: [Matrix; 3],
    /// [`backward_scratch`] elements, overwritten.
    pub scratch: Matrix,
}

/// Elements of the scratch of [`attention_backward`].
#[must_use]
pub fn backward_scratch(shape: AttentionShape) -> usize {
    shape.batch * shape.heads * shape.queries
}

/// Computes [`AttentionForward`].
///
/// # Errors
/// [`Error::Shape`] unless the operands fit and a head is at most [`MAX_HEAD_WIDTH`] wide; failures
/// of earlier work.
pub fn attention_forward(device: &mut Device, op: &AttentionForward) -> Result<(), Error> {
    let width = check("attention forward", op)?;
    let groups = op.shape.queries.div_ceil(ROWS);
    let constants = constants(op, op.o, width, groups);
    let matrices = [op.q, op.k, op.v, op.lengths.unwrap_or(op.q), op.o, op.lse];
    let kernel = if fours(width, [op.q, op.k, op.v]) {
        &kernels::ATTENTION_FORWARD_FOURS
    } else {
        &kernels::ATTENTION_FORWARD
    };
    run(device, kernel, op, matrices, &constants, groups)
}

/// Computes [`AttentionBackward`].
///
/// # Errors
/// Like [`attention_forward`].
///
/// # Panics
/// If the scratch is too small.
pub fn attention_backward(device: &mut Device, op: &AttentionBackward) -> Result<(), Error> {
    let AttentionBackward { forward, d_o, dqkv: [dq, dk, dv], scratch } = op;
    let width = check("attention backward", forward)?;
    for (operand, expected, found) in [
        ("d_o", forward.q, *d_o),
        ("dq", forward.q, *dq),
        ("dk", forward.k, *dk),
        ("dv", forward.v, *dv),
    ] {
        check_shape("attention backward", operand, expected.shape, found)?;
    }
    let AttentionShape { batch, heads, queries, keys, .. } = forward.shape;
    let elements = batch * heads * queries;
    let delta = scratch.reshaped([batch * heads, queries]);
    let sizes = [heads, queries, width, elements].map(|size| size as u32);
    let of_delta = [&d_o.place()[..], &forward.o.place(), &sizes].concat();
    let matrices = [*d_o, forward.o, delta];
    device.run(&kernels::ATTENTION_DELTA, matrices, &of_delta, elements.div_ceil(WORKGROUP))?;

    let AttentionForward { q, k, v, lse, lengths, .. } = *forward;
    let lengths = lengths.unwrap_or(q);
    let inputs = |gradient| [q, k, v, lse, *d_o, delta, lengths, gradient];
    let (of_queries, of_keys) = if fours(width, [q, k, v, *d_o]) {
        (&kernels::ATTENTION_DQ_FOURS, &kernels::ATTENTION_DKV_FOURS)
    } else {
        (&kernels::ATTENTION_DQ, &kernels::ATTENTION_DKV)
    };
    let groups = queries.div_ceil(ROWS);
    let of_dq = [&constants(forward, *d_o, width, groups)[..], &dq.place()].concat();
    run(device, of_queries, forward, inputs(*dq), &of_dq, groups)?;
    let groups = keys.div_ceil(ROWS);
    let shared = constants(forward, *d_o, width, groups);
    let mut write = |gradient: Matrix, writes: u32| {
        let constants = [&shared[..], &dk.place(), &dv.place(), &[writes]].concat();
        run(device, of_keys, forward, inputs(gradient), &constants, groups)
    };
    if dk.buffer == dv.buffer {
        return write(*dk, 3);
    }
    write(*dk, 1)?;
    write(*dv, 2)
}

/// Whether every operand can be read by vec4 loads.
fn fours<const N: usize>(width: usize, operands: [Matrix; N]) -> bool {
    width.is_multiple_of(4) && operands.into_iter().all(Matrix::has_fours)
}

/// Checks the operands of the forward pass and returns the width of a head.
fn check(operation: &'static str, op: &AttentionForward) -> Result<usize, Error> {
    let AttentionShape { batch, heads, queries, keys, .. } = op.shape;
    let width = op.q.shape[1] / heads.max(1);
    let d = width.min(MAX_HEAD_WIDTH) * heads;
    for (operand, expected, found) in [
        ("q", [batch * queries, d], op.q),
        ("k", [batch * keys, d], op.k),
        ("v", [batch * keys, d], op.v),
        ("o", [batch * queries, d], op.o),
        ("lse", [batch * heads, queries], op.lse),
        ("lengths", [batch, 1], op.lengths.unwrap_or(Matrix { shape: [batch, 1], ..op.q })),
    ] {
        check_shape(operation, operand, expected, found)?;
    }
    Ok(width)
}

/// The constants of `attention.wgsl` up to `kept_scale`; those of the gradients follow.
fn constants(op: &AttentionForward, o: Matrix, width: usize, blocks: usize) -> Vec<u32> {
    let AttentionShape { batch, heads, queries, keys, mask } = op.shape;
    let lengths = [op.lengths.map_or(0, |t| t.offset as u32), u32::from(op.lengths.is_some())];
    let groups = batch * heads * blocks;
    let sizes = [heads, queries, keys, width].map(|size| size as u32);
    let scale = (width as f32).sqrt().recip().to_bits();
    let rest = [u32::from(mask == AttentionMask::Causal), groups as u32, blocks as u32, scale];
    let dropout = match op.dropout {
        None => [0; 4],
        Some(of) => [1, of.site.word(), of.least(), of.scale().to_bits()],
    };
    let places = [op.q, op.k, op.v, o, op.lse].map(Matrix::place);
    [places.as_flattened(), &lengths, &sizes, &rest, &dropout].concat()
}

fn run<const N: usize>(
    device: &mut Device,
    kernel: &'static kernels::Kernel,
    op: &AttentionForward,
    matrices: [Matrix; N],
    constants: &[u32],
    blocks: usize,
) -> Result<(), Error> {
    device.run(kernel, matrices, constants, op.shape.batch * op.shape.heads * blocks)
}
