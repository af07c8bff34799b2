//! LayerNorm of a residual sum in one pass, and its backward pass.
//!
//! Statistics are those of the residual after rounding to bf16, which is what the backward pass
//! reads. Source: Ba et al., "Layer Normalization", arXiv 1607.06450.

use half::bf16;
use sparse24_core::op::Accumulate;

use crate::{
    Device, Error, Matrix, kernels,
    launch::{Grid, arguments},
};

/// The widest row.
pub const MAX_WIDTH: usize = 8192;

/// residual = x + delta; y = (residual - mean) rstd gamma + beta for each row of c elements, rstd =
/// 1 / sqrt(variance + epsilon). c is a multiple of 4.
#[derive(Debug, Clone, Copy)]
pub struct NormForward {
    /// Input `[p, c]`.
    pub x: Matrix<bf16>,
    /// Added to x `[p, c]`; zero if absent.
    pub delta: Option<Matrix<bf16>>,
    /// Scale `[1, c]`.
    pub gamma: Matrix<f32>,
    /// Shift `[1, c]`; zero if absent.
    pub beta: Option<Matrix<f32>>,
    /// Added to the variance.
    pub epsilon: f32,
    /// Sum `[p, c]`, overwritten; may be x itself.
    pub residual: Matrix<bf16>,
    /// Normalized output `[p, c]`, overwritten.
    pub y: Matrix<bf16>,
    /// Mean and reciprocal standard deviation `[p, 2]`, overwritten.
    pub stats: Matrix<f32>,
}

/// The gradient of [`NormForward`].
///
/// With n = (residual - mean) rstd and g = dy gamma, dx = rstd (g - mean(g) - n mean(g n)), dgamma
/// = the column sums of dy n, and dbeta = the column sums of dy.
#[derive(Debug, Clone, Copy)]
pub struct NormBackward {
    /// Gradient of y `[p, c]`.
    pub dy: Matrix<bf16>,
    /// Residual `[p, c]`, as the forward pass left it.
    pub residual: Matrix<bf16>,
    /// Statistics `[p, 2]`, as the forward pass left them.
    pub stats: Matrix<f32>,
    /// Scale `[1, c]`.
    pub gamma: Matrix<f32>,
    /// Gradient of the residual `[p, c]`.
    pub dx: Matrix<bf16>,
    /// Whether dx is overwritten, without being read, or added to.
    pub accumulate_dx: Accumulate,
    /// Gradient of gamma `[1, c]`.
    pub dgamma: Matrix<f32>,
    /// Gradient of beta `[1, c]`, if wanted.
    pub dbeta: Option<Matrix<f32>>,
    /// Whether dgamma and dbeta are overwritten or added to.
    pub accumulate: Accumulate,
    /// Scratch of shape [`norm_backward_scratch`].
    pub scratch: Matrix<f32>,
}

/// Queues a [`NormForward`].
///
/// # Errors
/// [`Error::Gaps`]; [`Error::Shape`], also if c is not a multiple of 4; [`Error::TooLarge`] beyond
/// [`MAX_WIDTH`]; [`Error::Alignment`], [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
pub fn norm_forward(device: &mut Device, op: &NormForward) -> Result<(), Error> {
    let NormForward { x, delta, gamma, beta, epsilon, residual, y, stats } = *op;
    let shape @ [rows, width] = x.shape();
    let mut checks = device.checks("norm forward");
    checks
        .limit("the width", width, MAX_WIDTH)?
        .columns_of("x", shape, 4)?
        .input("x", x, shape, 8)?
        .optional("delta", delta, shape, 8)?
        .input("gamma", gamma, [1, width], 16)?
        .optional("beta", beta, [1, width], 16)?;
    checks
        .output_or_input("residual", residual, ("x", x), shape, 8)?
        .output("y", y, shape, 8)?
        .output("stats", stats, [rows, 2], 8)?;
    let warps = width.div_ceil(1024).next_power_of_two();
    let blocks = if width == 0 { 0 } else { rows.div_ceil(8 / warps) };
    let vectors = width as u32 / 4;
    device.launch(
        kernels::entry(&format!("norm_forward_{warps}")),
        Grid::line(blocks, 256),
        &arguments![x, delta, gamma, beta, residual, y, stats, rows as u64, vectors, epsilon],
    )
}

/// The shape of the scratch of [`NormBackward`] for rows of `width` elements.
#[must_use]
pub fn norm_backward_scratch(device: &Device, width: usize) -> [usize; 2] {
    [device.multiprocessors(), 2 * width]
}

/// Queues a [`NormBackward`]. The order of the sums over rows depends on the shape and on the
/// number of multiprocessors.
///
/// # Errors
/// See [`norm_forward`].
pub fn norm_backward(device: &mut Device, op: &NormBackward) -> Result<(), Error> {
    let NormBackward { dy, residual, stats, gamma, dx, dgamma, dbeta, scratch, .. } = *op;
    let shape @ [rows, width] = dy.shape();
    let mut checks = device.checks("norm backward");
    checks
        .limit("the width", width, MAX_WIDTH)?
        .columns_of("dy", shape, 4)?
        .input("dy", dy, shape, 8)?
        .input("residual", residual, shape, 8)?
        .input("stats", stats, [rows, 2], 8)?
        .input("gamma", gamma, [1, width], 16)?
        .output("dx", dx, shape, 8)?
        .output("dgamma", dgamma, [1, width], 4)?
        .output("scratch", scratch, norm_backward_scratch(device, width), 16)?;
    if let Some(dbeta) = dbeta {
        checks.output("dbeta", dbeta, [1, width], 4)?;
    }
    let warps = match width.div_ceil(512) {
        3 => 3,
        warps => warps.next_power_of_two(),
    };
    let overwrite = if op.accumulate_dx == Accumulate::Overwrite { "_overwrite" } else { "" };
    let block_rows = 16 / warps;
    let blocks =
        if width == 0 { 0 } else { rows.div_ceil(block_rows).min(device.multiprocessors()) };
    let threads = (32 * warps * block_rows) as u32;
    let vectors = width as u32 / 4;
    device.launch(
        kernels::entry(&format!("norm_backward_{warps}{overwrite}")),
        Grid { shared: 192 * threads, ..Grid::line(blocks, threads) },
        &arguments![dy, residual, stats, gamma, dx, scratch, rows as u64, vectors],
    )?;
    let columns = if dbeta.is_some() { 2 * width } else { width };
    let add = u32::from(op.accumulate == Accumulate::Add);
    device.launch(
        "norm_parameters",
        Grid::line(columns.div_ceil(16), 512),
        &arguments![scratch, dgamma, dbeta, blocks as u32, width as u32, add],
    )
}
