//! Dropout from the counter-based stream, as in `sparse24_cpu::dropout`.

use half::bf16;
use sparse24_core::op::Dropout;

use crate::{
    Device, Error, Matrix,
    launch::{Grid, arguments},
};

/// The most elements that the stream can number.
pub const MAX_ELEMENTS: usize = 1 << 34;

/// x = dropout(x), in place, with elements numbered row by row at the step state of
/// [`Device::set_step`]. The backward pass is the same call on the gradient.
///
/// # Errors
/// [`Error::OutOfRange`] for a probability outside [0, 1); [`Error::Gaps`], [`Error::Alignment`] to
/// 16 bytes, [`Error::TooLarge`] beyond [`MAX_ELEMENTS`], [`Error::Stale`], [`Error::Driver`].
pub fn dropout(
    device: &mut Device,
    x: Matrix<bf16>,
    &Dropout { p, site }: &Dropout,
) -> Result<(), Error> {
    const THREADS: u32 = 256;
    let elements = x.elements();
    device
        .checks("dropout")
        .below_one("the dropout probability", p)?
        .input("x", x, x.shape(), 16)?
        .limit("the number of elements", elements, MAX_ELEMENTS)?;
    let (scale, state) = (1.0 / (1.0 - p), device.state());
    device.launch(
        "dropout",
        Grid::line(elements.div_ceil(8 * THREADS as usize), THREADS),
        &arguments![x, elements as u64, state, site.word(), p, scale],
    )
}
