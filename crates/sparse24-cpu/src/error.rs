//! The error type of this crate.

use sparse24_core::op::Activation;

/// Why a kernel rejected its input. Shapes are `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Core rejects the input.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
    /// An operand does not have the shape that the other operands imply.
    #[error("{operation}: {operand} should be {expected:?}, found {found:?}")]
    Shape {
        /// Operation that failed.
        operation: &'static str,
        /// Operand that does not fit.
        operand: &'static str,
        /// Shape implied by the other operands.
        expected: [usize; 2],
        /// Shape of the operand.
        found: [usize; 2],
    },
    /// An operand is not row-major and contiguous.
    #[error("{operation}: {operand} is not row-major and contiguous")]
    Layout {
        /// Operation that failed.
        operation: &'static str,
        /// Operand with another layout.
        operand: &'static str,
    },
    /// A number that must not be 0 is.
    #[error("{operation}: {operand} is 0")]
    Zero {
        /// Operation that failed.
        operation: &'static str,
        /// Name of the number.
        operand: &'static str,
    },
    /// A token is not in the vocabulary, or another id, such as the number of a row, is too large.
    #[error("{operation}: id {token} at position {position} is not below {vocabulary}")]
    Token {
        /// Operation that failed.
        operation: &'static str,
        /// The invalid token or id.
        token: u32,
        /// Its index among the tokens.
        position: usize,
        /// Size of the vocabulary, or number of rows; ids must be smaller.
        vocabulary: usize,
    },
    /// This crate has no kernel for the activation.
    #[error("{operation}: no CPU kernel for {activation:?}")]
    Activation {
        /// Operation that failed.
        operation: &'static str,
        /// The unknown activation.
        activation: Activation,
    },
    /// There is no memory for strips or scratch.
    #[error("no memory for {bytes} bytes")]
    Memory {
        /// Their size.
        bytes: u64,
    },
    /// A pool of more threads than any machine has.
    #[error("expected at most {most} threads (0 means one per core), found {threads}")]
    TooManyThreads {
        /// Number of threads requested.
        threads: usize,
        /// Most threads of a pool.
        most: usize,
    },
    /// The operating system did not start the threads of a pool.
    #[error("cannot start a pool of {threads} threads (0 means one per core)")]
    Threads {
        /// Number of threads requested.
        threads: usize,
    },
}
