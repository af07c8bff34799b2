//! GELU, GEGLU and SwiGLU, forward and backward, in bf16 with f32 arithmetic.
//!
//! GELU has a tanh and an erf form; GEGLU uses the tanh form. A gated activation multiplies the
//! activated first half of its columns by the second half.

use half::bf16;
use sparse24_core::op::Activation;

use crate::{
    Device, Error, Matrix, Result,
    launch::{Argument, Grid, arguments},
};

const THREADS: usize = 256;

/// The most elements of H that a gated activation supports.
pub const MAX_GATED: usize = u32::MAX as usize - THREADS;

/// h = act(z): h `[p, f]`, z `[p, f]` or, gated, `[p, 2f]`. Gated activations are fastest if f is a
/// multiple of 8.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`], [`Error::Alignment`] to 16 bytes, [`Error::TooLarge`] beyond
/// [`MAX_GATED`], [`Error::Activation`], [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
pub fn forward(
    device: &mut Device,
    activation: Activation,
    z: Matrix<bf16>,
    h: Matrix<bf16>,
) -> Result {
    let [(operation, entry), _] = kernels(activation)?;
    let [p, f] = h.shape();
    let wide = [p, activation.columns_in() * f];
    device.checks(operation).input("z", z, wide, 16)?.output("h", h, [p, f], 16)?;
    launch(device, activation, [operation, entry], [p, f], &arguments![z, h])
}

/// dz = dh act'(z): dh `[p, f]`, z and dz `[p, f]` or, gated, `[p, 2f]`.
///
/// With a, b the halves of z, a gated dz is `[dh b act'(a), dh act(a)]`.
///
/// # Errors
/// See [`forward`].
pub fn backward(
    device: &mut Device,
    activation: Activation,
    dh: Matrix<bf16>,
    z: Matrix<bf16>,
    dz: Matrix<bf16>,
) -> Result {
    let [_, (operation, entry)] = kernels(activation)?;
    let [p, f] = dh.shape();
    let wide = [p, activation.columns_in() * f];
    device
        .checks(operation)
        .input("dh", dh, [p, f], 16)?
        .input("z", z, wide, 16)?
        .output("dz", dz, wide, 16)?;
    launch(device, activation, [operation, entry], [p, f], &arguments![dh, z, dz])
}

/// Every activation with the operation and the kernel of its forward and of its backward pass.
static KERNELS: [(Activation, [(&str, &str); 2]); 6] = [
    (Activation::Gelu, [("gelu forward", "gelu_forward"), ("gelu backward", "gelu_backward")]),
    (
        Activation::GeluErf,
        [("gelu-erf forward", "gelu_erf_forward"), ("gelu-erf backward", "gelu_erf_backward")],
    ),
    (Activation::Geglu, [("geglu forward", "geglu_forward"), ("geglu backward", "geglu_backward")]),
    (
        Activation::Swiglu,
        [("swiglu forward", "swiglu_forward"), ("swiglu backward", "swiglu_backward")],
    ),
    (Activation::Tanh, [("tanh forward", "tanh_forward"), ("tanh backward", "tanh_backward")]),
    (Activation::Relu, [("relu forward", "relu_forward"), ("relu backward", "relu_backward")]),
];

fn kernels(activation: Activation) -> Result<[(&'static str, &'static str); 2]> {
    let found = KERNELS.iter().find(|(known, _)| *known == activation);
    found.map(|(_, kernels)| *kernels).ok_or(Error::Activation { activation })
}

fn launch(
    device: &mut Device,
    activation: Activation,
    [operation, entry]: [&'static str; 2],
    [p, f]: [usize; 2],
    operands: &[Argument],
) -> Result {
    let elements = p * f;
    if activation.columns_in() == 1 {
        // Eight elements per thread, and one each for the up to seven that remain.
        let grid = Grid::line((elements / 8 + elements % 8).div_ceil(THREADS), THREADS as u32);
        return device.launch(entry, grid, &[operands, &arguments![elements as u64]].concat());
    }
    device.checks(operation).limit("the number of elements", elements, MAX_GATED)?;
    let width = if f.is_multiple_of(8) { 8 } else { 1 };
    let runs = elements / width;
    let sizes = arguments![runs as u32, f as u32, width as u32];
    let grid = Grid::line(runs.div_ceil(THREADS), THREADS as u32);
    device.launch(entry, grid, &[operands, &sizes].concat())
}
