//! The moving average of a weight over optimizer steps.

use crate::{
    Device, Error, Matrix, WORKGROUP,
    error::{check_contiguous, check_shape},
    kernels,
};

/// average = decay * average + (1 - decay) * w, both contiguous, of equal shape. Does nothing while
/// the flag of [`health`](crate::health) is raised.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree; [`Error::Invalid`] for gaps between rows; failures of
/// earlier work.
pub fn moving_average(
    device: &mut Device,
    w: Matrix,
    average: Matrix,
    decay: f32,
    health: Matrix,
) -> Result<(), Error> {
    check_shape("moving average", "average", w.shape, average)?;
    for (operand, found) in [("w", w), ("average", average)] {
        check_contiguous("moving average", operand, found)?;
    }
    let places = [w.offset, average.offset, w.elements()].map(|n| n as u32);
    let factors = [decay, 1.0 - decay].map(f32::to_bits);
    let constants = [&places[..], &factors].concat();
    let groups = w.elements().div_ceil(WORKGROUP);
    device.run(&kernels::MOVING_AVERAGE, [w, health, average], &constants, groups)
}
