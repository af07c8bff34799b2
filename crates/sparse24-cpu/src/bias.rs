//! Adding a bias to rows, and its gradient.

use ndarray::{Array1, ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, Zip};
use rayon::prelude::*;

use crate::{Error, elementwise, gemm::Beta, shape};

/// z += bias in every row: z `[p, r]`, bias `[r]`.
///
/// # Errors
/// [`Error::Shape`] unless the bias is as long as a row.
pub fn bias_forward(z: ArrayViewMut2<'_, f32>, bias: ArrayView1<'_, f32>) -> Result<(), Error> {
    shape::check("bias_forward", "bias", [1, z.ncols()], shape::of_vector(&bias))?;
    let rows = bias.broadcast(z.dim()).expect("the bias is as long as a row");
    elementwise::for_each(
        [rows],
        [z],
        #[inline(always)]
        |[bias], [z]| {
            for (z, &bias) in z.iter_mut().zip(bias) {
                *z += bias;
            }
        },
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
    beta: Beta,
) -> Result<(), Error> {
    shape::check("bias_grad", "db", [1, dz.ncols()], shape::of_vector(&db))?;
    if beta == Beta::Overwrite {
        db.fill(0.0);
    }
    let blocks: Vec<_> = dz.axis_chunks_iter(Axis(0), ROWS).collect();
    let partial: Vec<Array1<f32>> = blocks.into_par_iter().map(|block| sum_rows(block)).collect();
    for sums in &partial {
        db += sums;
    }
    Ok(())
}

const ROWS: usize = 64;

fn sum_rows(block: ArrayView2<'_, f32>) -> Array1<f32> {
    let mut sums = Array1::zeros(block.ncols());
    for row in block.rows() {
        Zip::from(&mut sums).and(row).for_each(|sum, &value| *sum += value);
    }
    sums
}
