//! The moving average of a weight over optimizer steps, with the bits of `sparse24_cpu::average`.

use crate::{
    Device, Error, Matrix,
    health::Health,
    launch::{Grid, arguments},
};

/// average = decay * average + (1 - decay) * w, both of one shape; nothing while the flag of
/// `health` is up.
///
/// # Errors
/// [`Error::Shape`], [`Error::Gaps`], [`Error::Alias`], [`Error::Stale`], [`Error::Driver`].
pub fn moving_average(
    device: &mut Device,
    w: Matrix<f32>,
    average: Matrix<f32>,
    decay: f32,
    health: Matrix<u32>,
) -> Result<(), Error> {
    device
        .checks("moving average")
        .input("w", w, w.shape(), 4)?
        .input("health", health, [1, Health::WORDS], 4)?
        .output("average", average, w.shape(), 4)?;
    let elements = w.elements();
    let arguments = arguments![w, average, health, decay, elements as u64];
    device.launch("moving_average", Grid::line(elements.div_ceil(256), 256), &arguments)
}
