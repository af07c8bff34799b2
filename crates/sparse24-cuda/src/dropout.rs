//! Dropout of elements or of whole sequences from the counter-based stream, as in
//! `sparse24_cpu::dropout`.

use half::bf16;
use sparse24_core::op::Dropout;

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

/// The most elements that the stream can number.
pub const MAX_ELEMENTS: usize = 1 << 34;

const THREADS: u32 = 256;

/// out = dropout(x), with elements numbered row by row at the step state of [`Device::set_step`];
/// `out` has the shape of x and may be x. The backward pass is the same call on the gradient.
///
/// # Errors
/// [`Error::OutOfRange`] for a probability outside [0, 1); [`Error::Shape`], [`Error::Gaps`],
/// [`Error::Alignment`] to 16 bytes, [`Error::Alias`], [`Error::TooLarge`] beyond [`MAX_ELEMENTS`],
/// [`Error::Stale`], [`Error::Driver`].
pub fn dropout(
    device: &mut Device,
    x: Matrix<bf16>,
    out: Matrix<bf16>,
    &Dropout { p, site }: &Dropout,
) -> Result<(), Error> {
    let elements = x.elements();
    let mut checks = device.checks("dropout");
    checks.below_one("the dropout probability", p)?.input("x", x, x.shape(), 16)?.limit(
        "the number of elements",
        elements,
        MAX_ELEMENTS,
    )?;
    checks.output_or_input("out", out, ("x", x), x.shape(), 16)?;
    let (scale, state) = (1.0 / (1.0 - p), device.state());
    device.launch(
        "dropout",
        Grid::line(elements.div_ceil(8 * THREADS as usize), THREADS),
        &arguments![x, out, elements as u64, state, site.word(), p, scale],
    )
}

/// out = x `[p, d]` with whole sequences kept and scaled by 1 / (1 - p), or zeroed: as [`dropout`],
/// with the number of a sequence in the place of an element's.
///
/// # Errors
/// Errors of [`dropout`]; [`Error::Shape`] unless the rows are whole sequences and d is a multiple
/// of 8.
pub fn drop_sequences(
    device: &mut Device,
    x: Matrix<bf16>,
    out: Matrix<bf16>,
    sequence_length: usize,
    &Dropout { p, site }: &Dropout,
) -> Result<(), Error> {
    let shape @ [rows, d] = x.shape();
    let sequences = rows.checked_div(sequence_length).unwrap_or(0);
    let mut checks = device.checks("drop sequences");
    checks
        .below_one("the dropout probability", p)?
        .columns_of("x", shape, 8)?
        .input("x", x, [sequences * sequence_length, d], 16)?
        .limit("the number of sequences", sequences, MAX_ELEMENTS)?;
    checks.output_or_input("out", out, ("x", x), shape, 16)?;
    let (scale, state, elements) = (1.0 / (1.0 - p), device.state(), x.elements());
    let length = (sequence_length * d) as u64;
    device.launch(
        "drop_sequences",
        Grid::line(elements.div_ceil(8 * THREADS as usize), THREADS),
        &arguments![x, out, elements as u64, length, state, site.word(), p, scale],
    )
}
