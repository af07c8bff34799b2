//! The checks that operations begin with: of handles, shapes, alignment and shared memory.

use std::ops::Range;

use crate::{Device, Error, Matrix, Scalar};

impl Device {
    /// The handle is live and has the shape that the others imply.
    pub(crate) fn check<T: Scalar>(
        &self,
        operation: &'static str,
        operand: &'static str,
        matrix: Matrix<T>,
        expected: [usize; 2],
    ) -> Result<(), Error> {
        self.check_live(operation, operand, matrix)?;
        if matrix.shape == expected {
            Ok(())
        } else {
            Err(Error::Shape { operation, operand, expected, found: matrix.shape })
        }
    }

    /// The handle is of this device and of memory that it still holds.
    pub(crate) fn check_live<T: Scalar>(
        &self,
        operation: &'static str,
        operand: &'static str,
        matrix: Matrix<T>,
    ) -> Result<(), Error> {
        if matrix.mark == self.mark { Ok(()) } else { Err(Error::Stale { operation, operand }) }
    }

    /// Every row begins at a multiple of `bytes`.
    pub(crate) fn check_aligned<T: Scalar>(
        &self,
        operation: &'static str,
        operand: &'static str,
        matrix: Matrix<T>,
        bytes: usize,
    ) -> Result<(), Error> {
        if matrix.is_aligned(bytes) {
            Ok(())
        } else {
            Err(Error::Alignment { operation, operand, bytes })
        }
    }

    /// An output shares no memory with the others.
    pub(crate) fn check_apart(
        &self,
        operation: &'static str,
        (output, span): (&'static str, Range<u64>),
        others: &[(&'static str, Range<u64>)],
    ) -> Result<(), Error> {
        let shares = |other: &Range<u64>| span.start < other.end && other.start < span.end;
        match others.iter().find(|(_, other)| shares(other)) {
            None => Ok(()),
            Some(&(other, _)) => Err(Error::Alias { operation, output, other }),
        }
    }
}

/// The handle is live, has the shape that the others imply, has no gaps between rows, and begins at
/// a multiple of `bytes`.
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
        return Err(Error::Gaps { operation, operand, columns: shape[1], stride: matrix.stride() });
    }
    device.check_aligned(operation, operand, matrix.reshaped([1, matrix.elements()]), bytes)
}
