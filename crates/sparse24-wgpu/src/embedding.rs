//! Token and position embeddings and their gradients, without atomics: [`with_order`] sorts the
//! tokens, so one invocation sums equal ones.

use crate::{Device, Error, Matrix, WORKGROUP, error::check_shape, kernels};

/// The operands of an embedding of p tokens.
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// The result of [`with_order`] `[2, p]`.
    pub tokens: Matrix,
    /// Tokens per sequence.
    pub length: usize,
    /// The factor of E.
    pub scale: f32,
    /// E `[V, d]`, or its gradient.
    pub token_table: Matrix,
    /// P `[at least length, d]`, or its gradient.
    pub position_table: Option<Matrix>,
    /// `[p, d]`: the output, or its gradient.
    pub rows: Matrix,
}

/// The ids, followed by their indices, sorted by id and then by index.
#[must_use]
pub fn with_order(ids: &[u32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|&place| ids[place as usize]);
    [ids, &order].concat()
}

fn check(operation: &'static str, op: &Embed) -> Result<(), Error> {
    let [p, d] = op.rows.shape;
    check_shape(operation, "tokens", [2, p], op.tokens)?;
    check_shape(operation, "token table", [op.token_table.shape[0], d], op.token_table)?;
    match op.position_table {
        None => Ok(()),
        Some(t) => check_shape(operation, "positions", [t.shape[0].max(op.length.min(p)), d], t),
    }
}

/// Row i of rows = scale times row `tokens[i]` of E + row `i mod length` of P; NaN for a token
/// outside V.
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; failures of earlier work.
pub fn embed_forward(device: &mut Device, op: &Embed) -> Result<(), Error> {
    check("embed forward", op)?;
    let ([_, d], elements) = (op.rows.shape, op.rows.elements());
    let positions = op.position_table.unwrap_or(op.token_table);
    let places = [op.token_table, positions, op.rows].map(Matrix::place);
    let sizes = [d, elements, op.token_table.shape[0], op.length.max(1)].map(|n| n as u32);
    let rest = [u32::from(op.position_table.is_some()), op.scale.to_bits()];
    let tokens = [op.tokens.offset as u32];
    let constants = [&tokens[..], places.as_flattened(), &sizes, &rest].concat();
    let matrices = [op.tokens, op.token_table, positions, op.rows];
    device.run(&kernels::EMBED_FORWARD, matrices, &constants, elements.div_ceil(WORKGROUP))
}

/// Adds the rows of the gradient to the gradients of the tables, in the order of the tokens. A row
/// of E receives the sum of its tokens' rows, times the scale.
///
/// # Errors
/// Like [`embed_forward`].
pub fn embed_backward(device: &mut Device, op: &Embed) -> Result<(), Error> {
    check("embed backward", op)?;
    let [p, d] = op.rows.shape;
    let mut add = |kernel, table: Matrix, [targets, rows]: [usize; 2], scale: f32| {
        let tokens = [op.tokens.offset, op.tokens.offset + op.tokens.stride].map(|n| n as u32);
        let sizes = [d, p, targets].map(|n| n as u32);
        let constants =
            [&tokens[..], &op.rows.place(), &table.place(), &sizes, &[scale.to_bits()]].concat();
        let matrices = [op.tokens, op.rows, table];
        device.run(kernel, matrices, &constants, (rows * d).div_ceil(WORKGROUP))
    };
    add(&kernels::EMBED_BACKWARD, op.token_table, [op.token_table.shape[0], p], op.scale)?;
    match op.position_table {
        None => Ok(()),
        Some(table) => add(&kernels::POSITION_GRAD, table, [op.length, op.length.min(p)], 1.0),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn equal_tokens_stay_in_order() {
        assert_eq!(super::with_order(&[7, 1, 7, 0, 1]), [7, 1, 7, 0, 1, 3, 1, 4, 0, 2]);
        assert!(super::with_order(&[]).is_empty());
    }
}
