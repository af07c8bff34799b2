//! Dense products, in panels that depend on the shape alone.
//!
//! C is cut into the same panels for any number of threads, and each panel is one sequential
//! product, so the bits do not depend on the number of threads. They do depend on the instruction
//! set of the machine.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;
use sparse24_core::op::Accumulate;

use crate::{
    Error,
    bias::bias_forward,
    check, math,
    simd::{multiply, vectorized},
};

/// C = A B, or C += A B: A `[m, k]`, B `[k, n]`, C `[m, n]`.
///
/// Operands may be strided: a transpose is a `.t()` view. Every element is a sum over k in f32,
/// within k * 2^-24 of the sum of magnitudes. An empty sum is 0. NaN and infinities propagate.
///
/// ```
/// use ndarray::{Array2, arr2};
/// use sparse24_core::op::Accumulate;
/// use sparse24_cpu::gemm::matmul;
///
/// let (x, w) = (arr2(&[[1.0, 2.0], [3.0, 4.0]]), arr2(&[[1.0, -1.0]]));
/// let mut z = Array2::zeros((2, 1));
/// matmul(x.view(), w.t(), z.view_mut(), Accumulate::Overwrite)?;
/// assert_eq!(z, arr2(&[[-1.0], [-1.0]]));
/// # Ok::<(), sparse24_cpu::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] if B or C does not fit.
pub fn matmul(
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    c: ArrayViewMut2<'_, f32>,
    accumulate: Accumulate,
) -> Result<(), Error> {
    matmul_then(a, b, c, accumulate, |_| Ok(()))
}

/// C = A B + bias in every row, with the bits of [`matmul`] and then
/// [`bias_forward`]: bias `[n]`.
///
/// # Errors
/// [`Error::Shape`] if B, C or the bias does not fit.
pub fn matmul_bias(
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    bias: ArrayView1<'_, f32>,
    c: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    check::vector("matmul_bias", "bias", &bias, c.ncols())?;
    matmul_then(a, b, c, Accumulate::Overwrite, |strip| bias_forward(strip, bias))
}

/// [`matmul`], and then `finish` on strips of rows of C, each while it is in the cache.
fn matmul_then(
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    accumulate: Accumulate,
    finish: impl Fn(ArrayViewMut2<'_, f32>) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let ((m, k), n) = (a.dim(), b.ncols());
    check::matrix("matmul", "b", &b, [k, n])?;
    check::matrix("matmul", "c", &c, [m, n])?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    if k == 0 {
        if accumulate == Accumulate::Overwrite {
            c.fill(0.0);
        }
        return finish(c);
    }
    if m == 1 || n == 1 {
        let (x, b) = if m == 1 { (a, b) } else { (b, a.reversed_axes()) };
        let [x, mut sums] = [x, c.view()].map(|x| x.iter().copied().collect::<Vec<_>>());
        if b.t().is_standard_layout() {
            vector_matrix(&x, b, &mut sums, accumulate);
        } else {
            vector_matrix(&x, b.as_standard_layout().view(), &mut sums, accumulate);
        }
        c.iter_mut().zip(sums).for_each(|(c, sum)| *c = sum);
        return finish(c);
    }
    let height = panel_rows(m, n);
    let strips = c.axis_chunks_iter_mut(Axis(0), height).into_par_iter();
    strips.zip(a.axis_chunks_iter(Axis(0), height)).try_for_each(|(mut strip, a)| {
        let panels = strip.axis_chunks_iter_mut(Axis(1), PANEL_COLUMNS).into_par_iter();
        panels
            .zip(b.axis_chunks_iter(Axis(1), PANEL_COLUMNS))
            .for_each(|(panel, b)| multiply(a, b, panel, accumulate));
        finish(strip)
    })
}

/// Columns per panel: the kernel loses little at this width, and the packed part of B stays in
/// cache.
const PANEL_COLUMNS: usize = 64;

/// Rows per panel: at least 64, because B is packed again for every panel; at most 256, and fewer
/// where that gives at least 8 panels.
fn panel_rows(m: usize, n: usize) -> usize {
    let strips =
        8usize.div_ceil(n.div_ceil(PANEL_COLUMNS)).max(m.div_ceil(256)).min(m.div_ceil(64));
    m.div_ceil(strips).next_multiple_of(4)
}

/// c `[n]` = x `[k]` B `[k, n]`: dot products if B's columns are contiguous, otherwise the sum of
/// its scaled rows in order.
fn vector_matrix(x: &[f32], b: ArrayView2<'_, f32>, c: &mut [f32], accumulate: Accumulate) {
    const OUTPUTS: usize = 64;
    if accumulate == Accumulate::Overwrite {
        c.fill(0.0);
    }
    let rows = b.as_slice();
    let n = c.len();
    c.par_chunks_mut(OUTPUTS).enumerate().for_each(|(i, c)| {
        let first = i * OUTPUTS;
        vectorized(
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
                        let column = column.to_slice().expect("column-major contiguous");
                        *c += math::sum2(x, column, |x, b| x * b);
                    }
                }
            },
        );
    });
}
