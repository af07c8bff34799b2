//! Token and position embeddings, and their gradients without atomics.
//!
//! Invariant: a gradient row is summed in the order of the tokens, whatever the thread count:
//! threads share columns, not rows.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::{Error, gemm::Beta, shape};

/// Row i of out = row tokens\[i\] of wte + row (i mod context) of wpe.
///
/// wte `[V, c]`, wpe `[at least context, c]` or absent, out `[tokens, c]`; all row-major.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit; [`Error::Token`] for a token outside of V.
pub fn embed_forward(
    tokens: &[u32],
    context: usize,
    wte: ArrayView2<'_, f32>,
    wpe: Option<ArrayView2<'_, f32>>,
    mut out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "embed_forward";
    const ROWS: usize = 32;
    let c = wte.ncols();
    shape::check_tokens(OPERATION, tokens, None, wte.nrows())?;
    shape::check(OPERATION, "out", [tokens.len(), c], shape::of(&out))?;
    if let Some(wpe) = &wpe {
        check_positions(OPERATION, "wpe", context, tokens.len(), c, shape::of(wpe))?;
    }
    let tasks: Vec<_> =
        out.axis_chunks_iter_mut(Axis(0), ROWS).zip(tokens.chunks(ROWS)).enumerate().collect();
    tasks.into_par_iter().for_each(|(i, (mut out, tokens))| {
        for (row, (mut out, &token)) in out.rows_mut().into_iter().zip(tokens).enumerate() {
            out.assign(&wte.row(token as usize));
            if let Some(wpe) = &wpe {
                out += &wpe.row((i * ROWS + row) % context);
            }
        }
    });
    Ok(())
}

/// dwte\[id\] = the sum of the rows of dout whose token is id, dwpe\[t\] = the sum of the rows at
/// position t, each in row order; added to what the gradients hold with [`Beta::Accumulate`].
/// Shapes as in [`embed_forward`].
///
/// # Errors
/// As [`embed_forward`].
pub fn embed_backward(
    dout: ArrayView2<'_, f32>,
    tokens: &[u32],
    context: usize,
    mut dwte: ArrayViewMut2<'_, f32>,
    dwpe: Option<ArrayViewMut2<'_, f32>>,
    beta: Beta,
) -> Result<(), Error> {
    const OPERATION: &str = "embed_backward";
    let c = dwte.ncols();
    shape::check_tokens(OPERATION, tokens, None, dwte.nrows())?;
    shape::check(OPERATION, "dout", [tokens.len(), c], shape::of(&dout))?;
    if let Some(dwpe) = &dwpe {
        check_positions(OPERATION, "dwpe", context, tokens.len(), c, shape::of(dwpe))?;
    }
    scatter(dout, |row| tokens[row] as usize, dwte.view_mut(), beta);
    if let Some(dwpe) = dwpe {
        scatter(dout, |row| row % context, dwpe, beta);
    }
    Ok(())
}

fn check_positions(
    operation: &'static str,
    operand: &'static str,
    context: usize,
    tokens: usize,
    c: usize,
    found: [usize; 2],
) -> Result<(), Error> {
    let needed = context.min(tokens).max(usize::from(tokens > 0));
    if context == 0 && tokens > 0 || found[0] < needed || found[1] != c {
        return Err(Error::Shape { operation, operand, expected: [needed, c], found });
    }
    Ok(())
}

/// Row `target(row)` of `sums` collects row `row` of `x`, in row order; one task a stripe of
/// columns.
fn scatter(
    x: ArrayView2<'_, f32>,
    target: impl Fn(usize) -> usize + Sync,
    mut sums: ArrayViewMut2<'_, f32>,
    beta: Beta,
) {
    const COLUMNS: usize = 32;
    let tasks: Vec<_> = x
        .axis_chunks_iter(Axis(1), COLUMNS)
        .zip(sums.axis_chunks_iter_mut(Axis(1), COLUMNS))
        .collect();
    tasks.into_par_iter().for_each(|(x, mut sums)| {
        if beta == Beta::Overwrite {
            sums.fill(0.0);
        }
        for (row, x) in x.rows().into_iter().enumerate() {
            let mut sums = sums.row_mut(target(row));
            sums += &x;
        }
    });
}
