//! The residual sum and its LayerNorm in one pass, and their gradient.
//!
//! Source: Ba et al., "Layer normalization", arXiv 1607.06450.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2};
use rayon::prelude::*;
use sparse24_core::op::Accumulate;

use crate::{Error, check, math, simd::vectorized};

/// Rows per task, and per partial sum of the parameter gradients.
const ROWS: usize = 32;

/// residual = x + delta; y = (residual - mean) * rstd * gamma + beta for each row.
///
/// x, delta, residual, y `[p, c]`; gamma, beta `[c]`; stats `[p, 2]` holds the mean and rstd =
/// 1 / sqrt(variance + epsilon), with the variance divided by c (not c - 1). An absent delta or
/// beta is 0. All operands are row-major and contiguous.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit x; [`Error::Layout`] if one is not contiguous.
#[expect(clippy::too_many_arguments, reason = "an equation of eight operands")]
pub fn norm_forward(
    x: ArrayView2<'_, f32>,
    delta: Option<ArrayView2<'_, f32>>,
    gamma: ArrayView1<'_, f32>,
    beta: Option<ArrayView1<'_, f32>>,
    epsilon: f32,
    residual: ArrayViewMut2<'_, f32>,
    y: ArrayViewMut2<'_, f32>,
    stats: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "norm_forward";
    let (p, c) = x.dim();
    if let Some(delta) = &delta {
        check::matrix(OPERATION, "delta", delta, [p, c])?;
    }
    check::vector(OPERATION, "gamma", &gamma, c)?;
    if let Some(beta) = &beta {
        check::vector(OPERATION, "beta", beta, c)?;
    }
    for (operand, output, width) in [("residual", &residual, c), ("y", &y, c), ("stats", &stats, 2)]
    {
        check::matrix(OPERATION, operand, output, [p, width])?;
    }
    if p == 0 || c == 0 {
        return Ok(());
    }
    let x = check::elements(OPERATION, "x", x)?;
    let delta = delta.map(|delta| check::elements(OPERATION, "delta", delta)).transpose()?;
    let gamma = check::elements(OPERATION, "gamma", gamma)?;
    let beta = beta.map(|beta| check::elements(OPERATION, "beta", beta)).transpose()?;
    let residual = check::elements_mut(OPERATION, "residual", residual)?.par_chunks_mut(ROWS * c);
    let y = check::elements_mut(OPERATION, "y", y)?.par_chunks_mut(ROWS * c);
    let stats = check::elements_mut(OPERATION, "stats", stats)?.par_chunks_mut(ROWS * 2);
    x.par_chunks(ROWS * c).zip(residual).zip(y.zip(stats)).enumerate().for_each(
        |(i, ((x, residual), (y, stats)))| {
            let delta = delta.map(|delta| &delta[i * ROWS * c..][..x.len()]);
            vectorized(
                #[inline(always)]
                || forward_rows(x, delta, gamma, beta, epsilon, residual, y, stats),
            );
        },
    );
    Ok(())
}

/// The rows are independent of each other in each loop, so that the processor overlaps their sums.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of norm_forward")]
fn forward_rows(
    x: &[f32],
    delta: Option<&[f32]>,
    gamma: &[f32],
    beta: Option<&[f32]>,
    epsilon: f32,
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
        stats[1] = 1.0 / (variance + epsilon).sqrt();
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
/// With n = (residual - mean) * rstd and g = dy * gamma, each row has
/// dx = rstd * (g - mean(g) - n * mean(g * n)), the gradient of both x and delta through the norm.
/// Added to the gradient that reaches the residual sum from above, it is their whole gradient.
/// dgamma = the column sums of dy * n, dbeta = those of dy; rows are summed in order within blocks
/// of 32, and the blocks in order. `accumulate_dx` applies to dx, `accumulate` to dgamma and dbeta.
/// Shapes as in [`norm_forward`]; dx `[p, c]`, dgamma and dbeta `[c]`. dy, residual, stats, gamma
/// and dx are row-major and contiguous.
///
/// # Errors
/// [`Error::Shape`] if an operand does not fit dy; [`Error::Layout`] if one is not contiguous.
#[expect(clippy::too_many_arguments, reason = "an equation of nine operands")]
pub fn norm_backward(
    dy: ArrayView2<'_, f32>,
    residual: ArrayView2<'_, f32>,
    stats: ArrayView2<'_, f32>,
    gamma: ArrayView1<'_, f32>,
    dx: ArrayViewMut2<'_, f32>,
    accumulate_dx: Accumulate,
    mut dgamma: ArrayViewMut1<'_, f32>,
    mut dbeta: Option<ArrayViewMut1<'_, f32>>,
    accumulate: Accumulate,
) -> Result<(), Error> {
    const OPERATION: &str = "norm_backward";
    let (p, c) = dy.dim();
    check::matrix(OPERATION, "residual", &residual, [p, c])?;
    check::matrix(OPERATION, "stats", &stats, [p, 2])?;
    check::vector(OPERATION, "gamma", &gamma, c)?;
    check::matrix(OPERATION, "dx", &dx, [p, c])?;
    check::vector(OPERATION, "dgamma", &dgamma, c)?;
    if let Some(dbeta) = &dbeta {
        check::vector(OPERATION, "dbeta", dbeta, c)?;
    }
    if accumulate == Accumulate::Overwrite {
        dgamma.fill(0.0);
        if let Some(dbeta) = &mut dbeta {
            dbeta.fill(0.0);
        }
    }
    if p == 0 || c == 0 {
        return Ok(());
    }
    let dy = check::elements(OPERATION, "dy", dy)?.par_chunks(ROWS * c);
    let residual = check::elements(OPERATION, "residual", residual)?.par_chunks(ROWS * c);
    let stats = check::elements(OPERATION, "stats", stats)?.par_chunks(ROWS * 2);
    let gamma = check::elements(OPERATION, "gamma", gamma)?;
    let dx = check::elements_mut(OPERATION, "dx", dx)?.par_chunks_mut(ROWS * c);
    let wanted = if dbeta.is_some() { 2 * c } else { c };
    let partial: Vec<Vec<f32>> = dy
        .zip(residual)
        .zip(stats.zip(dx))
        .map(|((dy, residual), (stats, dx))| {
            let mut sums = vec![0.0; wanted];
            vectorized(
                #[inline(always)]
                || backward_rows(dy, residual, stats, gamma, dx, accumulate_dx, &mut sums),
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

/// Adds to `sums` the rows' gradient of gamma and, if it is twice as long as a row, of beta.
#[inline(always)]
fn backward_rows(
    dy: &[f32],
    residual: &[f32],
    stats: &[f32],
    gamma: &[f32],
    dx: &mut [f32],
    accumulate_dx: Accumulate,
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
    if accumulate_dx == Accumulate::Overwrite {
        dx.fill(0.0);
    }
    for ((((dy, x), &[mean, rstd]), &[mean_g, mean_gn]), dx) in
        rows().zip(&means).zip(dx.chunks_exact_mut(c))
    {
        for (((dx, &dy), &x), &gamma) in dx.iter_mut().zip(dy).zip(x).zip(gamma) {
            *dx += rstd * (dy * gamma - mean_g - (x - mean) * rstd * mean_gn);
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
