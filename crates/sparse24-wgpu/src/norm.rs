//! LayerNorm and its gradient.

use sparse24_core::op::Accumulate;

use crate::{
    Device, Error, Matrix, WORKGROUP,
    error::check_shape,
    kernels,
    sums::{ROWS, column_sums},
};

/// y = (x - mean) * rstd * gamma + beta for each row.
#[derive(Debug, Clone, Copy)]
pub struct NormForward {
    /// `[p, d]`.
    pub x: Matrix,
    /// `[1, d]`.
    pub gamma: Matrix,
    /// `[1, d]`; zero if absent.
    pub beta: Option<Matrix>,
    /// Added to the variance.
    pub epsilon: f32,
    /// `[p, d]`, overwritten.
    pub y: Matrix,
    /// Mean and reciprocal standard deviation `[p, 2]`, overwritten.
    pub stats: Matrix,
}

/// The gradient of [`NormForward`].
#[derive(Debug, Clone, Copy)]
pub struct NormBackward {
    /// `[p, d]`.
    pub dy: Matrix,
    /// `[p, d]`.
    pub x: Matrix,
    /// From the forward pass.
    pub stats: Matrix,
    /// `[1, d]`.
    pub gamma: Matrix,
    /// `[p, d]`.
    pub dx: Matrix,
    /// Whether dx is overwritten or added to.
    pub accumulate_dx: Accumulate,
    /// `[1, d]`.
    pub dgamma: Matrix,
    /// `[1, d]`.
    pub dbeta: Option<Matrix>,
    /// Whether dgamma and dbeta are overwritten or added to.
    pub accumulate: Accumulate,
    /// [`norm_backward_scratch`] elements, overwritten.
    pub scratch: Matrix,
}

/// Computes [`NormForward`].
///
/// # Errors
/// [`Error::Shape`] unless the operands fit; failures of earlier work.
pub fn norm_forward(device: &mut Device, op: &NormForward) -> Result<(), Error> {
    const OPERATION: &str = "norm forward";
    let &NormForward { x, gamma, beta, epsilon, y, stats } = op;
    let [p, d] = x.shape;
    check_shape(OPERATION, "gamma", [1, d], gamma)?;
    check_shape(OPERATION, "y", [p, d], y)?;
    check_shape(OPERATION, "stats", [p, 2], stats)?;
    if let Some(beta) = beta {
        check_shape(OPERATION, "beta", [1, d], beta)?;
    }
    let vectors = [gamma.offset as u32, beta.map_or(0, |beta| beta.offset as u32)];
    let sizes = [p as u32, d as u32];
    let rest = [u32::from(beta.is_some()), epsilon.to_bits()];
    let constants = [x.place(), y.place(), stats.place(), vectors, sizes, rest].concat();
    let matrices = [x, gamma, beta.unwrap_or(gamma), y, stats];
    device.run(&kernels::NORM_FORWARD, matrices, &constants, p)
}

/// Elements of the scratch of [`norm_backward`].
#[must_use]
pub fn norm_backward_scratch([p, d]: [usize; 2]) -> usize {
    p.div_ceil(ROWS) * 2 * d
}

/// Computes [`NormBackward`].
///
/// # Errors
/// Like [`norm_forward`].
///
/// # Panics
/// If the scratch is too small.
pub fn norm_backward(device: &mut Device, op: &NormBackward) -> Result<(), Error> {
    const OPERATION: &str = "norm backward";
    let &NormBackward { dy, x, stats, gamma, dx, dgamma, dbeta, .. } = op;
    let [p, d] = dy.shape;
    for (operand, expected, found) in [
        ("x", [p, d], x),
        ("stats", [p, 2], stats),
        ("gamma", [1, d], gamma),
        ("dx", [p, d], dx),
        ("dgamma", [1, d], dgamma),
        ("dbeta", [1, d], dbeta.unwrap_or(dgamma)),
    ] {
        check_shape(OPERATION, operand, expected, found)?;
    }
    let [dx_offset, dx_stride] = dx.place();
    let rest = [gamma.offset as u32, dx_offset, dx_stride, p as u32, d as u32];
    let adds = [u32::from(op.accumulate_dx == Accumulate::Add)];
    let constants = [&dy.place()[..], &x.place(), &stats.place(), &rest, &adds].concat();
    device.run(&kernels::NORM_BACKWARD, [dy, x, stats, gamma, dx], &constants, p)?;
    let blocks = p.div_ceil(ROWS);
    let sums = op.scratch.reshaped([blocks, 2 * d]);
    assert_eq!(sums.offset, 0, "scratch is a whole buffer");
    let matrices = [dy, x, stats, gamma, sums];
    device.run(&kernels::NORM_SUMS, matrices, &constants, (blocks * d).div_ceil(WORKGROUP))?;
    let half = |at: usize| Matrix { offset: at * d, shape: [blocks, d], ..sums };
    column_sums(device, half(0), dgamma, op.accumulate)?;
    match dbeta {
        None => Ok(()),
        Some(dbeta) => column_sums(device, half(1), dbeta, op.accumulate),
    }
}
