//! How a command ends: one sentence on standard error and a documented exit code.

use std::process::ExitCode;

use sparse24_run::{Error, ErrorKind};

use crate::output::note;

/// The exit codes; success is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The answer is no: `verify` refuted, `doctor` found a problem, `bench` a kernel that is
    /// wrong, a search for lambda nothing feasible.
    Refuted = 1,
    /// Wrong usage or configuration (also what the argument parser uses).
    Usage = 2,
    /// An input file cannot be used.
    Input = 3,
    /// The operating system refused to read or write.
    Io = 4,
    /// Training stopped at a non-finite loss or gradient.
    NonFinite = 5,
    /// A GPU, its driver or a library of CUDA is missing, full or failed.
    Device = 6,
    /// A defect of sparse24: an operation was called with operands that do not fit.
    Defect = 70,
    /// Stopped by SIGINT with all work saved; the shell's code for that.
    Interrupted = 130,
    /// Whoever read standard output closed it; the shell's code for that.
    Unread = 141,
    /// As `Interrupted`, by SIGTERM.
    Terminated = 143,
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

    /// Tells standard error, unless nobody is interested any more.
    pub(crate) fn tell(&self) {
        match self.exit {
            Exit::Unread => {}
            Exit::Interrupted | Exit::Terminated => note(&self.sentence),
            _ => note(format_args!("error: {}", self.sentence)),
        }
    }

    /// The code for the shell.
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(self.exit as u8)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit = match error.kind() {
            ErrorKind::Configuration => Exit::Usage,
            ErrorKind::Input => Exit::Input,
            ErrorKind::Io => Exit::Io,
            ErrorKind::NonFinite => Exit::NonFinite,
            ErrorKind::Device => Exit::Device,
            ErrorKind::Interrupted => Exit::Interrupted,
            _ => Exit::Defect,
        };
        Self::new(exit, error.to_string())
    }
}

impl From<sparse24_train::Error> for Failure {
    fn from(error: sparse24_train::Error) -> Self {
        Error::from(error).into()
    }
}

impl From<clap::Error> for Failure {
    /// The parser's paragraphs up to its usage, as one sentence.
    fn from(error: clap::Error) -> Self {
        let text = error.to_string();
        let mut sentence = String::new();
        for line in text
            .lines()
            .map(str::trim)
            .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
        {
            if !(sentence.is_empty() || line.is_empty()) {
                sentence += if line.starts_with("tip:") { "; " } else { " " };
            }
            sentence += line.strip_prefix("error: ").unwrap_or(line);
        }
        Self::new(Exit::Usage, format!("{sentence}; --help tells all"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_defect_is_no_answer() {
        let error = sparse24_train::Error::Refused("x".to_owned());
        assert_eq!(Failure::from(error).exit as u8, 70);
    }
}
