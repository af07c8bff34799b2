//! The counters and identities of a checkpoint: all that is not a tensor.
//!
//! Invariant: only integers and strings, so that what is read is what was written; a real number
//! that must survive is an auxiliary tensor. Deliberately absent: the format version, which stands
//! in the manifest.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use sparse24_train::method::PhaseKind;

/// A blake3 hash that tells whether two things are the same; 64 lower-case hexadecimal digits in
/// files.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The hash of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// A hash that was computed elsewhere.
    #[must_use]
    pub const fn from_bytes(hash: [u8; 32]) -> Self {
        Self(hash)
    }

    /// The 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> Self {
        fingerprint.to_string()
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Upper case is refused: one hash has one spelling, and a flipped bit of a digit's case
        // must not pass.
        let digits = text.as_bytes();
        if digits.len() != 64 || digits.iter().any(|d| !matches!(d, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(format!("expected 64 lower-case hexadecimal digits, found {text:?}"));
        }
        let value = |digit: u8| if digit <= b'9' { digit - b'0' } else { digit - b'a' + 10 };
        Ok(Self(std::array::from_fn(|i| value(digits[2 * i]) << 4 | value(digits[2 * i + 1]))))
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Where a run stands after an optimizer step, and what it must be resumed with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Optimizer steps done; also the position of every random stream.
    pub step: u32,
    /// Optimizer steps of the whole run.
    pub total_steps: u32,
    /// Index of the phase of the last step done; of the first phase if none is.
    pub phase: u32,
    /// The kind of that phase: `Sparse` means that the weights under their masks are a 2:4 model.
    pub phase_kind: PhaseKind,
    /// The run's seed.
    pub seed: u64,
    /// Tokens trained on so far.
    pub tokens_seen: u64,
    /// Counters that the training method owns, by name.
    pub method: BTreeMap<String, u64>,
    /// Every timed choice, by what was chosen; a resume replays it. Empty where nothing is timed,
    /// as on the CPU.
    pub plan: BTreeMap<String, String>,
    /// The resolved configuration, as far as it decides the bits (not where the data lie, nor
    /// threads or the number of the GPU, nor what is saved): each key, dotted, with its value in
    /// TOML.
    pub config: BTreeMap<String, String>,
    /// Of the tokens, training and held out.
    pub dataset: DatasetIdentity,
    /// Of the tokenizer.
    pub tokenizer: Fingerprint,
}

/// What tells one dataset from another: by the fingerprint alone, the rest is for a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetIdentity {
    /// Of the tokens and their tokenizer.
    pub fingerprint: Fingerprint,
    /// Tokens to train on.
    pub training_tokens: u64,
    /// Tokens held out.
    pub held_out_tokens: u64,
    /// How many ids there are.
    pub vocabulary: u32,
}
