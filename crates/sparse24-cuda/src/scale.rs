//! A matrix times a number on the device, and the gradient of the number, as in
//! `sparse24_cpu::scale`.

use sparse24_core::op::Accumulate;

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

/// out = s x: x and out `[n, d]`, s `[1, 1]`.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`], [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
pub fn scale(
    device: &mut Device,
    x: Matrix<f32>,
    s: Matrix<f32>,
    out: Matrix<f32>,
) -> Result<(), Error> {
    device.checks("scale").input("x", x, x.shape(), 4)?.input("s", s, [1, 1], 4)?.output(
        "out",
        out,
        x.shape(),
        4,
    )?;
    let grid = Grid::line(x.elements().div_ceil(256), 256);
    device.launch("scale", grid, &arguments![x, s, out, x.elements() as u64])
}

/// ds = the sum of x * dout, or ds += it: x and dout `[n, d]`, ds `[1, 1]`. The sum has a fixed
/// order in f64, which differs from the CPU's.
///
/// # Errors
/// See [`scale`].
pub fn scale_grad(
    device: &mut Device,
    x: Matrix<f32>,
    dout: Matrix<f32>,
    ds: Matrix<f32>,
    accumulate: Accumulate,
) -> Result<(), Error> {
    device
        .checks("scale grad")
        .input("x", x, x.shape(), 4)?
        .input("dout", dout, x.shape(), 4)?
        .output("ds", ds, [1, 1], 4)?;
    let add = u32::from(accumulate == Accumulate::Add);
    let arguments = arguments![x, dout, ds, x.elements() as u64, add];
    device.launch("scale_grad", Grid::line(1, 1024), &arguments)
}
