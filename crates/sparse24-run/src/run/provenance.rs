//! `provenance.json`: what is needed to repeat a run besides its configuration. An array with one
//! object per start, oldest first: the start of the run, then its resumes.

use std::{collections::BTreeMap, env, io::ErrorKind, path::Path};

use serde::{Deserialize, Serialize};

use super::log::now;
use crate::{Error, Result, checkpoint::NamedTensor, disk, json};
use sparse24_train::backend::Device;

/// Weights at a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Initial {
    /// Drawn by the seed.
    Random,
    /// Given by the user; only the checkpoint of step 0 holds them.
    Given,
    /// From a checkpoint of this run.
    Checkpoint,
}

/// Origin of a lambda that a search recommended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LambdaOrigin {
    /// The value.
    pub lambda: f32,
    /// The folder of the search.
    pub search: String,
    /// Mean sparse over mean dense flip rate.
    pub mu: f64,
    /// Bootstrap interval of mu over layers.
    pub interval: Option<[f64; 2]>,
    /// Last step of the search's runs.
    pub until: u32,
    /// First and last step of the window of samples.
    pub window: [u32; 2],
    /// Seeds of the search's runs.
    pub seeds: Vec<u64>,
}

/// BLAKE3 of weights in their order, in hexadecimal: of each the name, its length and the values,
/// little endian.
#[must_use]
pub fn fingerprint(weights: &[NamedTensor]) -> String {
    let mut hasher = blake3::Hasher::new();
    for NamedTensor { name, values, .. } in weights {
        hasher.update(name.as_bytes()).update(&(values.len() as u64).to_le_bytes());
        for part in values.chunks(1 << 14) {
            let bytes: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
    }
    hasher.finalize().to_string()
}

/// One start of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of this crate.
    pub version: String,
    /// Commit of the build; none where this crate was not built in its own repository.
    pub git: Option<String>,
    /// Time of the start (UTC).
    pub started: String,
    /// The command line of the process, with whatever secrets it holds.
    pub command: Vec<String>,
    /// Initial weights.
    pub initial: Initial,
    /// [`fingerprint`] of the initial weights, if they were given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// Origin of lambda, in the first start of a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lambda: Option<LambdaOrigin>,
    /// The step after which this start went on; none of the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u32>,
    /// Settings that this start changed, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub changed: BTreeMap<String, String>,
    /// The step after which evaluations measure something else than before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_anew_after: Option<u32>,
    /// Operating system and architecture.
    pub system: String,
    /// The training device.
    pub device: String,
    /// SIMD level; CPU results of different levels may differ in bits.
    pub simd: String,
    /// CPU threads; results do not depend on them.
    pub threads: usize,
    /// Versions of the libraries that compute or store; none where this crate was built outside of
    /// its workspace, as a dependency.
    pub libraries: BTreeMap<String, String>,
}

impl Provenance {
    /// Describes this process now, on a device and this CPU.
    pub(super) fn of_start(device: &Device, initial: Initial) -> Self {
        let libraries = option_env!("SPARSE24_LIBRARIES").unwrap_or_default();
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            git: option_env!("SPARSE24_GIT_COMMIT").map(Into::into),
            started: now(),
            command: env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            initial,
            weights: None,
            lambda: None,
            after: None,
            changed: BTreeMap::new(),
            measured_anew_after: None,
            system: format!("{} {}", env::consts::OS, env::consts::ARCH),
            device: device.description.clone(),
            simd: sparse24_cpu::Simd::detect().to_string(),
            threads: sparse24_cpu::threads(),
            libraries: libraries
                .split_whitespace()
                .filter_map(|l| l.split_once('='))
                .map(|(n, v)| (n.into(), v.into()))
                .collect(),
        }
    }

    /// Version and commit as one phrase.
    #[must_use]
    pub fn build() -> String {
        let commit = option_env!("SPARSE24_GIT_COMMIT")
            .map_or_else(|| "unknown commit".to_owned(), |commit| format!("commit {commit}"));
        format!("version {}, {commit}", env!("CARGO_PKG_VERSION"))
    }

    /// Appends this start to `provenance.json`, or creates the file. A damaged one is renamed;
    /// returns its new name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn record(&self, path: &Path) -> Result<Option<String>> {
        let is_damaged = matches!(Self::read(path), Err(Error::File { .. }));
        let kept = is_damaged.then(|| disk::keep(path)).transpose()?.map(|(_, name)| name);
        let mut starts = Self::readable(path)?;
        starts.push(self.clone());
        disk::write_atomically(path, &json::pretty(&starts))?;
        Ok(kept)
    }

    /// Like [`Self::read`]; none if the file is missing or damaged.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn readable(path: &Path) -> Result<Vec<Self>> {
        match Self::read(path) {
            Err(Error::File { .. }) => Ok(Vec::new()),
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            starts => starts,
        }
    }

    /// Reads the starts in a `provenance.json`, oldest first.
    ///
    /// # Errors
    /// [`Error::File`] if the file is not such an array; [`Error::Io`].
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let text = disk::read_small(path, 64 << 20)?;
        json::parse(&text, json::VALUES)
            .map_err(|e| Error::file(path, format!("not a list of starts: {e}")))
    }
}
