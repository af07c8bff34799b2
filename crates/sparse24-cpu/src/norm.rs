//! The residual sum and its LayerNorm in one pass, and their backward.
//!
//! Source: Ba et al., "Layer Normalization", arXiv 1607.06450.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2};
use rayon::prelude::*;

use crate::{Error, gemm::Beta, math, shape};

/// Added to the variance.
pub const EPSILON: f32 = 1e-5;

/// Rows of one task, and of one partial sum of the parameter gradients.
const ROWS: usize = 32;

/// residual = x + delta; y = (residual - mean) * rstd * gamma + beta for each row.
///
/// x, delta, residual, y `[p, c]`; gamma, beta `[c]`; stats `[p, 2]` holds mean and rstd = 1 /
/// sqrt(variance + [`EPSILON`]), with the variance over c (not c - 1). An absent delta or beta is
/// 0. All row-major contiguous.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit x; [`Error::Layout`] if one has gaps.
pub fn norm_forward(
    x: ArrayView2<'_, f32>,
    delta: Option<ArrayView2<'_, f32>>,
    gamma: ArrayView1<'_, f32>,
    beta: Option<ArrayView1<'_, f32>>,
    residual: ArrayViewMut2<'_, f32>,
    y: ArrayViewMut2<'_, f32>,
    stats: ArrayViewMut2<'_, f32>,
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
    let x = shape::elements(OPERATION, "x", x)?;
    let delta = delta.map(|delta| shape::elements(OPERATION, "delta", delta)).transpose()?;
    let gamma = shape::elements(OPERATION, "gamma", gamma)?;
    let beta = beta.map(|beta| shape::elements(OPERATION, "beta", beta)).transpose()?;
    let residual = shape::elements_mut(OPERATION, "residual", residual)?.par_chunks_mut(ROWS * c);
    let y = shape::elements_mut(OPERATION, "y", y)?.par_chunks_mut(ROWS * c);
    let stats = shape::elements_mut(OPERATION, "stats", stats)?.par_chunks_mut(ROWS * 2);
    x.par_chunks(ROWS * c).zip(residual).zip(y.zip(stats)).enumerate().for_each(
        |(i, ((x, residual), (y, stats)))| {
            let delta = delta.map(|delta| &delta[i * ROWS * c..][..x.len()]);
            math::vectorised(
                #[inline(always)]
                || forward_rows(x, delta, gamma, beta, residual, y, stats),
            );
        },
    );
    Ok(())
}

/// Each loop leaves rows independent of each other, so that the processor overlaps their sums.
#[inline(always)]
fn forward_rows(
    x: &[f32],
    delta: Option<&[f32]>,
    gamma: &[f32],
    beta: Option<&[f32]>,
    residual: &mut [f32],
    y: &mut [f32],
    stats: &mut [f32],
) {
    let c = gamma.len();
    match delta {
        Some(delta) => residual
            .iter_mut()
            .zip(x)
            .zip(delta)
            .for_each(|((residual, &x), &delta)| *residual = x + delta),
        None => residual.copy_from_slice(x),
    }
    let stats = stats.as_chunks_mut::<2>().0;
    for (row, stats) in residual.chunks_exact(c).zip(&mut *stats) {
        stats[0] = math::sum(row, |x| x) / c as f32;
    }
    for (row, stats) in residual.chunks_exact(c).zip(&mut *stats) {
        let variance = math::sum(row, |x| (x - stats[0]) * (x - stats[0])) / c as f32;
        stats[1] = 1.0 / (variance + EPSILON).sqrt();
    }
    for ((row, y), &mut [mean, rstd]) in
        residual.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(stats)
    {
        for ((y, &x), &gamma) in y.iter_mut().zip(row).zip(gamma) {
            *y = (x - mean) * rstd * gamma;
        }
        if let Some(beta) = beta {
            y.iter_mut().zip(beta).for_each(|(y, &beta)| *y += beta);
        }
    }
}

/// The gradient of [`norm_forward`].
///
/// With n = (residual - mean) * rstd and g = dy * gamma, each row gets dresidual += rstd * (g -
/// mean(g) - n * mean(g * n)); dresidual comes in as the gradient that reaches the residual sum
/// from above, and leaves as the gradient of both x and delta. dgamma = the column sums of dy * n,
/// dbeta = those of dy, added to what they hold with [`Beta::Accumulate`]; rows are summed in order
/// within blocks of 32, and the blocks in order. All row-major contiguous.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit dy; [`Error::Layout`] if one has gaps.
#[expect(clippy::too_many_arguments, reason = "an equation of nine operands")]
pub fn norm_backward(
    dy: ArrayView2<'_, f32>,
    residual: ArrayView2<'_, f32>,
    stats: ArrayView2<'_, f32>,
    gamma: ArrayView1<'_, f32>,
    dresidual: ArrayViewMut2<'_, f32>,
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
    let [dy, residual, stats] = [("dy", dy), ("residual", residual), ("stats", stats)]
        .map(|(name, x)| shape::elements(OPERATION, name, x));
    let (dy, residual, stats) =
        (dy?.par_chunks(ROWS * c), residual?.par_chunks(ROWS * c), stats?.par_chunks(ROWS * 2));
    let gamma = shape::elements(OPERATION, "gamma", gamma)?;
    let dresidual =
        shape::elements_mut(OPERATION, "dresidual", dresidual)?.par_chunks_mut(ROWS * c);
    let wanted = if dbeta.is_some() { 2 * c } else { c };
    let partial: Vec<Vec<f32>> = dy
        .zip(residual)
        .zip(stats.zip(dresidual))
        .map(|((dy, residual), (stats, dresidual))| {
            let mut sums = vec![0.0; wanted];
            math::vectorised(
                #[inline(always)]
                || backward_rows(dy, residual, stats, gamma, dresidual, &mut sums),
            );
            sums
        })
        .collect();
    for sums in &partial {
        dgamma.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        if let Some(dbeta) = &mut dbeta {
            dbeta.iter_mut().zip(&sums[c..]).for_each(|(total, sum)| *total += sum);
        }
    }
    Ok(())
}

/// Adds to `sums` what the rows give to gamma and, if there is room for it, to beta.
#[inline(always)]
fn backward_rows(
    dy: &[f32],
    residual: &[f32],
    stats: &[f32],
    gamma: &[f32],
    dresidual: &mut [f32],
    sums: &mut [f32],
) {
    let c = gamma.len();
    let mut means = [[0.0; 2]; ROWS];
    let mut g = vec![0.0; c];
    let rows = || dy.chunks_exact(c).zip(residual.chunks_exact(c)).zip(stats.as_chunks::<2>().0);
    for (((dy, x), &[mean, rstd]), means) in rows().zip(&mut means) {
        for ((g, &dy), &gamma) in g.iter_mut().zip(dy).zip(gamma) {
            *g = dy * gamma;
        }
        *means = [
            math::sum(&g, |g| g) / c as f32,
            math::sum2(&g, x, |g, x| g * ((x - mean) * rstd)) / c as f32,
        ];
    }
    for ((((dy, x), &[mean, rstd]), &[mean_g, mean_gn]), dresidual) in
        rows().zip(&means).zip(dresidual.chunks_exact_mut(c))
    {
        for (((dresidual, &dy), &x), &gamma) in dresidual.iter_mut().zip(dy).zip(x).zip(gamma) {
            *dresidual += rstd * (dy * gamma - mean_g - (x - mean) * rstd * mean_gn);
        }
    }
    let (dgamma, dbeta) = sums.split_at_mut(c);
    for ((dy, x), &[mean, rstd]) in rows() {
        for ((dgamma, &dy), &x) in dgamma.iter_mut().zip(dy).zip(x) {
            *dgamma += dy * ((x - mean) * rstd);
        }
        dbeta.iter_mut().zip(dy).for_each(|(dbeta, &dy)| *dbeta += dy);
    }
}
