//! The one error type of this crate: what core refuses, and operands whose shapes disagree.

/// Why an operation refused its operands. Shapes are `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The semantics of core do not allow it.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
    /// An operand has not the shape that the others imply.
    #[error("{operation}: {operand} should be {expected:?}, found {found:?}")]
    Shape {
        /// The operation that refused.
        operation: &'static str,
        /// The operand at fault.
        operand: &'static str,
        /// The shape that the other operands imply.
        expected: [usize; 2],
        /// The shape given.
        found: [usize; 2],
    },
}

/// Whether `operand` has the shape that the others imply.
pub(crate) fn check_shape(operation: &'static str, operand: &'static str, expected: [usize; 2], found: [usize; 2]) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Shape { operation, operand, expected, found }) }
}

/// Whether 4x4 tiles cover the matrix.
pub(crate) fn check_tiled(operation: &'static str, [rows, columns]: [usize; 2]) -> Result<(), Error> {
    if rows % 4 == 0 && columns % 4 == 0 { Ok(()) } else { Err(sparse24_core::Error::NotTiled { operation, rows, columns }.into()) }
}
