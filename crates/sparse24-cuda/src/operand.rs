//! The check that dense operations begin with: an operand lies without gaps where wide accesses may be.

use crate::{Device, Error, Matrix, Scalar};

/// The handle is live, has the shape that the others imply, has no gaps between rows, and begins at a multiple of `bytes`.
pub(crate) fn check_packed<T: Scalar>(
    device: &Device,
    operation: &'static str,
    operand: &'static str,
    matrix: Matrix<T>,
    shape: [usize; 2],
    bytes: usize,
) -> Result<(), Error> {
    device.check(operation, operand, matrix, shape)?;
    if !matrix.is_contiguous() {
        return Err(Error::Shape { operation, operand, expected: shape, found: [shape[0], matrix.stride()] });
    }
    device.check_aligned(operation, operand, matrix.reshaped([1, matrix.elements()]), bytes)
}
