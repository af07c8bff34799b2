//! The product of a compressed 2:4 matrix and a dense one, with a documented order of summation.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2};
use sparse24_core::{Element, compressed::Compressed24};

use crate::{Error, check, simd::vectorized, tasks};

/// D `[m, n]` = decode(A) `[m, k]` B `[k, n]`.
///
/// Every element is the sum, from +0 in ascending k, of the products of A's k/2 kept values (zeros
/// included) with B's elements. Products and sums are each rounded to f32.
///
/// # Errors
/// [`Error::Shape`] unless B has k rows and D is `[m, n]`.
pub fn spmm24<T: Element>(
    a: &Compressed24<T>,
    b: ArrayView2<'_, f32>,
    d: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    let ([m, k], n) = (a.shape(), b.ncols());
    check::matrix("spmm24", "b", &b, [k, n])?;
    check::matrix("spmm24", "d", &d, [m, n])?;
    let (b, values) = (b.as_standard_layout(), a.values());
    tasks::for_rows(d, n * (k / 2).max(1), |row, mut d| {
        let mut sums = vec![0.0; n];
        for group in 0..k / 4 {
            for (at, i) in a.pattern(row, group).indices().into_iter().enumerate() {
                let value = values[[row, 2 * group + at]].to_f32();
                let b = b.row(4 * group + usize::from(i));
                let b = b.to_slice().expect("rows are contiguous");
                vectorized(
                    #[inline(always)]
                    || sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += value * b),
                );
            }
        }
        d.assign(&ArrayView1::from(&sums));
    });
    Ok(())
}
