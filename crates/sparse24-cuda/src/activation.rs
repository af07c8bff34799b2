//! GELU, GEGLU and SwiGLU, forward and backward, in bf16 with f32 inside.
//!
//! As `sparse24_cpu::activation`: GELU in its tanh form; a gated activation multiplies the
//! activated *first* half of its columns by the second.

use half::bf16;

use crate::{
    Device, Error, Matrix,
    launch::{Argument, Grid},
    operand::check_packed,
};

/// h = GELU(z), all `[p, f]`.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`]; [`Error::Alignment`] to 16 bytes; [`Error::Alias`],
/// [`Error::Stale`], [`Error::Driver`].
pub fn gelu_forward(device: &mut Device, z: Matrix<bf16>, h: Matrix<bf16>) -> Result<(), Error> {
    let shape = z.shape();
    check(device, "gelu forward", &[("z", z, shape)], ("h", h, shape))?;
    elementwise(device, "gelu_forward", z.elements(), &[z.into(), h.into()])
}

/// dz = dh * GELU'(z), all `[p, f]`.
///
/// # Errors
/// As [`gelu_forward`].
pub fn gelu_backward(
    device: &mut Device,
    dh: Matrix<bf16>,
    z: Matrix<bf16>,
    dz: Matrix<bf16>,
) -> Result<(), Error> {
    let shape = z.shape();
    check(device, "gelu backward", &[("dh", dh, shape), ("z", z, shape)], ("dz", dz, shape))?;
    elementwise(device, "gelu_backward", z.elements(), &[dh.into(), z.into(), dz.into()])
}

/// h = GELU(first half of z) * second half: z `[p, 2f]`, h `[p, f]`. Rows are fastest where 8
/// divides f.
///
/// # Errors
/// As [`gelu_forward`]; [`Error::TooLarge`] beyond [`MAX_GATED`] elements of h.
pub fn geglu_forward(device: &mut Device, z: Matrix<bf16>, h: Matrix<bf16>) -> Result<(), Error> {
    gated_forward(device, ["geglu forward", "geglu_forward"], z, h)
}

/// With a, b the halves of z: dz = [dh * b * GELU'(a), dh * GELU(a)]; z, dz `[p, 2f]`, dh `[p, f]`.
///
/// # Errors
/// As [`geglu_forward`].
pub fn geglu_backward(
    device: &mut Device,
    dh: Matrix<bf16>,
    z: Matrix<bf16>,
    dz: Matrix<bf16>,
) -> Result<(), Error> {
    gated_backward(device, ["geglu backward", "geglu_backward"], dh, z, dz)
}

/// h = SiLU(first half of z) * second half: z `[p, 2f]`, h `[p, f]`.
///
/// # Errors
/// As [`geglu_forward`].
pub fn swiglu_forward(device: &mut Device, z: Matrix<bf16>, h: Matrix<bf16>) -> Result<(), Error> {
    gated_forward(device, ["swiglu forward", "swiglu_forward"], z, h)
}

/// With a, b the halves of z: dz = [dh * b * SiLU'(a), dh * SiLU(a)]; z, dz `[p, 2f]`, dh `[p, f]`.
///
/// # Errors
/// As [`geglu_forward`].
pub fn swiglu_backward(
    device: &mut Device,
    dh: Matrix<bf16>,
    z: Matrix<bf16>,
    dz: Matrix<bf16>,
) -> Result<(), Error> {
    gated_backward(device, ["swiglu backward", "swiglu_backward"], dh, z, dz)
}

const THREADS: usize = 256;

/// The most elements of h that a gated activation serves.
pub const MAX_GATED: usize = u32::MAX as usize - THREADS;

type Operand = (&'static str, Matrix<bf16>, [usize; 2]);

fn check(
    device: &Device,
    operation: &'static str,
    inputs: &[Operand],
    output: Operand,
) -> Result<(), Error> {
    for &(operand, matrix, shape) in inputs.iter().chain([&output]) {
        check_packed(device, operation, operand, matrix, shape, 16)?;
    }
    let spans: Vec<_> =
        inputs.iter().map(|(operand, matrix, _)| (*operand, matrix.span())).collect();
    device.check_apart(operation, (output.0, output.1.span()), &spans)
}

/// Eight elements a thread, and one each of the at most seven that are left.
fn elementwise(
    device: &mut Device,
    entry: &'static str,
    elements: usize,
    operands: &[Argument],
) -> Result<(), Error> {
    let grid = Grid::line((elements / 8 + elements % 8).div_ceil(THREADS), THREADS as u32);
    device.launch(entry, grid, &[operands, &[Argument::U64(elements as u64)]].concat())
}

fn gated_forward(
    device: &mut Device,
    [operation, entry]: [&'static str; 2],
    z: Matrix<bf16>,
    h: Matrix<bf16>,
) -> Result<(), Error> {
    let [p, f] = h.shape();
    check(device, operation, &[("z", z, [p, 2 * f])], ("h", h, [p, f]))?;
    gated(device, [operation, entry], [p, f], &[z.into(), h.into()])
}

fn gated_backward(
    device: &mut Device,
    [operation, entry]: [&'static str; 2],
    dh: Matrix<bf16>,
    z: Matrix<bf16>,
    dz: Matrix<bf16>,
) -> Result<(), Error> {
    let [p, f] = dh.shape();
    check(device, operation, &[("dh", dh, [p, f]), ("z", z, [p, 2 * f])], ("dz", dz, [p, 2 * f]))?;
    gated(device, [operation, entry], [p, f], &[dh.into(), z.into(), dz.into()])
}

fn gated(
    device: &mut Device,
    [operation, entry]: [&'static str; 2],
    [p, f]: [usize; 2],
    operands: &[Argument],
) -> Result<(), Error> {
    if p * f > MAX_GATED {
        return Err(Error::TooLarge {
            operation,
            what: "the number of elements",
            found: p * f,
            limit: MAX_GATED,
        });
    }
    let width = if f.is_multiple_of(8) { 8 } else { 1 };
    let runs = p * f / width;
    let sizes = [runs, f, width].map(|size| Argument::U32(size as u32));
    device.launch(
        entry,
        Grid::line(runs.div_ceil(THREADS), THREADS as u32),
        &[operands, &sizes].concat(),
    )
}
