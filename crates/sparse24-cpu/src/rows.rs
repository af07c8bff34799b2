//! Rows of a matrix by number, and their way back.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::{Error, check};

/// The number of no row.
pub const NONE: u32 = u32::MAX;

/// Row i of out = row `rows[i]` of x, or zeros where that is [`NONE`].
///
/// x `[p, c]`; out `[rows, c]`.
///
/// # Errors
/// [`Error::Shape`] if out does not fit; [`Error::Token`] for a number outside p.
pub fn gather_rows(
    x: ArrayView2<'_, f32>,
    rows: &[u32],
    mut out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "gather_rows";
    let (p, c) = x.dim();
    check::tokens(OPERATION, rows, Some(NONE), p)?;
    check::matrix(OPERATION, "out", &out, [rows.len(), c])?;
    let tasks = out.axis_iter_mut(Axis(0)).into_par_iter().zip(rows);
    tasks.for_each(|(mut out, &row)| match row {
        NONE => out.fill(0.0),
        row => out.assign(&x.row(row as usize)),
    });
    Ok(())
}

/// dx = 0, then row `rows[i]` of dx = row i of dout: the gradient of [`gather_rows`] for rows that
/// are all different. Shapes as there.
///
/// # Errors
/// Like [`gather_rows`].
pub fn scatter_rows(
    dout: ArrayView2<'_, f32>,
    rows: &[u32],
    mut dx: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "scatter_rows";
    let (p, c) = dx.dim();
    check::tokens(OPERATION, rows, Some(NONE), p)?;
    check::matrix(OPERATION, "dout", &dout, [rows.len(), c])?;
    dx.axis_iter_mut(Axis(0)).into_par_iter().for_each(|mut row| row.fill(0.0));
    for (dout, &row) in dout.rows().into_iter().zip(rows).filter(|&(_, &row)| row != NONE) {
        dx.row_mut(row as usize).assign(&dout);
    }
    Ok(())
}
