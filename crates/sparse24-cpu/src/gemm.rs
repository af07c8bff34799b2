//! Dense products through a library, in panels that depend on the shape alone.
//!
//! Invariant: C is cut into the same panels for any number of threads and each panel is one
//! sequential product, so the bits do not depend on the thread count. They do depend on the
//! instruction set that the library finds. Deliberately absent: a kernel of our own, except for
//! products with a vector.

use faer::{Accum, MatMut, MatRef, Par};
use ndarray::{ArrayView2, ArrayViewMut2, CowArray, Ix2};
use rayon::prelude::*;

use crate::{Error, math, shape};

/// What becomes of the values that an output already holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beta {
    /// They are never read.
    Overwrite,
    /// The result is added to them.
    Accumulate,
}

/// C = A B, or C += A B: A `[m, k]`, B `[k, n]`, C `[m, n]`.
///
/// A and B are read in place when row-major or column-major contiguous (a transpose is a `.t()`
/// view) and copied otherwise; C is written in place when row-major contiguous. Every element is a
/// sum over k in f32, within k * 2^-24 of the sum of magnitudes. An empty sum is 0. NaN and
/// infinities propagate.
///
/// # Errors
/// [`Error::Shape`] if B or C does not fit.
pub fn matmul(
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    beta: Beta,
) -> Result<(), Error> {
    let ([m, k], n) = (shape::of(&a), b.ncols());
    shape::check("matmul", "b", [k, n], shape::of(&b))?;
    shape::check("matmul", "c", [m, n], shape::of(&c))?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        if beta == Beta::Overwrite {
            c.fill(0.0);
        }
        return Ok(());
    }
    let (a, b) = (contiguous(a), contiguous(b));
    match c.as_slice_mut() {
        Some(slice) => product(&a, &b, slice, beta),
        None => {
            let mut copy = c.to_owned().as_standard_layout().into_owned();
            product(&a, &b, copy.as_slice_mut().expect("standard layout"), beta);
            c.assign(&copy);
        }
    }
    Ok(())
}

/// Shapes agree, nothing is empty, A and B are contiguous in one order or the other.
fn product(a: &CowArray<'_, f32, Ix2>, b: &CowArray<'_, f32, Ix2>, c: &mut [f32], beta: Beta) {
    let (m, n) = (a.nrows(), b.ncols());
    // The library multiplies by a vector with an order of summation that depends on the thread
    // count.
    if m == 1 {
        return vector_matrix(&a.iter().copied().collect::<Vec<_>>(), b.view(), c, beta);
    }
    if n == 1 {
        return vector_matrix(&b.iter().copied().collect::<Vec<_>>(), a.t(), c, beta);
    }
    let (a, b) = (library_view(a), library_view(b));
    let accumulate = match beta {
        Beta::Overwrite => Accum::Replace,
        Beta::Accumulate => Accum::Add,
    };
    let height = panel_rows(m, n);
    MatMut::from_row_major_slice_mut(c, m, n).par_row_chunks_mut(height).enumerate().for_each(
        |(i, strip)| {
            let a = a.subrows(i * height, strip.nrows());
            strip.par_col_chunks_mut(PANEL_COLUMNS).enumerate().for_each(|(j, panel)| {
                let b = b.subcols(j * PANEL_COLUMNS, panel.ncols());
                faer::linalg::matmul::matmul(panel, accumulate, a, b, 1.0, Par::Seq);
            });
        },
    );
}

/// Columns of a panel: the library's kernel loses little at this width, and the packed part of B
/// stays in cache.
const PANEL_COLUMNS: usize = 64;

/// Rows of a panel: B is packed again for every panel, so 64 rows at least; 256 at most, and fewer
/// where that gives at least 8 panels.
fn panel_rows(m: usize, n: usize) -> usize {
    let strips =
        8usize.div_ceil(n.div_ceil(PANEL_COLUMNS)).max(m.div_ceil(256)).min(m.div_ceil(64));
    m.div_ceil(strips).next_multiple_of(4)
}

fn contiguous(x: ArrayView2<'_, f32>) -> CowArray<'_, f32, Ix2> {
    if x.is_standard_layout() || x.t().is_standard_layout() {
        x.into()
    } else {
        x.as_standard_layout().into_owned().into()
    }
}

fn library_view<'a>(x: &'a CowArray<'_, f32, Ix2>) -> MatRef<'a, f32> {
    let (rows, columns) = x.dim();
    match x.as_slice() {
        Some(slice) => MatRef::from_row_major_slice(slice, rows, columns),
        None => MatRef::from_column_major_slice(
            x.view().reversed_axes().to_slice().expect("column-major contiguous"),
            rows,
            columns,
        ),
    }
}

/// c `[n]` = x `[k]` B `[k, n]`: dots when B's columns are contiguous, otherwise a sum of its rows
/// in order.
fn vector_matrix(x: &[f32], b: ArrayView2<'_, f32>, c: &mut [f32], beta: Beta) {
    const OUTPUTS: usize = 64;
    if beta == Beta::Overwrite {
        c.fill(0.0);
    }
    let rows = b.as_slice();
    let n = c.len();
    c.par_chunks_mut(OUTPUTS).enumerate().for_each(|(i, c)| {
        let first = i * OUTPUTS;
        math::vectorised(
            #[inline(always)]
            || match rows {
                Some(rows) => {
                    for (&x, row) in x.iter().zip(rows.chunks_exact(n)) {
                        for (c, &b) in c.iter_mut().zip(&row[first..]) {
                            *c += x * b;
                        }
                    }
                }
                None => {
                    for (j, c) in c.iter_mut().enumerate() {
                        let column = b.column(first + j);
                        *c += math::sum2(
                            x,
                            column.to_slice().expect("column-major contiguous"),
                            |x, b| x * b,
                        );
                    }
                }
            },
        );
    });
}
