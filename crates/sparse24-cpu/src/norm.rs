//! The residual sum and its LayerNorm in one pass, and their backward.
//!
//! Source: Ba et al., "Layer Normalization", arXiv 1607.06450.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::{Error, gemm::Beta, math, shape};

/// Added to the variance.
pub const EPSILON: f32 = 1e-5;

/// Rows of one task, and of one partial sum of the parameter gradients.
const ROWS: usize = 32;

/// residual = x + delta; y = (residual - mean) * rstd * gamma + beta for each row.
///
/// x, delta, residual, y `[p, c]`; gamma, beta `[c]`; stats `[p, 2]` holds mean and rstd = 1 / sqrt(variance + [`EPSILON`]), with the
/// variance over c (not c - 1). An absent delta or beta is 0. All row-major contiguous.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit x.
pub fn norm_forward(
    x: ArrayView2<'_, f32>,
    delta: Option<ArrayView2<'_, f32>>,
    gamma: ArrayView1<'_, f32>,
    beta: Option<ArrayView1<'_, f32>>,
    mut residual: ArrayViewMut2<'_, f32>,
    mut y: ArrayViewMut2<'_, f32>,
    mut stats: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "norm_forward";
    let [p, c] = shape::of(&x);
    if let Some(delta) = &delta {
        shape::check(OPERATION, "delta", [p, c], shape::of(delta))?;
    }
    shape::check(OPERATION, "gamma", [1, c], shape::of_vector(&gamma))?;
    if let Some(beta) = &beta {
        shape::check(OPERATION, "beta", [1, c], shape::of_vector(beta))?;
    }
    shape::check(OPERATION, "residual", [p, c], shape::of(&residual))?;
    shape::check(OPERATION, "y", [p, c], shape::of(&y))?;
    shape::check(OPERATION, "stats", [p, 2], shape::of(&stats))?;
    if p == 0 || c == 0 {
        return Ok(());
    }
    let gamma = gamma.as_standard_layout();
    let gamma = gamma.as_slice().expect("standard layout");
    let beta = beta.map(|beta| beta.as_standard_layout().into_owned().into_raw_vec_and_offset().0);
    let tasks: Vec<_> = residual
        .axis_chunks_iter_mut(Axis(0), ROWS)
        .zip(y.axis_chunks_iter_mut(Axis(0), ROWS))
        .zip(stats.axis_chunks_iter_mut(Axis(0), ROWS))
        .enumerate()
        .collect();
    tasks.into_par_iter().for_each(|(i, ((mut residual, mut y), mut stats))| {
        math::vectorised(
            #[inline(always)]
            || {
                for (row, ((mut residual, mut y), mut stats)) in
                    residual.rows_mut().into_iter().zip(y.rows_mut()).zip(stats.rows_mut()).enumerate()
                {
                    let at = i * ROWS + row;
                    let (residual, y) = (residual.as_slice_mut().expect("row-major"), y.as_slice_mut().expect("row-major"));
                    residual.copy_from_slice(x.row(at).as_slice().expect("row-major"));
                    if let Some(delta) = &delta {
                        let delta = delta.row(at);
                        for (residual, &delta) in residual.iter_mut().zip(delta.as_slice().expect("row-major")) {
                            *residual += delta;
                        }
                    }
                    let mean = math::sum(residual, |x| x) / c as f32;
                    let variance = math::sum(residual, |x| (x - mean) * (x - mean)) / c as f32;
                    let rstd = 1.0 / (variance + EPSILON).sqrt();
                    for ((y, &x), &gamma) in y.iter_mut().zip(&*residual).zip(gamma) {
                        *y = (x - mean) * rstd * gamma;
                    }
                    if let Some(beta) = &beta {
                        for (y, &beta) in y.iter_mut().zip(beta) {
                            *y += beta;
                        }
                    }
                    (stats[0], stats[1]) = (mean, rstd);
                }
            },
        );
    });
    Ok(())
}

/// The gradient of [`norm_forward`].
///
/// With n = (residual - mean) * rstd and g = dy * gamma, each row gets dresidual += rstd * (g - mean(g) - n * mean(g * n)); dresidual
/// comes in as the gradient that reaches the residual sum from above, and leaves as the gradient of both x and delta.
/// dgamma = the column sums of dy * n, dbeta = those of dy, added to what they hold with [`Beta::Accumulate`]; rows are summed in
/// order within blocks of 32, and the blocks in order. All row-major contiguous.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit dy.
#[expect(clippy::too_many_arguments, reason = "an equation of nine operands")]
pub fn norm_backward(
    dy: ArrayView2<'_, f32>,
    residual: ArrayView2<'_, f32>,
    stats: ArrayView2<'_, f32>,
    gamma: ArrayView1<'_, f32>,
    mut dresidual: ArrayViewMut2<'_, f32>,
    mut dgamma: ArrayViewMut1<'_, f32>,
    mut dbeta: Option<ArrayViewMut1<'_, f32>>,
    beta: Beta,
) -> Result<(), Error> {
    const OPERATION: &str = "norm_backward";
    let [p, c] = shape::of(&dy);
    shape::check(OPERATION, "residual", [p, c], shape::of(&residual))?;
    shape::check(OPERATION, "stats", [p, 2], shape::of(&stats))?;
    shape::check(OPERATION, "gamma", [1, c], shape::of_vector(&gamma))?;
    shape::check(OPERATION, "dresidual", [p, c], shape::of(&dresidual))?;
    shape::check(OPERATION, "dgamma", [1, c], shape::of_vector(&dgamma))?;
    if let Some(dbeta) = &dbeta {
        shape::check(OPERATION, "dbeta", [1, c], shape::of_vector(dbeta))?;
    }
    if beta == Beta::Overwrite {
        dgamma.fill(0.0);
        if let Some(dbeta) = &mut dbeta {
            dbeta.fill(0.0);
        }
    }
    if p == 0 || c == 0 {
        return Ok(());
    }
    let gamma = gamma.as_standard_layout();
    let gamma = gamma.as_slice().expect("standard layout");
    let tasks: Vec<_> = dresidual.axis_chunks_iter_mut(Axis(0), ROWS).enumerate().collect();
    let partial: Vec<(Vec<f32>, Vec<f32>)> = tasks
        .into_par_iter()
        .map(|(i, mut dresidual)| {
            let (mut dgamma, mut dbeta, mut g) = (vec![0.0; c], vec![0.0; c], vec![0.0; c]);
            math::vectorised(
                #[inline(always)]
                || {
                    for (row, mut dresidual) in dresidual.rows_mut().into_iter().enumerate() {
                        let at = i * ROWS + row;
                        let (dy, residual, stats) = (dy.row(at), residual.row(at), stats.row(at));
                        let (dy, residual) = (dy.as_slice().expect("row-major"), residual.as_slice().expect("row-major"));
                        let (mean, rstd) = (stats[0], stats[1]);
                        let normal = |x: f32| (x - mean) * rstd;
                        for ((g, &dy), &gamma) in g.iter_mut().zip(dy).zip(gamma) {
                            *g = dy * gamma;
                        }
                        let mean_g = math::sum(&g, |g| g) / c as f32;
                        let mean_gn = math::sum2(&g, residual, |g, x| g * normal(x)) / c as f32;
                        let dresidual = dresidual.as_slice_mut().expect("row-major");
                        for ((dresidual, &g), &x) in dresidual.iter_mut().zip(&g).zip(residual) {
                            *dresidual += rstd * (g - mean_g - normal(x) * mean_gn);
                        }
                        for (((dgamma, dbeta), &dy), &x) in dgamma.iter_mut().zip(&mut dbeta).zip(dy).zip(residual) {
                            *dgamma += dy * normal(x);
                            *dbeta += dy;
                        }
                    }
                },
            );
            (dgamma, dbeta)
        })
        .collect();
    for (part, part_beta) in &partial {
        dgamma.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        if let Some(dbeta) = &mut dbeta {
            dbeta.iter_mut().zip(part_beta).for_each(|(sum, part)| *sum += part);
        }
    }
    Ok(())
}
