//! What the fuzzer and the property tests do to every loader of files from outside: one [`Target`]
//! a loader, shared by both.
//!
//! Invariant: a target is a function of its bytes alone, and panics where a promise is broken: the
//! loader panicked, loaded what it should not, or refused in words that do not help. Deliberately
//! absent: memory, which the callers count, and time.

pub mod checkpoint;
mod config;
mod interchange;
mod kinds;
mod metrics;
mod place;
mod tensors;
mod tokens;
mod values;

use sparse24_run::{Error, ErrorKind};

/// A loader under attack.
#[derive(Debug)]
pub struct Target {
    /// Its name, also that of its fuzzer.
    pub name: &'static str,
    /// Hands the loader these bytes as its file; panics where a promise is broken.
    pub check: fn(&[u8]),
    /// Sound files and known attacks: where mutation begins.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Sound files but for one thing: a value, a key, a piece of syntax, an end.
    pub variants: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: [Target; 14] = [
    Target {
        name: "config_document",
        check: config::document,
        seeds: config::document_seeds,
        variants: config::document_variants,
    },
    Target {
        name: "config_settings",
        check: config::settings,
        seeds: config::settings_seeds,
        variants: config::settings_variants,
    },
    Target {
        name: "safetensors_prune",
        check: tensors::prune,
        seeds: tensors::prune_seeds,
        variants: tensors::prune_variants,
    },
    Target {
        name: "safetensors_import",
        check: interchange::weights,
        seeds: interchange::weights_seeds,
        variants: interchange::weights_variants,
    },
    Target {
        name: "huggingface_config",
        check: interchange::config,
        seeds: interchange::config_seeds,
        variants: interchange::config_variants,
    },
    Target {
        name: "checkpoint_manifest",
        check: checkpoint::manifest,
        seeds: checkpoint::manifest_seeds,
        variants: checkpoint::manifest_variants,
    },
    Target {
        name: "checkpoint_tensors",
        check: checkpoint::tensors,
        seeds: checkpoint::tensors_seeds,
        variants: checkpoint::tensors_variants,
    },
    Target {
        name: "checkpoint_masks",
        check: checkpoint::masks,
        seeds: checkpoint::masks_seeds,
        variants: checkpoint::masks_variants,
    },
    Target {
        name: "checkpoint_state",
        check: checkpoint::state,
        seeds: checkpoint::state_seeds,
        variants: checkpoint::state_variants,
    },
    Target {
        name: "token_shard",
        check: tokens::shard,
        seeds: tokens::shard_seeds,
        variants: tokens::shard_variants,
    },
    Target {
        name: "token_folder",
        check: tokens::folder,
        seeds: tokens::folder_seeds,
        variants: tokens::folder_variants,
    },
    Target {
        name: "tokenizer_file",
        check: tokens::tokenizer,
        seeds: tokens::tokenizer_seeds,
        variants: tokens::tokenizer_variants,
    },
    Target {
        name: "corpus_text",
        check: tokens::corpus,
        seeds: tokens::corpus_seeds,
        variants: Vec::new,
    },
    Target {
        name: "metrics_log",
        check: metrics::log,
        seeds: metrics::log_seeds,
        variants: metrics::log_variants,
    },
];

/// The target of this name.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn target(name: &str) -> &'static Target {
    TARGETS
        .iter()
        .find(|target| target.name == name)
        .unwrap_or_else(|| panic!("no target is called {name:?}"))
}

/// The most bytes that a target may hold at a time for so many bytes of input: what is promised.
#[must_use]
pub fn memory_bound(input: usize) -> u64 {
    2 * input as u64 + (64 << 20)
}

/// In characters; what a message quotes of a file is cut.
const LONGEST_MESSAGE: usize = 2000;

/// A refusal is one short printable sentence that names the file, or the key.
fn refused(error: &Error, names: &str) {
    let message = error.to_string();
    assert!(message.contains(names), "does not name {names:?}: {message}");
    assert!(!message.contains(char::is_control), "is more than a line of text: {message:?}");
    assert!(
        message.chars().count() <= LONGEST_MESSAGE,
        "is longer than any message needs to be: {message}"
    );
    assert!(
        matches!(error.kind(), ErrorKind::Configuration | ErrorKind::Input),
        "blames the machine: {message}"
    );
}
