//! The residual sum and its LayerNorm in one pass, and their backward.
//!
//! Statistics are those of the residual as rounded to bf16, because that is what the backward
//! reads. Source: Ba et al., "Layer Normalization", arXiv 1607.06450.

use half::bf16;

use crate::{
    Beta, Device, Error, Matrix,
    launch::{Argument, Grid},
    operand::check_packed,
};

/// The widest row.
pub const MAX_WIDTH: usize = 8192;

/// residual = x + delta; y = (residual - mean) * rstd * gamma + beta for each row of c elements,
/// epsilon 1e-5; c is a multiple of 4.
#[derive(Debug, Clone, Copy)]
pub struct NormForward {
    /// `[p, c]`.
    pub x: Matrix<bf16>,
    /// `[p, c]`; none is zero.
    pub delta: Option<Matrix<bf16>>,
    /// `[1, c]`.
    pub gamma: Matrix<f32>,
    /// `[1, c]`; none is zero.
    pub beta: Option<Matrix<f32>>,
    /// `[p, c]`, overwritten; may be x itself.
    pub residual: Matrix<bf16>,
    /// `[p, c]`, overwritten.
    pub y: Matrix<bf16>,
    /// Mean and reciprocal standard deviation `[p, 2]`, overwritten.
    pub stats: Matrix<f32>,
}

/// The gradient of [`NormForward`].
///
/// With n = (residual - mean) * rstd and g = dy * gamma: dresidual += rstd * (g - mean(g) - n *
/// mean(g * n)), dgamma = the column sums of dy * n, dbeta = those of dy.
#[derive(Debug, Clone, Copy)]
pub struct NormBackward {
    /// `[p, c]`.
    pub dy: Matrix<bf16>,
    /// As the forward left it.
    pub residual: Matrix<bf16>,
    /// As the forward left it.
    pub stats: Matrix<f32>,
    /// `[1, c]`.
    pub gamma: Matrix<f32>,
    /// `[p, c]`, in place.
    pub dresidual: Matrix<bf16>,
    /// `[1, c]`.
    pub dgamma: Matrix<f32>,
    /// `[1, c]`; none is not wanted.
    pub dbeta: Option<Matrix<f32>>,
    /// For dgamma and dbeta.
    pub accumulate: Beta,
    /// [`norm_backward_scratch`].
    pub scratch: Matrix<f32>,
}

/// See [`NormForward`].
///
/// # Errors
/// [`Error::Gaps`]; [`Error::Shape`], also for a width that is no multiple of 4;
/// [`Error::TooLarge`] beyond [`MAX_WIDTH`]; [`Error::Alignment`], [`Error::Alias`],
/// [`Error::Stale`], [`Error::Driver`].
pub fn norm_forward(device: &mut Device, op: &NormForward) -> Result<(), Error> {
    const OPERATION: &str = "norm forward";
    let [rows, width] = op.x.shape();
    check_width(OPERATION, op.x)?;
    let mut inputs = vec![("x", op.x.span()), ("gamma", op.gamma.span())];
    check_packed(device, OPERATION, "x", op.x, [rows, width], 8)?;
    check_packed(device, OPERATION, "gamma", op.gamma, [1, width], 16)?;
    if let Some(delta) = op.delta {
        check_packed(device, OPERATION, "delta", delta, [rows, width], 8)?;
        inputs.push(("delta", delta.span()));
    }
    if let Some(beta) = op.beta {
        check_packed(device, OPERATION, "beta", beta, [1, width], 16)?;
        inputs.push(("beta", beta.span()));
    }
    check_packed(device, OPERATION, "residual", op.residual, [rows, width], 8)?;
    check_packed(device, OPERATION, "y", op.y, [rows, width], 8)?;
    check_packed(device, OPERATION, "stats", op.stats, [rows, 2], 8)?;
    // A thread has read its part of x before it writes it.
    let others = if op.residual.span() == op.x.span() { &inputs[1..] } else { &inputs[..] };
    device.check_apart(OPERATION, ("residual", op.residual.span()), others)?;
    inputs.push(("residual", op.residual.span()));
    device.check_apart(OPERATION, ("y", op.y.span()), &inputs)?;
    inputs.push(("y", op.y.span()));
    device.check_apart(OPERATION, ("stats", op.stats.span()), &inputs)?;
    let (entry, warps) = match width.div_ceil(1024) {
        0..=1 => ("norm_forward_1", 1),
        2 => ("norm_forward_2", 2),
        3..=4 => ("norm_forward_4", 4),
        _ => ("norm_forward_8", 8),
    };
    let blocks = if width == 0 { 0 } else { rows.div_ceil(8 / warps) };
    let (delta, beta) = (op.delta.into(), op.beta.into());
    let sizes = [Argument::U64(rows as u64), Argument::U32(width as u32 / 4)];
    let [x, gamma, residual, y, stats] =
        [op.x.into(), op.gamma.into(), op.residual.into(), op.y.into(), op.stats.into()];
    device.launch(
        entry,
        Grid::line(blocks, 256),
        &[x, delta, gamma, beta, residual, y, stats, sizes[0], sizes[1]],
    )
}

/// The shape of the scratch of [`NormBackward`] for rows of `width` elements.
#[must_use]
pub fn norm_backward_scratch(device: &Device, width: usize) -> [usize; 2] {
    [device.multiprocessors(), 2 * width]
}

/// See [`NormBackward`]. Row sums of the parameters run in an order that depends on the shape and
/// on the number of multiprocessors.
///
/// # Errors
/// As [`norm_forward`].
pub fn norm_backward(device: &mut Device, op: &NormBackward) -> Result<(), Error> {
    const OPERATION: &str = "norm backward";
    let [rows, width] = op.dy.shape();
    check_width(OPERATION, op.dy)?;
    check_packed(device, OPERATION, "dy", op.dy, [rows, width], 8)?;
    check_packed(device, OPERATION, "residual", op.residual, [rows, width], 8)?;
    check_packed(device, OPERATION, "stats", op.stats, [rows, 2], 8)?;
    check_packed(device, OPERATION, "gamma", op.gamma, [1, width], 16)?;
    check_packed(device, OPERATION, "dresidual", op.dresidual, [rows, width], 8)?;
    check_packed(device, OPERATION, "dgamma", op.dgamma, [1, width], 4)?;
    check_packed(
        device,
        OPERATION,
        "scratch",
        op.scratch,
        norm_backward_scratch(device, width),
        16,
    )?;
    let mut others = vec![
        ("dy", op.dy.span()),
        ("residual", op.residual.span()),
        ("stats", op.stats.span()),
        ("gamma", op.gamma.span()),
    ];
    for output in [
        ("dresidual", op.dresidual.span()),
        ("dgamma", op.dgamma.span()),
        ("scratch", op.scratch.span()),
    ] {
        device.check_apart(OPERATION, output.clone(), &others)?;
        others.push(output);
    }
    if let Some(dbeta) = op.dbeta {
        check_packed(device, OPERATION, "dbeta", dbeta, [1, width], 4)?;
        device.check_apart(OPERATION, ("dbeta", dbeta.span()), &others)?;
    }
    let (entry, warps) = match width.div_ceil(512) {
        0..=1 => ("norm_backward_1", 1),
        2 => ("norm_backward_2", 2),
        3 => ("norm_backward_3", 3),
        4 => ("norm_backward_4", 4),
        5..=8 => ("norm_backward_8", 8),
        _ => ("norm_backward_16", 16),
    };
    let rows_a_block = 16 / warps;
    let blocks =
        if width == 0 { 0 } else { rows.div_ceil(rows_a_block).min(device.multiprocessors()) };
    let threads = (32 * warps * rows_a_block) as u32;
    let sizes = [Argument::U64(rows as u64), Argument::U32(width as u32 / 4)];
    let inputs: [Argument; 4] =
        [op.dy.into(), op.residual.into(), op.stats.into(), op.gamma.into()];
    let arguments = [&inputs[..], &[op.dresidual.into(), op.scratch.into()], &sizes].concat();
    device.launch(
        entry,
        Grid { shared: 192 * threads, ..Grid::line(blocks, threads) },
        &arguments,
    )?;
    let accumulate = u32::from(op.accumulate == Beta::Accumulate);
    let columns = if op.dbeta.is_some() { 2 * width } else { width };
    device.launch(
        "norm_parameters",
        Grid::line(columns.div_ceil(16), 512),
        &[
            op.scratch.into(),
            op.dgamma.into(),
            op.dbeta.into(),
            (blocks as u32).into(),
            (width as u32).into(),
            accumulate.into(),
        ],
    )
}

fn check_width(operation: &'static str, x: Matrix<bf16>) -> Result<(), Error> {
    let [rows, width] = x.shape();
    if width > MAX_WIDTH {
        return Err(Error::TooLarge {
            operation,
            what: "a row's width",
            found: width,
            limit: MAX_WIDTH,
        });
    }
    if width % 4 != 0 {
        return Err(Error::Shape {
            operation,
            operand: "the rows",
            expected: [rows, width.next_multiple_of(4)],
            found: [rows, width],
        });
    }
    Ok(())
}
