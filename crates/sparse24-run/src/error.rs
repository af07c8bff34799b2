//! The error type of this crate. A message is one sentence that names the file or key, the value
//! found and the value expected.

use std::{
    io,
    path::{Path, PathBuf},
};

use sparse24_train::ErrorKind;

/// Returns an [`Error::File`] with the path, or an [`Error::Setting`] with the key, and the
/// formatted problem.
macro_rules! bail {
    (setting = $key:expr, $($problem:tt)+) => {
        return Err($crate::Error::setting($key, format!($($problem)+)))
    };
    ($path:expr, $($problem:tt)+) => {
        return Err($crate::Error::file($path, format!($($problem)+)))
    };
}

/// A failure of training or of a file that it needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is unknown or invalid.
    #[error("{key}: {problem}")]
    Setting {
        /// Dotted key.
        key: String,
        /// Found and expected value, and advice.
        problem: String,
    },
    /// A file cannot be used.
    #[error("{}: {problem}", shown(path))]
    File {
        /// The file.
        path: PathBuf,
        /// Found and expected value, and advice.
        problem: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", shown(path))]
    Io {
        /// The operation: `read`, `write`, `create`, ...
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Too little disk space; nothing was written.
    #[error(
        "{}: {what} need {} of disk space, but only {} are free; free some space",
        shown(path),
        mebibytes(*needed),
        mebibytes(*free)
    )]
    Room {
        /// The directory.
        path: PathBuf,
        /// Description of the data.
        what: String,
        /// Bytes to be written.
        needed: u64,
        /// Bytes available.
        free: u64,
    },
    /// A character that the vocabulary of a character tokenizer lacks.
    #[error(
        "the character {character:?} (U+{:04X}) at byte {offset} is not among the {vocabulary} \
            characters of the tokenizer's vocabulary",
        u32::from(*character)
    )]
    UnknownCharacter {
        /// The character.
        character: char,
        /// Byte offset in the text.
        offset: usize,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// A run of white space longer than the GPT-2 tokenizer can split.
    #[error(
        "the run of white space around byte {offset} has more than the {longest} white-space \
            characters that gpt2 can split; shorten it"
    )]
    LongWhiteSpace {
        /// Longest run that can be split, in characters.
        longest: usize,
        /// Byte offset of the first character beyond that.
        offset: usize,
    },
    /// A word longer than the GPT-2 tokenizer encodes.
    #[error(
        "the word at byte {offset} is longer than {} MiB, the longest that is encoded; is this \
            text?",
        longest >> 20
    )]
    LongWord {
        /// Longest word, in bytes.
        longest: usize,
        /// Byte offset of its start, or of text shortly before it.
        offset: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token {token} at position {position} is beyond the vocabulary of {vocabulary}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Position in tokens.
        position: usize,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// State of a parameter that is incomplete or does not fit the model.
    #[error("{name}: {problem}")]
    Parameter {
        /// The parameter.
        name: String,
        /// The missing or unfitting part.
        problem: String,
    },
    /// Any other error of the trainer: of a device, of a recorded plan, of 2:4 semantics, a defect.
    #[error(transparent)]
    Train(sparse24_train::Error),
    /// Ranks of a run hold different weights, moments or masks; nothing was written.
    #[error(
        "step {step}: {tensor} differs on {ranks}, so memory or a device has failed there; resume \
            on other hardware"
    )]
    Disagreement {
        /// Optimizer steps done.
        step: u32,
        /// The ranks that differ from most others; all of them if no value is that of most.
        ranks: String,
        /// The first tensor that differs.
        tensor: String,
    },
    /// The run ended on rank 0.
    #[error("rank 0: {problem}")]
    Rank0 {
        /// The kind of its error.
        kind: ErrorKind,
        /// Its message.
        problem: String,
    },
    /// The flag of [`sparse24_train::trainer::Trainer::interrupt_on`] was set; the operation had
    /// no effect.
    #[error("interrupted")]
    Interrupted,
    /// The loss or a gradient is not finite; no update was made.
    #[error(
        "step {step}: {what}; training stopped before the update{}; lower \
            optimizer.learning_rate or lengthen optimizer.warmup_steps",
        consequence(", ", *kept)
    )]
    NonFinite {
        /// The optimizer step that was not taken.
        step: u32,
        /// The value, and the first layer where it was not finite.
        what: String,
        /// Step of the run's newest checkpoint, if it has one; `None` if that is unknown.
        kept: Option<Option<u32>>,
    },
    /// More than `run.skip_limit` steps had a loss or gradients that are not finite.
    #[error(
        "step {step}: {what}, after as many skipped steps as run.skip_limit allows \
            ({skipped}); training stopped before the update{}",
        consequence(", ", *kept)
    )]
    SkipLimit {
        /// The optimizer step that was not taken.
        step: u32,
        /// The value, and the first layer where it was not finite.
        what: String,
        /// Steps skipped before.
        skipped: u32,
        /// Step of the run's newest checkpoint, if it has one; `None` if that is unknown.
        kept: Option<Option<u32>>,
    },
    /// The loss is far above the previous ones.
    #[error(
        "step {step}: the loss {loss} is {z:.1} standard deviations above {mean}, the mean of the \
            {window} before it, but run.spike_z allows only {allowed}; training stopped after the \
            step{}",
        consequence(", ", *kept)
    )]
    Spike {
        /// The optimizer step, which was taken.
        step: u32,
        /// Its loss.
        loss: f32,
        /// Standard deviations above the mean.
        z: f64,
        /// `run.spike_z`.
        allowed: f32,
        /// Mean of the previous losses.
        mean: f64,
        /// Number of previous losses.
        window: usize,
        /// Step of the run's newest checkpoint, if it has one; `None` if that is unknown.
        kept: Option<Option<u32>>,
    },
    /// The validation loss is not finite.
    #[error(
        "step {step}: the validation loss is {loss}; training stopped after the step{}; lower \
            optimizer.learning_rate or lengthen optimizer.warmup_steps",
        consequence(", ", *kept)
    )]
    NonFiniteEvaluation {
        /// Optimizer steps done.
        step: u32,
        /// NaN or an infinity.
        loss: f64,
        /// Step of the run's newest checkpoint, if it has one; `None` if that is unknown.
        kept: Option<Option<u32>>,
    },
    /// A tensor to be saved is not finite; nothing was written.
    #[error(
        "checkpoint of step {step} not written: {tensor:?} holds {value} at element {element}{}; \
            lower optimizer.learning_rate or method.lambda",
        consequence("; ", *kept)
    )]
    NonFiniteCheckpoint {
        /// Optimizer steps done.
        step: u32,
        /// Name of the tensor in the file.
        tensor: String,
        /// Index into its row-major values.
        element: usize,
        /// NaN or an infinity.
        value: f32,
        /// Step of the run's newest checkpoint, if it has one; `None` if that is unknown.
        kept: Option<Option<u32>>,
    },
}

impl From<sparse24_train::Error> for Error {
    fn from(error: sparse24_train::Error) -> Self {
        use sparse24_train::Error as Train;
        match error {
            Train::Setting { key, problem } => Self::Setting { key, problem },
            Train::Parameter { name, problem } => Self::Parameter { name, problem },
            Train::Data(error) => match error.downcast() {
                Ok(error) => *error,
                Err(error) => Self::Train(Train::Data(error)),
            },
            Train::Interrupted => Self::Interrupted,
            Train::NonFinite { step, what } => Self::NonFinite { step, what, kept: None },
            other => Self::Train(other),
        }
    }
}

impl From<sparse24_core::Error> for Error {
    fn from(error: sparse24_core::Error) -> Self {
        Self::Train(error.into())
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

/// The checkpoint that remains after an error, if that is known.
fn consequence(separator: &str, kept: Option<Option<u32>>) -> String {
    match kept {
        None => String::new(),
        Some(None) => format!("{separator}nothing was saved yet"),
        Some(Some(step)) => format!("{separator}the checkpoint of step {step} is kept"),
    }
}

/// A path in one line, with control characters escaped; an empty one as `""`.
fn shown(path: &Path) -> String {
    let text = path.display().to_string();
    if text.is_empty() {
        return "\"\"".to_owned();
    }
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(escaped).collect()
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

impl Error {
    /// The kind, which decides the exit code.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Setting { .. } => ErrorKind::Configuration,
            Self::File { .. }
            | Self::UnknownCharacter { .. }
            | Self::LongWhiteSpace { .. }
            | Self::LongWord { .. }
            | Self::UnknownToken { .. }
            | Self::Parameter { .. } => ErrorKind::Input,
            Self::Io { action: "read", source, .. } if source.kind() == io::ErrorKind::NotFound => {
                ErrorKind::Input
            }
            Self::Io { .. } | Self::Room { .. } => ErrorKind::Io,
            Self::Interrupted => ErrorKind::Interrupted,
            Self::Disagreement { .. } => ErrorKind::Disagreement,
            Self::Rank0 { kind, .. } => *kind,
            Self::Train(error) => error.kind(),
            Self::NonFinite { .. }
            | Self::SkipLimit { .. }
            | Self::Spike { .. }
            | Self::NonFiniteEvaluation { .. }
            | Self::NonFiniteCheckpoint { .. } => ErrorKind::NonFinite,
        }
    }

    /// The same error in a text that starts `bytes` earlier, modulo 2^64.
    pub(crate) fn moved(mut self, bytes: usize) -> Self {
        if let Self::UnknownCharacter { offset, .. }
        | Self::LongWhiteSpace { offset, .. }
        | Self::LongWord { offset, .. } = &mut self
        {
            *offset = offset.wrapping_add(bytes);
        }
        self
    }

    /// [`Error::Setting`] with control characters replaced and long texts shortened.
    #[must_use]
    pub fn setting(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Setting { key: printable(&key.into()), problem: printable(&problem.into()) }
    }

    /// [`Error::File`] with control characters replaced and long texts shortened.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::File { path: path.into(), problem: printable(&problem.into()) }
    }

    /// Turns an error about a path that does not exist into one that says what was expected.
    #[must_use]
    pub fn expecting(self, expected: &str) -> Self {
        match self {
            Self::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Self::file(path, format!("does not exist, expected {expected}"))
            }
            other => other,
        }
    }

    /// An [`Error::File`] with more words, whole: a command that is cut is of no use.
    #[must_use]
    pub(crate) fn advising(mut self, advice: &str) -> Self {
        if let Self::File { problem, .. } = &mut self {
            *problem += advice;
        }
        self
    }

    /// [`Error::Io`].
    #[must_use]
    pub fn io(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { action, path: path.into(), source }
    }
}

/// Text of a file as a message may quote it: no control characters, and only both ends of a long
/// one.
fn printable(text: &str) -> String {
    /// Characters at each end.
    const END: usize = 300;
    let plain = |part: &str| part.replace(char::is_control, "\u{fffd}");
    match (text.char_indices().nth(END), text.char_indices().nth_back(END)) {
        (Some((head, _)), Some((tail, _))) if head < tail => {
            format!("{} [...] {}", plain(&text[..head]), plain(&text[tail..]))
        }
        _ => plain(text),
    }
}

/// The message of a failure.
#[cfg(test)]
pub(crate) fn problem<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_shown_in_one_line_and_never_empty() {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        for (path, expected) in [
            ("a b/\u{e9}", "a b/\u{e9}: "),
            ("/no\npe\u{1b}[0m", "/no\\npe\\u{1b}[0m: "),
            ("a\0b", "a\\u{0}b: "),
            ("", "\"\": "),
        ] {
            assert!(Error::file(path, "no").to_string().starts_with(expected), "{path:?}");
            let error = Error::io("read", path, missing()).to_string();
            assert!(error.starts_with(&format!("cannot read {expected}")), "{error}");
        }
    }
}
