//! A text, encoded once for many runs: the folder that [`Dataset::from_folder`] reads.
//!
//! Invariant: the folder appears whole or not at all, and nothing is replaced but what was made
//! here. Deliberately absent: encoding of texts larger than memory.

use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use super::{
    Corpus, Dataset, Tokenizer,
    folder::{TOKENIZER, TRAIN, VALIDATION},
    shard::{self, Origin},
};
use crate::{Error, disk};

/// Held while a folder is made; it is removed before the folder gets its name.
const LOCK: &str = "lock";

/// Encodes a corpus into a folder for [`Dataset::from_folder`]: `train.bin`, `val.bin`,
/// `tokenizer.json`.
///
/// The folder appears whole or not at all: it is made beside its place and renamed. One that exists
/// must be empty or prepared earlier.
///
/// # Errors
/// [`Error::File`] for a folder that holds anything else; [`Error::Io`]; [`Error::Interrupted`] if
/// the flag is set before the shards are written; as [`Dataset::from_corpus`].
pub fn prepare(
    corpus: &Corpus,
    tokenizer: Tokenizer,
    validation: f64,
    folder: &Path,
    interrupt: &AtomicBool,
) -> Result<Dataset, Error> {
    // Through links and dots, so that there is a name to rename to.
    let folder = &fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    check_replaceable(folder)?;
    let (origin, described) = (
        Origin { vocabulary: tokenizer.vocabulary(), tokenizer: tokenizer.fingerprint() },
        tokenizer.clone(),
    );
    let dataset = Dataset::encoded(corpus, tokenizer, validation, interrupt)?;
    let parent = disk::parent(folder);
    fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
    let (partial, _lock) = PartialFolder::claim(folder)?;
    for (name, split) in [(TRAIN, dataset.train()), (VALIDATION, dataset.validation())] {
        shard::write(&partial.0.join(name), origin, |shard| {
            split.for_each_piece(|ids| shard.push(ids))
        })?;
    }
    described.save(&partial.0.join(TOKENIZER))?;
    disk::remove_file(&partial.0.join(LOCK))?;
    let failed = |e| Error::io("replace", folder, e);
    if folder.exists() {
        let replaced = PartialFolder(disk::aside(&partial.0));
        fs::rename(folder, &replaced.0).map_err(failed)?;
        if let Err(e) = fs::rename(&partial.0, folder) {
            fs::rename(&replaced.0, folder).map_err(failed)?;
            return Err(failed(e));
        }
    } else {
        fs::rename(&partial.0, folder).map_err(failed)?;
    }
    disk::sync_directory(parent)?;
    Ok(dataset)
}

/// A folder that is removed with all that it holds when it goes out of scope under this name.
struct PartialFolder(PathBuf);

impl PartialFolder {
    /// The place where a folder is made, empty but for a lock that this process holds. What a
    /// process that died left there is removed.
    fn claim(folder: &Path) -> Result<(Self, File), Error> {
        let path = disk::aside(folder);
        let failed = |e| Error::io("create", folder, e);
        match fs::create_dir(&path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(failed(e)),
            _ => {}
        }
        let lock = File::create(path.join(LOCK)).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::file(
                    folder,
                    "is being prepared by another process; wait for it",
                ));
            }
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        // The folder that was to be replaced, if the process died between taking its name away and
        // giving it to the new one.
        drop(Self(disk::aside(&path)));
        for name in names(&path)?.into_iter().filter(|name| name != LOCK) {
            fs::remove_file(path.join(name)).map_err(failed)?;
        }
        Ok((Self(path), lock))
    }
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        // After the rename there is nothing here; before it, the error at hand says more than one
        // of the removal would.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn names(folder: &Path) -> Result<Vec<OsString>, Error> {
    let list = || {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()
    };
    list().map_err(|e| Error::io("read", folder, e))
}

fn check_replaceable(folder: &Path) -> Result<(), Error> {
    if !folder.exists() {
        return Ok(());
    }
    if !folder.is_dir() {
        return Err(Error::file(folder, "exists and is not a folder; name a new one"));
    }
    let names = names(folder)?;
    let stranger =
        names.iter().find(|name| ![TRAIN, VALIDATION, TOKENIZER].iter().any(|ours| name == ours));
    if let Some(stranger) = stranger {
        let problem = format!(
            "is not empty and holds `{}`, which `prepare` never wrote; name a new or empty folder",
            stranger.display()
        );
        return Err(Error::file(folder, problem));
    }
    if names.is_empty() || Tokenizer::load(&folder.join(TOKENIZER)).is_ok() {
        return Ok(());
    }
    Err(Error::file(
        folder,
        format!("holds token files without a {TOKENIZER} of sparse24; name a new or empty folder"),
    ))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::data::TokenizerKind;

    pub(in crate::data) fn corpus(text: &str) -> Corpus {
        Corpus::from_text(text.to_owned(), "corpus").unwrap()
    }

    pub(in crate::data) fn prepared(folder: &Path, kind: TokenizerKind) -> Result<Dataset, Error> {
        let corpus = corpus(&"to be, or not to be: ".repeat(20));
        prepare(
            &corpus,
            Tokenizer::for_text(kind, corpus.text()).unwrap(),
            0.1,
            folder,
            &AtomicBool::new(false),
        )
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_prepared_folder_is_the_corpus_again() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("deep/er");
        for kind in TokenizerKind::ALL {
            let Ok(written) = prepared(&folder, kind) else { continue };
            assert_eq!(names(&folder), [TOKENIZER, TRAIN, VALIDATION]);
            assert_eq!(names(folder.parent().unwrap()), ["er"], "something half-written is left");
            let read = Dataset::open(Some(&folder), Some(kind), 0.5).unwrap();
            assert_eq!(read.tokenizer(), written.tokenizer());
            assert_eq!(read.content_fingerprint().unwrap(), written.fingerprint());
        }
    }

    #[test]
    fn what_a_dead_process_left_is_taken_over_and_what_a_living_one_makes_is_not() {
        let root = tempfile::tempdir().unwrap();
        let (folder, partial) = (root.path().join("out"), root.path().join(".tmp-out"));
        fs::create_dir(&partial).unwrap();
        for name in [TRAIN, ".tmp-val.bin", LOCK] {
            fs::write(partial.join(name), "half").unwrap();
        }
        prepared(&folder, TokenizerKind::Byte).unwrap();
        assert_eq!(names(root.path()), ["out"]);
        assert_eq!(names(&folder), [TOKENIZER, TRAIN, VALIDATION]);
        let (living, _lock) = PartialFolder::claim(&folder).unwrap();
        let message = prepared(&folder, TokenizerKind::Byte).unwrap_err().to_string();
        assert!(
            message.ends_with("out: is being prepared by another process; wait for it"),
            "{message}"
        );
        assert_eq!(names(&living.0), [LOCK]);
    }

    #[test]
    fn prepare_replaces_only_its_own() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("out");
        fs::create_dir(&folder).unwrap();
        prepared(&folder, TokenizerKind::Byte).unwrap();
        prepared(&folder, TokenizerKind::Character).unwrap();
        assert_eq!(
            Tokenizer::load(&folder.join(TOKENIZER)).unwrap().kind(),
            TokenizerKind::Character
        );
        fs::write(folder.join("thesis.tex"), "years of work").unwrap();
        let message = prepared(&folder, TokenizerKind::Byte).unwrap_err().to_string();
        assert!(message.contains("out") && message.contains("`thesis.tex`"), "{message}");
        fs::remove_file(folder.join("thesis.tex")).unwrap();
        fs::remove_file(folder.join(TOKENIZER)).unwrap();
        assert!(
            prepared(&folder, TokenizerKind::Byte)
                .unwrap_err()
                .to_string()
                .contains("without a tokenizer.json")
        );
        assert_eq!(names(&folder), [TRAIN, VALIDATION]);
        assert_eq!(names(root.path()), ["out"]);
    }
}
