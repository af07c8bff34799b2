//! Copies, fills and additions.

use crate::{Device, Error, Matrix, WORKGROUP, error::check_shape, kernels};

/// to = from, bit for bit. Both have the same shape and are in different buffers.
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
    device.run(&kernels::COPY, [from, to], &constants, from.elements().div_ceil(WORKGROUP))
}

/// Sets every element to these bits.
///
/// # Errors
/// Failures of earlier work.
pub fn fill(device: &mut Device, to: Matrix, value: u32) -> Result<(), Error> {
    let ([offset, stride], elements) = (to.place(), to.elements());
    let constants = [offset, stride, to.shape[1] as u32, elements as u32, value];
    device.run(&kernels::FILL, [to], &constants, elements.div_ceil(WORKGROUP))
}

/// out = x + delta, all of the same shape; out may be x.
///
/// # Errors
/// Like [`copy`].
pub fn add(device: &mut Device, x: Matrix, delta: Matrix, out: Matrix) -> Result<(), Error> {
    check_shape("add", "x", out.shape, x)?;
    check_shape("add", "delta", out.shape, delta)?;
    let in_place = x == out;
    let elements = out.elements();
    let sizes = [out.shape[1] as u32, elements as u32];
    let places = [delta.place(), out.place(), sizes, x.place()];
    let constants = [places.as_flattened(), &[u32::from(in_place)]].concat();
    let read = if in_place { delta } else { x };
    device.run(&kernels::ADD, [read, delta, out], &constants, elements.div_ceil(WORKGROUP))
}
