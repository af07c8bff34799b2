//! The counters and identities of a checkpoint.
//!
//! Invariant: only integers and strings, so that a round trip changes nothing; a real number that
//! must survive is an auxiliary tensor. The format version is in the manifest.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use sparse24_train::method::PhaseKind;

/// A BLAKE3 hash, written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Fingerprint(blake3::Hash);

impl Fingerprint {
    /// The hash of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes))
    }
}

impl From<blake3::Hash> for Fingerprint {
    fn from(hash: blake3::Hash) -> Self {
        Self(hash)
    }
}

impl From<Fingerprint> for blake3::Hash {
    fn from(fingerprint: Fingerprint) -> Self {
        fingerprint.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_hex())
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
        // Upper case is refused: a flipped bit in the case of a digit must not go unnoticed.
        blake3::Hash::from_hex(text)
            .ok()
            .filter(|hash| hash.to_hex().as_str() == text)
            .map(Self)
            .ok_or_else(|| format!("expected 64 lower-case hexadecimal digits, found {text:?}"))
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// The position of a run after an optimizer step, and the settings and data that a resume needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Optimizer steps done; also the position of every random stream.
    pub step: u32,
    /// Optimizer steps of the whole run.
    pub total_steps: u32,
    /// Index of the phase of the last step done; of the first phase at step 0.
    pub phase: u32,
    /// Kind of that phase. If `Sparse`, the weights under their masks are a 2:4 model.
    pub phase_kind: PhaseKind,
    /// The run's seed.
    pub seed: u64,
    /// Tokens trained on so far.
    pub tokens_seen: u64,
    /// Steps without an update, because a loss or gradient was not finite.
    pub skipped_steps: u32,
    /// Phases that ended by a criterion or directly before v was frozen, by ascending index.
    pub phase_ends: Vec<PhaseEnd>,
    /// Timed choices, which a resume replays; empty on the CPU.
    pub plan: BTreeMap<String, String>,
    /// The settings that decide the bits of the run: each key, dotted, with its value in TOML.
    pub config: BTreeMap<String, String>,
    /// Identity of the tokens.
    pub dataset: DatasetIdentity,
    /// Identity of the tokenizer.
    pub tokenizer: Fingerprint,
}

/// The end of a phase, fixed even if the run is extended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseEnd {
    /// Index of the phase.
    pub phase: u32,
    /// Its last optimizer step.
    pub step: u32,
}

/// Identity of a dataset. Only the fingerprint is compared; the numbers are for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetIdentity {
    /// Hash of the tokens and their tokenizer.
    pub fingerprint: Fingerprint,
    /// Tokens of the training split.
    pub training_tokens: u64,
    /// Tokens of the validation split.
    pub held_out_tokens: u64,
    /// Number of token ids.
    pub vocabulary: u32,
}
