//! The one error type of this crate. A message is one sentence that names the file or key, what was
//! found and what was expected.

use std::{io, path::PathBuf};

use sparse24_train::ErrorKind;

/// Why training, or a file it needs, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is unknown or has no meaning.
    #[error("{key}: {problem}")]
    Setting {
        /// The key, dotted.
        key: String,
        /// What was found, what was expected, and what to do.
        problem: String,
    },
    /// A file cannot be used.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was found, what was expected, and what to do.
        problem: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: `read`, `write`, `create`, ...
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A file system has too little room for what is to be written; nothing was.
    #[error("{}: {what} need {} of disk space, {} are free; make room, or keep less", path.display(), mebibytes(*needed), mebibytes(*free))]
    Room {
        /// Where it is to be written.
        path: PathBuf,
        /// What is to be written.
        what: String,
        /// Its bytes.
        needed: u64,
        /// Bytes that can be had.
        free: u64,
    },
    /// A text holds a character that a character tokenizer never saw.
    #[error(
        "the character {character:?} (U+{:04X}) at byte {offset} is not among the {vocabulary} \
            characters of the tokenizer's vocabulary",
        u32::from(*character)
    )]
    UnknownCharacter {
        /// The character.
        character: char,
        /// Where it stands in the text, in bytes.
        offset: usize,
        /// How many characters the vocabulary has.
        vocabulary: u32,
    },
    /// A text holds more white space at a stretch than the GPT-2 tokenizer can split.
    #[error(
        "the run of white space around byte {offset} has more than the {longest} white-space \
            characters that gpt2 can split; shorten it"
    )]
    LongWhiteSpace {
        /// The longest run that can be split, in characters.
        longest: usize,
        /// Where the first character beyond that stands in the text, in bytes.
        offset: usize,
    },
    /// A token id has no meaning.
    #[error("token {token} at position {position} is beyond the vocabulary of {vocabulary}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Where it stands, in tokens.
        position: usize,
        /// How many ids there are.
        vocabulary: u32,
    },
    /// A parameter's state is incomplete or not this model's.
    #[error("{name}: {problem}")]
    Parameter {
        /// The parameter.
        name: String,
        /// What is missing or does not fit.
        problem: String,
    },
    /// A timed choice that was recorded cannot be replayed.
    #[error("plan {key:?}: {problem}")]
    Plan {
        /// What it is for.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A device cannot be opened, is full, or failed.
    #[error("{0}")]
    Device(String),
    /// Another error of the trainer: a defect.
    #[error(transparent)]
    Train(sparse24_train::Error),
    /// The semantics of 2:4 refuse.
    #[error(transparent)]
    Semantics(#[from] sparse24_core::Error),
    /// The flag of [`sparse24_train::trainer::Trainer::interrupt_on`] was set; what was under way left no
    /// trace.
    #[error("interrupted")]
    Interrupted,
    /// The loss or a gradient is not finite; no update was made.
    #[error(
        "step {step}: {what}; training stopped before the update, {}; lower \
            optimizer.learning_rate or lengthen optimizer.warmup_steps",
        told(*kept)
    )]
    NonFinite {
        /// The optimizer step that was not taken.
        step: u32,
        /// What was not finite, and in which layer it began.
        what: String,
        /// The step of the run's newest checkpoint, if it has one.
        kept: Option<u32>,
    },
    /// More steps were skipped than may be, because loss or gradients were not finite.
    #[error(
        "step {step}: {what}, and {skipped} steps were skipped already, as many as \
            run.skip_limit allows; training stopped before the update, {}",
        told(*kept)
    )]
    SkipLimit {
        /// The optimizer step that was not taken.
        step: u32,
        /// What was not finite, and in which layer it began.
        what: String,
        /// Steps skipped before.
        skipped: u32,
        /// The step of the run's newest checkpoint, if it has one.
        kept: Option<u32>,
    },
    /// The loss stands far above those before it.
    #[error(
        "step {step}: the loss {loss} lies {z:.1} standard deviations above {mean}, the mean of \
            the {window} before it, run.spike_z allows {allowed}; training stopped after the \
            step, {}",
        told(*kept)
    )]
    Spike {
        /// The optimizer step, which was taken.
        step: u32,
        /// Its loss.
        loss: f32,
        /// Standard deviations above the mean.
        z: f64,
        /// What would have been a spike.
        allowed: f32,
        /// Of the losses before it.
        mean: f64,
        /// How many these are.
        window: usize,
        /// The step of the run's newest checkpoint, if it has one.
        kept: Option<u32>,
    },
    /// The loss on the held-out split is not finite.
    #[error(
        "step {step}: the loss on the held-out split is {loss}; training stopped after the step, \
            {}; lower optimizer.learning_rate or lengthen optimizer.warmup_steps",
        told(*kept)
    )]
    NonFiniteEvaluation {
        /// Optimizer steps done.
        step: u32,
        /// NaN or an infinity.
        loss: f64,
        /// The step of the run's newest checkpoint, if it has one.
        kept: Option<u32>,
    },
    /// A tensor to be saved is not finite; nothing was written.
    #[error(
        "checkpoint of step {step} not written: {tensor:?} holds {value} at element {element}; \
            earlier checkpoints stay"
    )]
    NonFiniteCheckpoint {
        /// Optimizer steps done.
        step: u32,
        /// The tensor, as the file would name it.
        tensor: String,
        /// Index into its row-major values.
        element: usize,
        /// NaN or an infinity.
        value: f32,
    },
}

impl From<sparse24_train::Error> for Error {
    fn from(error: sparse24_train::Error) -> Self {
        use sparse24_train::Error as Train;
        match error {
            Train::Setting { key, problem } => Self::Setting { key, problem },
            Train::UnknownToken { token, position, vocabulary } => {
                Self::UnknownToken { token, position, vocabulary }
            }
            Train::Parameter { name, problem } => Self::Parameter { name, problem },
            Train::Plan { key, problem } => Self::Plan { key, problem },
            Train::Device(problem) => Self::Device(problem),
            Train::Semantics(error) => Self::Semantics(error),
            Train::Interrupted => Self::Interrupted,
            Train::NonFinite { step, what } => Self::NonFinite { step, what, kept: None },
            other => Self::Train(other),
        }
    }
}

impl From<sparse24_cpu::Error> for Error {
    fn from(error: sparse24_cpu::Error) -> Self {
        sparse24_train::Error::from(error).into()
    }
}

#[cfg(feature = "cuda")]
impl From<sparse24_cuda::Error> for Error {
    fn from(error: sparse24_cuda::Error) -> Self {
        sparse24_train::Error::from(error).into()
    }
}

/// What an error leaves.
fn told(kept: Option<u32>) -> String {
    kept.map_or("nothing was saved yet".to_owned(), |kept| {
        format!("the checkpoint of step {kept} is kept")
    })
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

impl Error {
    /// The kind, for exit codes.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Setting { .. } => ErrorKind::Configuration,
            Self::File { .. }
            | Self::UnknownCharacter { .. }
            | Self::LongWhiteSpace { .. }
            | Self::UnknownToken { .. }
            | Self::Semantics(_)
            | Self::Plan { .. }
            | Self::Parameter { .. } => ErrorKind::Input,
            Self::Io { action: "read", source, .. } if source.kind() == io::ErrorKind::NotFound => {
                ErrorKind::Input
            }
            Self::Io { .. } | Self::Room { .. } => ErrorKind::Io,
            Self::Device(_) => ErrorKind::Device,
            Self::Interrupted => ErrorKind::Interrupted,
            Self::Train(error) => error.kind(),
            Self::NonFinite { .. }
            | Self::SkipLimit { .. }
            | Self::Spike { .. }
            | Self::NonFiniteEvaluation { .. }
            | Self::NonFiniteCheckpoint { .. } => ErrorKind::NonFinite,
        }
    }

    /// As of a text that begins `bytes` earlier.
    pub(crate) fn moved(mut self, bytes: usize) -> Self {
        if let Self::UnknownCharacter { offset, .. } | Self::LongWhiteSpace { offset, .. } =
            &mut self
        {
            *offset += bytes;
        }
        self
    }

    /// A setting that cannot be used; control characters are replaced and long texts shortened.
    #[must_use]
    pub fn setting(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Setting { key: printable(&key.into()), problem: printable(&problem.into()) }
    }

    /// A file that cannot be used; control characters are replaced and long texts shortened.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::File { path: path.into(), problem: printable(&problem.into()) }
    }

    /// Adds what was expected to the error of a path that does not exist.
    #[must_use]
    pub fn expecting(self, expected: &str) -> Self {
        match self {
            Self::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Self::file(path, format!("does not exist, expected {expected}"))
            }
            other => other,
        }
    }

    /// A refusal of the operating system.
    #[must_use]
    pub fn io(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { action, path: path.into(), source }
    }
}

/// What a message may quote of a file: no control characters, and of a long text both ends.
fn printable(text: &str) -> String {
    /// In characters.
    const END: usize = 300;
    let plain = |part: &str| part.replace(char::is_control, "\u{fffd}");
    match (text.char_indices().nth(END), text.char_indices().nth_back(END)) {
        (Some((head, _)), Some((tail, _))) if head < tail => {
            format!("{} [...] {}", plain(&text[..head]), plain(&text[tail..]))
        }
        _ => plain(text),
    }
}
