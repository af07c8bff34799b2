//! Token and position embeddings, and their gradients without atomics: threads share columns, not
//! rows, so a gradient row is summed in the order of the tokens for any number of threads.

use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip};
use rayon::prelude::*;

use crate::{Error, check};

/// Row i of out = scale times row `tokens[i]` of wte + row `i mod context` of wpe.
///
/// wte `[V, c]`; wpe `[>= context, c]`, or no positions; out `[tokens, c]`.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit, [`Error::Zero`] for a context of 0;
/// [`Error::Token`] for a token outside V.
pub fn embed_forward(
    tokens: &[u32],
    context: usize,
    (scale, wte): (f32, ArrayView2<'_, f32>),
    wpe: Option<ArrayView2<'_, f32>>,
    mut out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "embed_forward";
    const ROWS: usize = 32;
    let (vocabulary, c) = wte.dim();
    check::tokens(OPERATION, tokens, None, vocabulary)?;
    check::matrix(OPERATION, "out", &out, [tokens.len(), c])?;
    if let Some(wpe) = &wpe {
        check_positions(OPERATION, "wpe", context, [tokens.len(), c], wpe.dim().into())?;
    }
    let tasks: Vec<_> =
        out.axis_chunks_iter_mut(Axis(0), ROWS).zip(tokens.chunks(ROWS)).enumerate().collect();
    tasks.into_par_iter().for_each(|(i, (mut out, tokens))| {
        for (row, (mut out, &token)) in out.rows_mut().into_iter().zip(tokens).enumerate() {
            Zip::from(&mut out).and(wte.row(token as usize)).for_each(|out, x| *out = scale * x);
            if let Some(wpe) = &wpe {
                out += &wpe.row((i * ROWS + row) % context);
            }
        }
    });
    Ok(())
}

/// Adds to row id of dwte scale times each row of dout whose token is id, and to row t of dwpe each
/// row at position t, in row order. Shapes as in [`embed_forward`].
///
/// # Errors
/// Like [`embed_forward`].
pub fn embed_backward(
    dout: ArrayView2<'_, f32>,
    tokens: &[u32],
    context: usize,
    (scale, mut dwte): (f32, ArrayViewMut2<'_, f32>),
    dwpe: Option<ArrayViewMut2<'_, f32>>,
) -> Result<(), Error> {
    const OPERATION: &str = "embed_backward";
    let (vocabulary, c) = dwte.dim();
    check::tokens(OPERATION, tokens, None, vocabulary)?;
    check::matrix(OPERATION, "dout", &dout, [tokens.len(), c])?;
    if let Some(dwpe) = &dwpe {
        check_positions(OPERATION, "dwpe", context, [tokens.len(), c], dwpe.dim().into())?;
    }
    scatter(dout, |row| tokens[row] as usize, (scale, dwte.view_mut()));
    if let Some(dwpe) = dwpe {
        scatter(dout, |row| row % context, (1.0, dwpe));
    }
    Ok(())
}

fn check_positions(
    operation: &'static str,
    operand: &'static str,
    context: usize,
    [tokens, c]: [usize; 2],
    found: [usize; 2],
) -> Result<(), Error> {
    if context == 0 && tokens > 0 {
        return Err(Error::Zero { operation, operand: "the context" });
    }
    let needed = context.min(tokens);
    if found[0] < needed || found[1] != c {
        return Err(Error::Shape { operation, operand, expected: [needed, c], found });
    }
    Ok(())
}

/// Adds scale times row i of `x` to row `target(i)` of `sums`, in row order; a task is a stripe of
/// columns.
fn scatter(
    x: ArrayView2<'_, f32>,
    target: impl Fn(usize) -> usize + Sync,
    (scale, mut sums): (f32, ArrayViewMut2<'_, f32>),
) {
    const COLUMNS: usize = 32;
    let tasks: Vec<_> = x
        .axis_chunks_iter(Axis(1), COLUMNS)
        .zip(sums.axis_chunks_iter_mut(Axis(1), COLUMNS))
        .collect();
    tasks.into_par_iter().for_each(|(x, mut sums)| {
        for (row, x) in x.rows().into_iter().enumerate() {
            let mut sums = sums.row_mut(target(row));
            Zip::from(&mut sums).and(x).for_each(|sum, x| *sum += scale * x);
        }
    });
}
