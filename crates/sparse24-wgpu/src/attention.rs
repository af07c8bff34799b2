//! Softmax attention and its gradient, with the probabilities recomputed.

use sparse24_core::op::{AttentionMask, AttentionShape, Dropout};

use crate::{
    Device, Error, Matrix, WORKGROUP,
    error::check_shape,
    kernels::{self, Kernel},
};

/// Maximum head dimension: a head's columns stay in registers.
pub const MAX_HEAD_WIDTH: usize = 128;

/// Rows per workgroup, and rows of the other operands per call on a software adapter.
const ROWS: usize = 32;

/// Width of the heads that the kernels for software adapters take.
const SOFTWARE_WIDTH: usize = 32;

/// A kernel, and how many rows of the other operands a call takes; all of them if `None`.
struct Variant(&'static Kernel, Option<usize>);

/// A kernel with scalar loads, with vec4 loads, and for software adapters.
const fn variants(kernels: [&'static Kernel; 3]) -> [Variant; 3] {
    let [singles, fours, software] = kernels;
    [Variant(singles, None), Variant(fours, None), Variant(software, Some(ROWS))]
}

static FORWARD: [Variant; 3] = variants([
    &kernels::ATTENTION_FORWARD,
    &kernels::ATTENTION_FORWARD_FOURS,
    &kernels::ATTENTION_FORWARD_SOFTWARE,
]);
static DQ: [Variant; 3] = variants([
    &kernels::ATTENTION_DQ,
    &kernels::ATTENTION_DQ_FOURS,
    &kernels::ATTENTION_DQ_SOFTWARE,
]);
static DKV: [Variant; 3] = variants([
    &kernels::ATTENTION_DKV,
    &kernels::ATTENTION_DKV_FOURS,
    &kernels::ATTENTION_DKV_SOFTWARE,
]);

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
    check("attention forward", op)?;
    let matrices = [op.q, op.k, op.v, op.lengths.unwrap_or(op.q), op.o, op.lse];
    let variant = &FORWARD[variant(device, op, &[op.q, op.k, op.v], &[op.o])];
    let AttentionShape { queries, keys, .. } = op.shape;
    run(device, variant, op, op.o, matrices, &[], [queries, keys])
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
    let variant = variant(device, forward, &[q, k, v, *d_o], &op.dqkv);
    let of_dq = dq.place();
    run(device, &DQ[variant], forward, *d_o, inputs(*dq), &of_dq, [queries, keys])?;
    let mut write = |gradient: Matrix, writes: u32| {
        let gradients = [&dk.place()[..], &dv.place(), &[writes]].concat();
        run(device, &DKV[variant], forward, *d_o, inputs(gradient), &gradients, [keys, queries])
    };
    if dk.buffer == dv.buffer {
        return write(*dk, 3);
    }
    write(*dk, 1)?;
    write(*dv, 2)
}

/// Index of the variant that suits what is read and written.
fn variant(device: &Device, op: &AttentionForward, read: &[Matrix], written: &[Matrix]) -> usize {
    let AttentionShape { batch, heads, queries, keys, .. } = op.shape;
    let width = op.q.shape[1] / heads.max(1);
    let all_fours = |operands: &[Matrix]| operands.iter().all(|operand| operand.has_fours());
    let has_fours = width.is_multiple_of(4) && all_fours(read);
    let is_whole = [queries, keys].iter().all(|rows| rows.is_multiple_of(ROWS));
    let groups = batch * heads * queries.max(keys) / ROWS;
    let fits = width == SOFTWARE_WIDTH && is_whole && groups <= kernels::MOST_GROUPS as usize;
    let takes = fits && all_fours(written) && op.dropout.is_none();
    match has_fours && takes && device.is_software() {
        true => 2,
        false => usize::from(has_fours),
    }
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

/// Makes all calls of a kernel: workgroups split `rows`, and calls split `others`. `o` is the
/// output or its gradient; `gradients` are the constants that follow those of the forward pass.
fn run<const N: usize>(
    device: &mut Device,
    &Variant(kernel, depth): &Variant,
    op: &AttentionForward,
    o: Matrix,
    matrices: [Matrix; N],
    gradients: &[u32],
    [rows, others]: [usize; 2],
) -> Result<(), Error> {
    let AttentionShape { batch, heads, queries, keys, mask } = op.shape;
    let width = op.q.shape[1] / heads.max(1);
    let blocks = rows.div_ceil(ROWS);
    let groups = batch * heads * blocks;
    let lengths = [op.lengths.map_or(0, |t| t.offset as u32), u32::from(op.lengths.is_some())];
    let sizes = [heads, queries, keys, width].map(|size| size as u32);
    let scale = (width as f32).sqrt().recip().to_bits();
    let rest = [u32::from(mask == AttentionMask::Causal), groups as u32, blocks as u32, scale];
    let dropout = match op.dropout {
        None => [0; 4],
        Some(of) => [1, of.site.word(), of.least(), of.scale().to_bits()],
    };
    let places = [op.q, op.k, op.v, o, op.lse].map(Matrix::place);
    let shared = [places.as_flattened(), &lengths, &sizes, &rest, &dropout].concat();
    for first in (0..others.max(1)).step_by(depth.unwrap_or(others.max(1))) {
        device.run(
            kernel,
            matrices,
            &[&shared[..], &[first as u32], gradients].concat(),
            groups,
        )?;
    }
    Ok(())
}
