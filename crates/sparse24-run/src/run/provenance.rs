//! What ran, where and how: enough to run it again.
//!
//! `provenance.json` is an array with one object a start, oldest first: the first is the run's,
//! each further one a resume's. Deliberately absent: the configuration, which has its own file.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::log::now;
use crate::{Error, disk};

/// The weights that a start began with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Initial {
    /// Drawn by the seed.
    Random,
    /// From elsewhere: the checkpoint of step 0 alone holds them.
    Given,
    /// Of a checkpoint of this run.
    Checkpoint,
}

/// Where the lambda of a run comes from, if a search recommended it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LambdaOrigin {
    /// The value.
    pub lambda: f32,
    /// The folder of the search.
    pub search: String,
    /// Mean sparse over mean dense flip rate.
    pub mu: f64,
    /// Of mu, over layers.
    pub interval: Option<[f64; 2]>,
    /// The step after which the search's runs ended.
    pub until: u32,
    /// The first and the last step whose samples counted.
    pub window: [u32; 2],
    /// Of the search's runs.
    pub seeds: Vec<u64>,
}

/// One start of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of this crate.
    pub version: String,
    /// Commit that it was built from, where the build knew.
    pub git: Option<String>,
    /// When, UTC.
    pub started: String,
    /// The command line.
    pub command: Vec<String>,
    /// What it began with.
    pub initial: Initial,
    /// Of a first start whose lambda was searched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lambda: Option<LambdaOrigin>,
    /// Operating system and architecture.
    pub system: String,
    /// The device that trains.
    pub device: String,
    /// The SIMD level, by which CPU results may differ in bits.
    pub simd: String,
    /// Threads; results do not depend on them.
    pub threads: usize,
    /// Versions of the libraries that compute or store, where the build knew.
    pub libraries: BTreeMap<String, String>,
}

impl Provenance {
    /// Of this process, now.
    #[must_use]
    pub fn now(
        device: impl Into<String>,
        simd: impl Into<String>,
        threads: usize,
        initial: Initial,
    ) -> Self {
        let libraries = option_env!("SPARSE24_LIBRARIES").unwrap_or_default();
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            git: option_env!("SPARSE24_GIT_COMMIT").map(Into::into),
            started: now(),
            command: std::env::args_os()
                .map(|argument| argument.to_string_lossy().into_owned())
                .collect(),
            initial,
            lambda: None,
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            device: device.into(),
            simd: simd.into(),
            threads,
            libraries: libraries
                .split_whitespace()
                .filter_map(|l| l.split_once('='))
                .map(|(n, v)| (n.into(), v.into()))
                .collect(),
        }
    }

    /// The version, and the commit where the build knew, as one phrase.
    #[must_use]
    pub fn build() -> String {
        let commit = option_env!("SPARSE24_GIT_COMMIT")
            .map_or_else(|| "unknown commit".to_owned(), |commit| format!("commit {commit}"));
        format!("version {}, {commit}", env!("CARGO_PKG_VERSION"))
    }

    /// Of this process, now, on a device beside this CPU.
    pub(super) fn of_start(device: &sparse24_train::backend::Device, initial: Initial) -> Self {
        Self::now(
            &device.description,
            sparse24_cpu::Simd::detect().to_string(),
            sparse24_cpu::threads(),
            initial,
        )
    }

    /// Adds this start to `provenance.json`, which is created if need be.
    ///
    /// # Errors
    /// [`Error::File`] if the file is not such an array; [`Error::Io`].
    pub fn record(&self, path: &Path) -> Result<(), Error> {
        let mut starts = if path.exists() { Self::read(path)? } else { Vec::new() };
        starts.push(self.clone());
        let mut text = serde_json::to_vec_pretty(&starts).expect("strings and integers are JSON");
        text.push(b'\n');
        disk::write_atomically(path, &text)
    }

    /// The starts in a `provenance.json`, oldest first.
    ///
    /// # Errors
    /// [`Error::File`] if the file is not such an array; [`Error::Io`].
    pub fn read(path: &Path) -> Result<Vec<Self>, Error> {
        let text = disk::read_small(path, 64 << 20)?;
        serde_json::from_slice(&text)
            .map_err(|e| Error::file(path, format!("is no list of starts: {e}")))
    }
}
