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
