//! Dropout from the counter-based stream, as `sparse24_cpu::dropout`: the backward draws again what
//! the forward drew.

use half::bf16;
use sparse24_core::philox::Site;

use crate::{
    Device, Error, Matrix,
    launch::{Argument, Grid},
    operand::check_packed,
};

/// Element e of a tensor is kept when its uniform (word e mod 4 of call e / 4 of the stream) is at
/// least `p`, and is then scaled by 1 / (1 - p).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The probability of being dropped, in [0, 1).
    pub p: f32,
    /// Where the uniforms come from, at the seed, step and micro-step of [`Device::set_step`].
    pub site: Site,
}

/// The most elements of a tensor that the stream numbers.
pub const MAX_ELEMENTS: usize = 1 << 34;

impl Dropout {
    /// The probability is one, and not 1.
    pub(crate) fn check(&self, operation: &'static str) -> Result<(), Error> {
        if (0.0..1.0).contains(&self.p) {
            return Ok(());
        }
        Err(Error::OutOfRange {
            operation,
            what: "the probability of dropout",
            found: self.p.into(),
            expected: "at least 0 and below 1",
        })
    }
}

/// x = dropout(x), in place; elements are numbered row after row. The backward is the same call on
/// the gradient.
///
/// # Errors
/// [`Error::OutOfRange`] for a probability outside of [0, 1); [`Error::Gaps`]; [`Error::Alignment`]
/// to 16 bytes; [`Error::TooLarge`] above [`MAX_ELEMENTS`]; [`Error::Stale`], [`Error::Driver`].
pub fn dropout(device: &mut Device, x: Matrix<bf16>, dropout: &Dropout) -> Result<(), Error> {
    const OPERATION: &str = "dropout";
    const THREADS: u32 = 256;
    dropout.check(OPERATION)?;
    check_packed(device, OPERATION, "x", x, x.shape(), 16)?;
    let elements = x.elements();
    if elements > MAX_ELEMENTS {
        return Err(Error::TooLarge {
            operation: OPERATION,
            what: "the number of elements",
            found: elements,
            limit: MAX_ELEMENTS,
        });
    }
    let scale = 1.0 / (1.0 - dropout.p);
    let arguments = [
        x.into(),
        Argument::U64(elements as u64),
        device.state(),
        dropout.site.word().into(),
        dropout.p.into(),
        scale.into(),
    ];
    device.launch(
        "dropout",
        Grid::line(elements.div_ceil(8 * THREADS as usize), THREADS),
        &arguments,
    )
}
