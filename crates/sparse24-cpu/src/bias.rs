//! Adding a bias to rows, and its gradient.

use ndarray::{Array1, ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, Zip};
use rayon::prelude::*;
use sparse24_core::op::Accumulate;

use crate::{Error, check, elementwise, simd::vectorized};

/// z += bias in every row: z `[p, r]`, bias `[r]`.
///
/// # Errors
/// [`Error::Shape`] unless the bias is as long as a row.
pub fn bias_forward(z: ArrayViewMut2<'_, f32>, bias: ArrayView1<'_, f32>) -> Result<(), Error> {
    check::vector("bias_forward", "bias", &bias, z.ncols())?;
    let rows = bias.broadcast(z.dim()).expect("the bias is as long as a row");
    elementwise::for_each(
        [rows],
        [z],
        #[inline(always)]
        |[bias], [z]| z.iter_mut().zip(bias).for_each(|(z, &bias)| *z += bias),
    );
    Ok(())
}

/// db = the column sums of dz, or db += them: dz `[p, r]`, db `[r]`.
///
/// Rows are summed in order within blocks of 64, and the blocks in order.
///
/// # Errors
/// [`Error::Shape`] unless db is as long as a row.
pub fn bias_grad(
    dz: ArrayView2<'_, f32>,
    mut db: ArrayViewMut1<'_, f32>,
    accumulate: Accumulate,
) -> Result<(), Error> {
    const ROWS: usize = 64;
    check::vector("bias_grad", "db", &db, dz.ncols())?;
    if accumulate == Accumulate::Overwrite {
        db.fill(0.0);
    }
    let blocks: Vec<_> = dz.axis_chunks_iter(Axis(0), ROWS).collect();
    let partial: Vec<Array1<f32>> = blocks
        .into_par_iter()
        .map(|block| {
            let mut sums = Array1::zeros(block.ncols());
            vectorized(
                #[inline(always)]
                || {
                    for row in block.rows() {
                        Zip::from(&mut sums).and(row).for_each(|sum, &value| *sum += value);
                    }
                },
            );
            sums
        })
        .collect();
    for sums in &partial {
        db += sums;
    }
    Ok(())
}
