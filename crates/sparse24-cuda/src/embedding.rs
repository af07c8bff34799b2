//! Token and position embeddings, and their gradients without atomics.
//!
//! Tables are read in f32 and an output row is rounded once. Invariant: a gradient row is summed in
//! an order that depends on the tokens alone.

use half::bf16;

use crate::{
    Device, Error, Matrix, Result,
    launch::{Argument, Grid, arguments},
};

/// Row i of `rows` = scale times row `tokens[i]` of the token table + row i mod `context` of the
/// position table. The width c is a multiple of 4.
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// Token ids `[p, 1]`. For an id outside the vocabulary, the output is NaN and the gradient is
    /// dropped.
    pub tokens: Matrix<u32>,
    /// Sequence length; it matters with a position table only.
    pub context: usize,
    /// The factor of the token table.
    pub scale: f32,
    /// Token table `[vocabulary, c]`, or its gradient.
    pub token_table: Matrix<f32>,
    /// Position table of at least `context` rows `[.., c]`, or its gradient; zero if absent.
    pub position_table: Option<Matrix<f32>>,
    /// Output `[p, c]`, or its gradient.
    pub rows: Matrix<bf16>,
}

/// Scratch of [`embed_backward`].
#[derive(Debug, Clone, Copy)]
pub struct EmbedScratch {
    /// The rows sorted by token, their tokens, and temporaries of the sort.
    pub order: Matrix<u32>,
    /// Sums of runs of equal tokens that cross a span of 32 sorted rows.
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

/// Computes the embeddings of [`Embed`] into `rows`.
///
/// # Errors
/// [`Error::Gaps`]; [`Error::Shape`], also if c is not a multiple of 4; [`Error::OutOfRange`] for
/// an empty context with a position table; [`Error::TooLarge`], [`Error::Alignment`],
/// [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
pub fn embed_forward(device: &mut Device, op: &Embed) -> Result {
    let [p, c] = op.rows.shape();
    let (position_shape, context) = op.check(device, "embed forward")?;
    let vocabulary = op.token_table.shape()[0];
    device
        .checks("embed forward")
        .input("tokens", op.tokens, [p, 1], 4)?
        .input("the token table", op.token_table, [vocabulary, c], 16)?
        .optional("the position table", op.position_table, position_shape, 16)?
        .output("rows", op.rows, [p, c], 8)?;
    let Embed { tokens, token_table, position_table, rows, scale, .. } = *op;
    let [p_, context, vectors, vocabulary] = [p, context, c / 4, vocabulary].map(|x| x as u32);
    device.launch(
        "embed_forward",
        Grid::line(if c == 0 { 0 } else { p.div_ceil(8) }, 256),
        &arguments![
            tokens,
            token_table,
            position_table,
            rows,
            p_,
            context,
            vectors,
            vocabulary,
            scale
        ],
    )
}

/// Adds the sums of the rows of the output's gradient to the gradients of the tables, see
/// [`Embed`].
///
/// # Errors
/// See [`embed_forward`].
pub fn embed_backward(device: &mut Device, op: &Embed, scratch: &EmbedScratch) -> Result {
    const OPERATION: &str = "embed backward";
    let Embed { tokens, token_table, position_table, rows, scale, .. } = *op;
    let [p, c] = rows.shape();
    let (position_shape, context) = op.check(device, OPERATION)?;
    let vocabulary = token_table.shape()[0];
    let EmbedScratch { order, pieces } = *scratch;
    let mut checks = device.checks(OPERATION);
    checks.input("tokens", tokens, [p, 1], 4)?.input("rows", rows, [p, c], 8)?.output(
        "the token table",
        token_table,
        [vocabulary, c],
        16,
    )?;
    if let Some(positions) = position_table {
        checks.output("the position table", positions, position_shape, 16)?;
    }
    checks.output("order", order, EmbedScratch::order_shape([p, c]), 4)?.output(
        "pieces",
        pieces,
        EmbedScratch::pieces_shape([p, c]),
        16,
    )?;
    if p == 0 || c == 0 {
        return Ok(());
    }
    let [of_order, sorted, keys, numbers] =
        [0, 1, 2, 3].map(|row| Argument::from(order.rows(row..row + 1)));
    // 8 warps per block: spans of 32 rows and 128 columns.
    let spans = Grid::plane([p.div_ceil(8 * 32), c.div_ceil(128)], 256);
    let [context_, count, vectors, vocabulary] =
        [context, p, c / 4, vocabulary].map(|x| Argument::U32(x as u32));
    let [dout, table, pieces, scale] = arguments![rows, token_table, pieces, scale];
    device.launch(
        "embed_sort",
        Grid::line(p.div_ceil(256), 256),
        &[tokens.into(), keys, numbers, count, vocabulary],
    )?;
    device.launch(
        "embed_order",
        Grid::line(p.div_ceil(32), 512),
        &[keys, numbers, of_order, sorted, count],
    )?;
    device.launch(
        "embed_runs",
        spans,
        &[dout, sorted, of_order, table, pieces, count, vectors, vocabulary, scale],
    )?;
    device.launch(
        "embed_join",
        spans,
        &[sorted, table, pieces, count, vectors, vocabulary, scale],
    )?;
    let Some(positions) = position_table else { return Ok(()) };
    device.launch(
        "embed_positions",
        Grid::plane([context.min(p).div_ceil(8), c.div_ceil(128)], 256),
        &[dout, positions.into(), count, context_, vectors],
    )
}

impl Embed {
    /// Returns the shape that the position table must have, and the context, which is 1 without
    /// one.
    fn check(&self, device: &Device, operation: &'static str) -> Result<([usize; 2], usize)> {
        const LIMIT: usize = u32::MAX as usize - 64;
        let shape @ [p, c] = self.rows.shape();
        device
            .checks(operation)
            .columns_of("rows", shape, 4)?
            .limit("the number of tokens", p, LIMIT)?
            .limit("the vocabulary", self.token_table.shape()[0], LIMIT)?
            .limit("the context", self.context, LIMIT)?;
        let Some(positions) = self.position_table else { return Ok(([0, c], 1)) };
        if self.context == 0 && p > 0 {
            let (what, expected) = ("the context", "at least 1");
            return Err(Error::OutOfRange { operation, what, found: 0.0, expected });
        }
        Ok(([positions.shape()[0].max(self.context.min(p)), c], self.context))
    }
}
