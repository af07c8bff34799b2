//! How a command fails: one sentence on standard error and a documented exit code.

use std::{
    error::Error as _,
    num::{ParseFloatError, ParseIntError},
    process::ExitCode,
};

use clap::{
    CommandFactory,
    error::{ContextKind, ContextValue, ErrorKind as Wrong},
};
use sparse24_run::{Error, ErrorKind, config};

use crate::Cli;

/// Exit codes; success is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The answer is no: `verify` refuted, `doctor` found a problem, `bench` found a wrong kernel,
    /// `lambda-search` found no feasible candidate.
    Refuted = 1,
    /// Wrong usage or configuration (also clap's code).
    Usage = 2,
    /// An input file cannot be used.
    Input = 3,
    /// The operating system failed to read or write.
    Io = 4,
    /// Training stopped at a loss or gradient that is not finite.
    NonFinite = 5,
    /// A GPU, its driver or a CUDA library is missing, out of memory or failed.
    Device = 6,
    /// Another rank of the run is gone.
    Peer = 7,
    /// Ranks of the run hold different weights.
    Disagreement = 8,
    /// `resume` of a directory that `train` would start a run in.
    NoRun = 9,
    /// A bug in sparse24: an operation was called with operands that do not fit.
    Defect = 70,
    /// Stopped by SIGHUP with all work saved; 128 + signal, as in a shell.
    HungUp = 129,
    /// Stopped by SIGINT with all work saved.
    Interrupted = 130,
    /// The reader of standard output closed it (SIGPIPE).
    Unread = 141,
    /// Stopped by SIGTERM with all work saved.
    Terminated = 143,
}

/// A `Result` that defaults to no value and to [`Failure`].
pub(crate) type Result<T = (), E = Failure> = core::result::Result<T, E>;

/// One sentence and an exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    sentence: String,
}

impl Failure {
    pub(crate) fn new(exit: Exit, sentence: impl Into<String>) -> Self {
        Self { exit, sentence: sentence.into() }
    }

    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }

    /// The same sentence, with the exit code of the rank that failed first.
    pub(crate) fn with_code(self, code: u8) -> Self {
        let exits = [
            Exit::Refuted,
            Exit::Usage,
            Exit::Input,
            Exit::Io,
            Exit::NonFinite,
            Exit::Device,
            Exit::Disagreement,
            Exit::NoRun,
            Exit::Defect,
            Exit::HungUp,
            Exit::Interrupted,
            Exit::Terminated,
        ];
        let exit = exits.into_iter().find(|exit| *exit as u8 == code);
        Self { exit: exit.unwrap_or(self.exit), ..self }
    }

    /// The sentence with which the other ranks of a run end if this one fails.
    pub(crate) fn for_others(&self, rank: usize) -> String {
        match self.exit {
            // It names the rank that is gone.
            Exit::Peer => self.sentence.clone(),
            _ => format!("rank {rank}: {}", self.sentence),
        }
    }

    /// The line for standard error; none if the reader is gone.
    pub(crate) fn message(&self) -> Option<String> {
        match self.exit {
            Exit::Unread => None,
            Exit::HungUp | Exit::Interrupted | Exit::Terminated => Some(self.sentence.clone()),
            _ => Some(format!("error: {}", self.sentence)),
        }
    }

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
            ErrorKind::Peer => Exit::Peer,
            ErrorKind::Disagreement => Exit::Disagreement,
            ErrorKind::Interrupted => Exit::Interrupted,
            _ => Exit::Defect,
        };
        let advice = if exit == Exit::Defect { "; please report this bug in sparse24" } else { "" };
        Self::new(exit, format!("{error}{advice}"))
    }
}

impl From<sparse24_train::Error> for Failure {
    fn from(error: sparse24_train::Error) -> Self {
        Error::from(error).into()
    }
}

/// Options, and their names in nanoGPT and in Hugging Face's scripts.
const OPTIONS: [(&str, &str); 5] = [
    ("--prompt", "start"),
    ("--tokens", "max_new_tokens max_length"),
    ("--out", "out_dir output_dir"),
    ("--epochs", "num_train_epochs"),
    ("--init-from", "model_name_or_path init_from"),
];

impl From<clap::Error> for Failure {
    /// Joins clap's paragraphs up to the usage into one sentence, with our words for numbers and
    /// for options of other programs.
    fn from(error: clap::Error) -> Self {
        if let (Wrong::UnknownArgument, Some(ContextValue::String(found))) =
            (error.kind(), error.get(ContextKind::InvalidArg))
        {
            let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
            let all = Cli::command();
            // The usage names the program, which may be renamed, before the command.
            let mut words = usage.split_whitespace().skip(2);
            let command = words.find_map(|word| all.find_subcommand(word));
            let name = command.map(clap::Command::get_name);
            let takes = |option: &str| {
                let mut options = command.into_iter().flat_map(|command| command.get_arguments());
                options.any(|of| of.get_long() == option.strip_prefix("--"))
            };
            let sets_only_the_backend = matches!(name, Some("eval" | "sample" | "translate"));
            let is_set = |key: &str| {
                takes("--set") && (key.starts_with("backend.") || !sets_only_the_backend)
            };
            let meant = match found.trim_start_matches('-') {
                "resume" => Some("the command `sparse24 resume RUN`".to_owned()),
                "preset" if name == Some("study") => {
                    Some("the key `preset` of [base] in the file of a study".to_owned())
                }
                "preset" if name == Some("resume") => {
                    Some("`--set KEY=VALUE`, since a run keeps its preset".to_owned())
                }
                name => OPTIONS
                    .iter()
                    .find(|(option, names)| {
                        takes(option)
                            && names.split(' ').any(|other| other == name.replace('-', "_"))
                    })
                    .map(|&(option, _)| option.to_owned())
                    .or_else(|| {
                        let key = config::meant(name).filter(|key| is_set(key))?;
                        Some(format!("the setting `--set {key}=VALUE`"))
                    }),
            };
            if let Some(meant) = meant {
                return Self::new(Exit::Usage, format!("{found} is not an option; use {meant}"));
            }
        }
        let mut text = error.to_string();
        if let Some(source) = error.source() {
            if source.is::<ParseIntError>() {
                text =
                    text.replace(&source.to_string(), "expected a whole number of 0 to 2^64 - 1");
            } else if source.is::<ParseFloatError>() {
                text = text.replace(&source.to_string(), "expected a number");
            }
        }
        let is_end = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more");
        let mut sentence = String::new();
        // The advice to pass an unknown option as a value is never meant.
        let is_tip = |line: &&str| line.starts_with("tip: to pass");
        let lines = text.lines().map(str::trim).take_while(|line| !is_end(line));
        for line in lines.filter(|line| !is_tip(line)) {
            if !(sentence.is_empty() || line.is_empty()) {
                sentence += if line.starts_with("tip:") { "; " } else { " " };
            }
            sentence += line.strip_prefix("error: ").unwrap_or(line);
        }
        Self::new(Exit::Usage, format!("{sentence}; see --help"))
    }
}

#[cfg(test)]
mod tests {
    use sparse24_train::Error as Train;

    use super::*;

    #[test]
    fn an_operand_that_does_not_fit_is_reported_as_a_bug() {
        let (operation, operand) = ("x", "y");
        let shaped = Train::Operand { operation, operand, expected: [1; 2], found: [2; 2] };
        for error in [Train::Refused("x".to_owned()), shaped] {
            assert!(!error.to_string().contains("sparse24"), "{error}");
            let Failure { exit, sentence } = error.into();
            assert!(exit as u8 == 70 && sentence.ends_with("report this bug in sparse24"));
        }
    }
}
