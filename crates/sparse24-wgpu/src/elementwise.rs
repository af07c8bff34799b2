//! Copies and fills.

use crate::{Device, Error, GROUP, Matrix, error::check_shape, kernels};

/// to = from, to the bit; both of one shape, in different buffers.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree; failures of earlier work.
pub fn copy(device: &mut Device, from: Matrix, to: Matrix) -> Result<(), Error> {
    check_shape("copy", "to", from.shape, to)?;
    let elements = from.elements();
    if from.is_contiguous() && to.is_contiguous() && elements > 0 {
        return device.copy_contiguous(from, to);
    }
    let ([to_offset, to_stride], [from_offset, from_stride]) = (to.place(), from.place());
    let [columns, elements] = [from.shape[1], elements].map(|n| n as u32);
    let constants = [to_offset, to_stride, columns, elements, from_offset, from_stride];
    device.run(&kernels::COPY, [from, to], &constants, from.elements().div_ceil(GROUP))
}

/// Every element = value, to the bit.
///
/// # Errors
/// Failures of earlier work.
pub fn fill(device: &mut Device, to: Matrix, value: u32) -> Result<(), Error> {
    let ([offset, stride], elements) = (to.place(), to.elements());
    let constants = [offset, stride, to.shape[1] as u32, elements as u32, value];
    device.run(&kernels::FILL, [to], &constants, elements.div_ceil(GROUP))
}
