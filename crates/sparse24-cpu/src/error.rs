//! The one error type of this crate: which operand of which operation does not fit, what was wanted
//! and what was given.

/// Why a kernel refused its input. Shapes are `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The semantics themselves refuse the input.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
    /// An operand has another shape than the other operands imply.
    #[error("{operation}: {operand} should be {expected:?}, found {found:?}")]
    Shape {
        /// The operation that refused.
        operation: &'static str,
        /// The operand that does not fit.
        operand: &'static str,
        /// The shape that the other operands imply.
        expected: [usize; 2],
        /// The shape given.
        found: [usize; 2],
    },
    /// An operand must be row-major without gaps.
    #[error("{operation}: {operand} is not row-major contiguous")]
    Layout {
        /// The operation that refused.
        operation: &'static str,
        /// The operand that has another layout.
        operand: &'static str,
    },
    /// A token is not in the vocabulary.
    #[error(
        "{operation}: token {token} at position {position} is outside of the vocabulary of {vocabulary}"
    )]
    Token {
        /// The operation that refused.
        operation: &'static str,
        /// The token given.
        token: u32,
        /// Where it stands among the tokens.
        position: usize,
        /// Tokens are smaller than this.
        vocabulary: usize,
    },
    /// The operating system does not start the threads of a pool.
    #[error("the operating system does not start {threads} threads (0 is one a core)")]
    Threads {
        /// As many as were asked for.
        threads: usize,
    },
}
