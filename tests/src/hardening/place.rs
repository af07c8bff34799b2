//! Where the files of a thread lie: loaders read paths.
//!
//! Invariant: every thread has a folder of its own, which goes with it.

use std::{fs, path::PathBuf};

use tempfile::TempDir;

thread_local!(static FOLDER: TempDir = tempfile::tempdir().expect("the machine has a temporary folder"));

/// A path in the folder of this thread; the folders above it exist.
pub(super) fn path(name: &str) -> PathBuf {
    let path = FOLDER.with(|folder| folder.path().join(name));
    if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
        fs::create_dir_all(parent).expect("a temporary folder can be written");
    }
    path
}

/// A file in the folder of this thread that holds these bytes.
pub(super) fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = path(name);
    fs::write(&path, bytes).expect("a temporary file can be written");
    path
}
