//! Token and position embeddings, and their gradients without atomics.
//!
//! The tables are read in f32: a row of the output is rounded once, and the position table needs no
//! copy in bf16. Invariant: a gradient row is summed in an order that the tokens alone determine.

use half::bf16;

use crate::{
    Device, Error, Matrix,
    launch::{Argument, Grid},
    operand::check_packed,
};

/// Row i of rows = row tokens\[i\] of the token table + row (i mod context) of the position table;
/// c is a multiple of 4.
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// `[p, 1]`. For a token outside of the vocabulary the output is NaN, and the gradient is
    /// dropped.
    pub tokens: Matrix<u32>,
    /// Tokens a sequence.
    pub context: usize,
    /// `[V, c]`, or its gradient.
    pub token_table: Matrix<f32>,
    /// `[at least context, c]`, or its gradient; none is zero.
    pub position_table: Option<Matrix<f32>>,
    /// `[p, c]`: the output, or its gradient.
    pub rows: Matrix<bf16>,
}

/// What [`embed_backward`] works in.
#[derive(Debug, Clone, Copy)]
pub struct EmbedScratch {
    /// The rows sorted by token, their tokens, and what sorting needs.
    pub order: Matrix<u32>,
    /// Sums of runs that cross a span of 32 of the sorted rows.
    pub pieces: Matrix<f32>,
}

impl EmbedScratch {
    /// The shape of `order` for rows `[p, c]`.
    #[must_use]
    pub const fn order_shape([p, _]: [usize; 2]) -> [usize; 2] {
        [4, p]
    }

    /// The shape of `pieces` for rows `[p, c]`.
    #[must_use]
    pub const fn pieces_shape([p, c]: [usize; 2]) -> [usize; 2] {
        [2 * p.div_ceil(32), c]
    }
}

/// rows = the embeddings, see [`Embed`].
///
/// # Errors
/// [`Error::Gaps`]; [`Error::Shape`], also for a width that is no multiple of 4;
/// [`Error::TooLarge`], [`Error::Alignment`], [`Error::Alias`], [`Error::Stale`],
/// [`Error::Driver`].
pub fn embed_forward(device: &mut Device, op: &Embed) -> Result<(), Error> {
    const OPERATION: &str = "embed forward";
    let ([p, c], others) = check(OPERATION, device, op)?;
    device.check_apart(OPERATION, ("rows", op.rows.span()), &others)?;
    let blocks = if c == 0 { 0 } else { p.div_ceil(8) };
    let sizes =
        [p, op.context, c / 4, op.token_table.shape()[0]].map(|size| Argument::U32(size as u32));
    let operands =
        [op.tokens.into(), op.token_table.into(), op.position_table.into(), op.rows.into()];
    device.launch("embed_forward", Grid::line(blocks, 256), &[operands, sizes].concat())
}

/// The tables' gradients += the sums of the rows of the output's gradient, see [`Embed`].
///
/// # Errors
/// As [`embed_forward`].
pub fn embed_backward(
    device: &mut Device,
    op: &Embed,
    scratch: &EmbedScratch,
) -> Result<(), Error> {
    const OPERATION: &str = "embed backward";
    let ([p, c], mut others) = check(OPERATION, device, op)?;
    check_packed(device, OPERATION, "order", scratch.order, EmbedScratch::order_shape([p, c]), 4)?;
    check_packed(
        device,
        OPERATION,
        "pieces",
        scratch.pieces,
        EmbedScratch::pieces_shape([p, c]),
        16,
    )?;
    others.push(("rows", op.rows.span()));
    // The tables are outputs, apart from all others.
    for (at, (name, span)) in others.iter().enumerate().skip(1) {
        device.check_apart(OPERATION, (name, span.clone()), &others[..at])?;
    }
    for output in [("order", scratch.order.span()), ("pieces", scratch.pieces.span())] {
        device.check_apart(OPERATION, output.clone(), &others)?;
        others.push(output);
    }
    if p == 0 || c == 0 {
        return Ok(());
    }
    let vocabulary = Argument::U32(op.token_table.shape()[0] as u32);
    let (rows, vectors) = (Argument::U32(p as u32), Argument::U32(c as u32 / 4));
    let [order, sorted, keys, numbers] =
        [0, 1, 2, 3].map(|row| Argument::from(scratch.order.rows(row..row + 1)));
    let [dout, table, pieces] = [op.rows.into(), op.token_table.into(), scratch.pieces.into()];
    // 8 warps a block: spans of 32 rows, and 128 columns.
    let spans = Grid::plane([p.div_ceil(8 * 32), c.div_ceil(128)], 256);
    device.launch(
        "embed_sort",
        Grid::line(p.div_ceil(256), 256),
        &[op.tokens.into(), keys, numbers, rows, vocabulary],
    )?;
    device.launch(
        "embed_order",
        Grid::line(p.div_ceil(32), 512),
        &[keys, numbers, order, sorted, rows],
    )?;
    device.launch(
        "embed_runs",
        spans,
        &[dout, sorted, order, table, pieces, rows, vectors, vocabulary],
    )?;
    device.launch("embed_join", spans, &[sorted, table, pieces, rows, vectors, vocabulary])?;
    let Some(positions) = op.position_table else { return Ok(()) };
    let grid = Grid::plane([op.context.min(p).div_ceil(8), c.div_ceil(128)], 256);
    device.launch(
        "embed_positions",
        grid,
        &[dout, positions.into(), rows, Argument::U32(op.context as u32), vectors],
    )
}

/// The spans of the tokens and the tables, and the shape of the rows.
type Operands = ([usize; 2], Vec<(&'static str, std::ops::Range<u64>)>);

fn check(operation: &'static str, device: &Device, op: &Embed) -> Result<Operands, Error> {
    const LIMIT: usize = u32::MAX as usize - 64;
    let [p, c] = op.rows.shape();
    let vocabulary = op.token_table.shape()[0];
    if c % 4 != 0 {
        return Err(Error::Shape {
            operation,
            operand: "rows",
            expected: [p, c.next_multiple_of(4)],
            found: [p, c],
        });
    }
    for (what, found) in
        [("the tokens", p), ("the vocabulary", vocabulary), ("the context", op.context)]
    {
        if found > LIMIT {
            return Err(Error::TooLarge { operation, what, found, limit: LIMIT });
        }
    }
    check_packed(device, operation, "tokens", op.tokens, [p, 1], 4)?;
    check_packed(device, operation, "rows", op.rows, [p, c], 8)?;
    check_packed(device, operation, "the token table", op.token_table, [vocabulary, c], 16)?;
    let mut spans = vec![("tokens", op.tokens.span()), ("the token table", op.token_table.span())];
    let needed = op.context.min(p).max(usize::from(p > 0));
    if let Some(positions) = op.position_table {
        let found = positions.shape();
        check_packed(
            device,
            operation,
            "the position table",
            positions,
            [found[0].max(needed), c],
            16,
        )?;
        spans.push(("the position table", positions.span()));
    }
    if op.context == 0 && p > 0 {
        return Err(Error::Shape {
            operation,
            operand: "a sequence",
            expected: [1, c],
            found: [0, c],
        });
    }
    Ok(([p, c], spans))
}
