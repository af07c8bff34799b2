//! Attacks on every loader of files from outside. Tests and fuzzer share one table of [`Target`]s.
//!
//! A target is a function of a file's bytes that panics when a promise is broken: the loader
//! panicked, accepted a file that cannot be used, or returned an error that does not help. Callers
//! measure memory and time.

pub mod checkpoint;
mod config;
mod document;
mod images;
mod interchange;
mod metrics;
mod tasks;
pub mod tensors;
mod tokens;
mod translation;

use std::{
    fs,
    path::{Path, PathBuf},
};

use sparse24_run::{Error, ErrorKind};
use tempfile::TempDir;

/// The contents of files.
type Files = Vec<Vec<u8>>;

/// A loader under attack.
#[derive(Debug)]
pub struct Target {
    /// Name, also of its corpus for the fuzzer.
    pub name: &'static str,
    /// Loads a file with these bytes; returns whether it was accepted. Panics if a promise is
    /// broken.
    pub check: fn(&[u8]) -> bool,
    /// Files that random damage starts from: one that is accepted, then others and known attacks.
    pub seeds: fn() -> Files,
    /// Sound files with one structured change each.
    pub variants: fn() -> Files,
}

macro_rules! targets {
    ($($name:ident: $module:ident { $check:ident, $seeds:ident, $variants:ident },)*) => {
        /// All targets.
        pub const TARGETS: &[Target] = &[$(Target {
            name: stringify!($name),
            check: $module::$check,
            seeds: $module::$seeds,
            variants: $module::$variants,
        },)*];
    };
}

targets! {
    config_document: config { document, document_seeds, document_variants },
    config_settings: config { settings, settings_seeds, settings_variants },
    study_plan: config { study, study_seeds, study_variants },
    safetensors_prune: tensors { pruned, prune_seeds, prune_variants },
    safetensors_import: interchange { weights, weights_seeds, weights_variants },
    huggingface_config: interchange { config, config_seeds, config_variants },
    checkpoint_manifest: checkpoint { manifest, manifest_seeds, manifest_variants },
    checkpoint_tensors: checkpoint { tensors, tensors_seeds, tensors_variants },
    checkpoint_masks: checkpoint { masks, masks_seeds, masks_variants },
    checkpoint_state: checkpoint { state, state_seeds, state_variants },
    token_shard: tokens { shard, shard_seeds, shard_variants },
    token_folder: tokens { folder, folder_seeds, folder_variants },
    tokenizer_file: tokens { tokenizer, tokenizer_seeds, tokenizer_variants },
    corpus_text: tokens { corpus, corpus_seeds, corpus_variants },
    metrics_log: metrics { log, log_seeds, log_variants },
    task_examples: tasks { examples, examples_seeds, examples_variants },
    class_image: images { image, image_seeds, image_variants },
    sentence_pairs: translation { pairs, pairs_seeds, pairs_variants },
}

/// The most bytes that a loader may hold at a time for an input of this many bytes.
#[must_use]
pub fn memory_bound(input: usize) -> u64 {
    2 * input as u64 + (64 << 20)
}

/// Checks the error of a loader: one short printable sentence that contains `names` and does not
/// blame the machine.
fn refused(error: &Error, names: &str) -> bool {
    let message = error.to_string();
    assert!(message.contains(names), "does not name {names:?}: {message}");
    assert!(!message.contains(char::is_control), "has control characters: {message:?}");
    assert!(message.chars().count() <= 2000, "is too long: {message}");
    let is_input = matches!(error.kind(), ErrorKind::Configuration | ErrorKind::Input);
    assert!(is_input, "blames the machine: {message}");
    false
}

/// A path in this thread's temporary folder (in memory where possible); its parent exists.
fn path(name: &str) -> PathBuf {
    fn make() -> TempDir {
        let in_memory = tempfile::tempdir_in("/dev/shm");
        in_memory.or_else(|_| tempfile::tempdir()).expect("a temporary folder")
    }
    thread_local!(static FOLDER: TempDir = make());
    let path = FOLDER.with(|folder| folder.path().join(name));
    fs::create_dir_all(path.parent().expect("a folder")).expect("a writable temporary folder");
    path
}

/// A file in this thread's temporary folder that holds these bytes.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = path(name);
    fs::write(&path, bytes).expect("a writable temporary folder");
    path
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    fs::read(path).expect("a file that was just written")
}

/// Texts as files.
fn files(texts: &[&str]) -> Files {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}
