//! How a command ends: one sentence on standard error and a documented exit code.

use std::{fmt, process::ExitCode};

use sparse24_train::{Error, ErrorKind};

/// The exit codes; success is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The answer is no: `verify` refuted, `doctor` found a problem.
    Refuted = 1,
    /// Wrong usage or configuration (also what the argument parser uses).
    Usage = 2,
    /// An input file cannot be used.
    Input = 3,
    /// The operating system refused to read or write.
    Io = 4,
    /// Training stopped at a non-finite loss or gradient.
    NonFinite = 5,
}

/// One sentence and the code to end with.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    sentence: String,
}

impl Failure {
    /// A failure of the command's own.
    pub(crate) fn new(exit: Exit, sentence: impl Into<String>) -> Self {
        Self { exit, sentence: sentence.into() }
    }

    /// The code for the shell.
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(self.exit as u8)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit = match error.kind() {
            ErrorKind::Configuration => Exit::Usage,
            ErrorKind::Input => Exit::Input,
            ErrorKind::Io => Exit::Io,
            ErrorKind::NonFinite => Exit::NonFinite,
            // A defect of ours: it names the operation.
            ErrorKind::Contract => Exit::Refuted,
        };
        Self::new(exit, error.to_string())
    }
}
