//! The error type of training and its devices. A message is one sentence that names the setting or
//! operand, what was found and what was expected.

use crate::Region;

/// The kind of failure; the command turns it into its exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ErrorKind {
    /// The configuration is wrong or impossible.
    Configuration,
    /// A file is missing or has the wrong contents.
    Input,
    /// The operating system refused to read or write.
    Io,
    /// A loss or gradient is not finite, or far above the ones before it.
    NonFinite,
    /// A device, its driver or one of its libraries is missing, out of memory or failed.
    Device,
    /// The caller asked for an interruption.
    Interrupted,
    /// Another rank is gone, or sent what does not fit.
    Peer,
    /// Ranks hold different weights.
    Disagreement,
    /// Operands do not fit an operation: a defect of the caller.
    Contract,
}

/// Advice where memory for this purpose, the name of a region, does not suffice.
pub(crate) fn less_memory(purpose: &str) -> &'static str {
    if [Region::Parameters, Region::Gradients, Region::Moments].iter().any(|r| r.name() == purpose)
    {
        return "train a smaller model, such as one with a lower model.d_model";
    }
    "lower batch.size (and raise batch.gradient_accumulation_steps), set \
     model.activation_checkpointing = \"blocks\", or train a smaller model"
}

/// Why a batch could not be made.
pub type DataError = Box<dyn std::error::Error + Send + Sync>;

/// Why training failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting cannot be trained, or not on this backend.
    #[error("{key}: {problem}")]
    Setting {
        /// The dotted key.
        key: String,
        /// The value found, the value expected, and advice.
        problem: String,
    },
    /// An id in a batch is too large: a token, target, class or segment, or the end of a span.
    #[error("id {token} at index {position} is out of range: expected an id below {vocabulary}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Its index among the ids of its kind. Where a head reads only the rows with a target,
        /// only these are counted.
        position: usize,
        /// The number of ids.
        vocabulary: u32,
    },
    /// Operands do not fit the operation.
    #[error("{operation}: {operand} should be {expected:?}, found {found:?}")]
    Operand {
        /// The backend operation.
        operation: &'static str,
        /// The operand that does not fit.
        operand: &'static str,
        /// The expected shape.
        expected: [usize; 2],
        /// The given shape.
        found: [usize; 2],
    },
    /// The device refuses the operands of an operation for another reason than their shape.
    #[error("{0}; this is a bug in this library or in the program that calls it")]
    Refused(String),
    /// A parameter's state is incomplete or belongs to another model.
    #[error("{name}: {problem}")]
    Parameter {
        /// The parameter.
        name: String,
        /// The part that is missing or does not fit.
        problem: String,
    },
    /// A recorded plan cannot be replayed.
    #[error("plan {key:?}: {problem}")]
    Plan {
        /// The operation that it was recorded for.
        key: String,
        /// Why it cannot be replayed.
        problem: String,
    },
    /// A device cannot be opened, is out of memory, or failed.
    #[error("{0}")]
    Device(String),
    /// An error of the 2:4 semantics.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
    /// An objective or an evaluation could not read its data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Another rank is gone, or sent what does not fit.
    #[error("{0}")]
    Peer(String),
    /// The caller asked for an interruption; the step under way left no trace.
    #[error("interrupted")]
    Interrupted,
    /// The loss or a gradient is not finite; no update was made.
    #[error("step {step}: {what}; training stopped before the update")]
    NonFinite {
        /// The optimizer step that was not taken.
        step: u32,
        /// The loss or gradient, and the layer where it first occurred.
        what: String,
    },
}

impl Error {
    /// [`Error::Setting`].
    #[must_use]
    pub fn setting(key: &str, problem: impl Into<String>) -> Self {
        Self::Setting { key: key.to_owned(), problem: problem.into() }
    }

    /// The kind of failure, for exit codes.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Setting { .. } => ErrorKind::Configuration,
            Self::UnknownToken { .. }
            | Self::Data(_)
            | Self::Semantics(_)
            | Self::Plan { .. }
            | Self::Parameter { .. } => ErrorKind::Input,
            Self::Device(_) => ErrorKind::Device,
            Self::Interrupted => ErrorKind::Interrupted,
            Self::Peer(_) => ErrorKind::Peer,
            Self::Operand { .. } | Self::Refused(_) => ErrorKind::Contract,
            Self::NonFinite { .. } => ErrorKind::NonFinite,
        }
    }
}
