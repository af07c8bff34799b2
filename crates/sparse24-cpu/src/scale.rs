//! A matrix times a number, and the gradient of the number.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;
use sparse24_core::op::Accumulate;

use crate::{Error, check, elementwise, tasks::rows_per_task};

/// out = s x, both `[n, d]`.
///
/// # Errors
/// [`Error::Shape`] unless out has the shape of x.
pub fn scale(x: ArrayView2<'_, f32>, s: f32, out: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    check::matrix("scale", "out", &out, x.dim().into())?;
    elementwise::for_each(
        [x],
        [out],
        #[inline(always)]
        |[x], [out]| out.iter_mut().zip(x).for_each(|(out, &x)| *out = s * x),
    );
    Ok(())
}

/// ds = sum of x * dout, or ds += it: x and dout `[n, d]`.
///
/// Products are exact in f64 and summed there, in order within blocks of rows, and the blocks in
/// order; the sum is rounded once.
///
/// # Errors
/// [`Error::Shape`] unless dout has the shape of x.
pub fn scale_grad(
    x: ArrayView2<'_, f32>,
    dout: ArrayView2<'_, f32>,
    ds: &mut f32,
    accumulate: Accumulate,
) -> Result<(), Error> {
    check::matrix("scale_grad", "dout", &dout, x.dim().into())?;
    let rows = rows_per_task(x.ncols());
    let blocks = x.axis_chunks_iter(Axis(0), rows).into_par_iter();
    let products = blocks.zip(dout.axis_chunks_iter(Axis(0), rows).into_par_iter());
    let sums: Vec<f64> = products
        .map(|(x, dout)| x.iter().zip(dout).map(|(&x, &d)| f64::from(x) * f64::from(d)).sum())
        .collect();
    let sum = sums.into_iter().sum::<f64>() as f32;
    *ds = match accumulate {
        Accumulate::Overwrite => sum,
        Accumulate::Add => *ds + sum,
    };
    Ok(())
}
