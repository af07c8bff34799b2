//! The text that a run learns from: a file, a folder, or the corpus that is embedded here.
//!
//! Invariant: a corpus is valid UTF-8 and not empty. Deliberately absent: formats other than plain
//! text.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::files::{check_text, is_plain, list, no_text};
use crate::{Error, Result, disk};

/// The share of a corpus that is held out unless the configuration says otherwise.
pub const VALIDATION_FRACTION: f64 = 0.1;

const EMBEDDED: &str = include_str!("../../assets/corpus.txt");
/// BLAKE3 of the embedded corpus: runs of different versions see the same text.
const EMBEDDED_BLAKE3: &str = "eadd1ac21ce5a8d0cefbbbc575747acf665403405c498882e662cbad6af964f7";

/// Between two files of a folder: one line feed, so that the last line of a file that lacks one
/// stays a line.
const SEPARATOR: &str = "\n";

/// A text and where it came from.
#[derive(Debug, Clone)]
pub struct Corpus {
    text: String,
    source: PathBuf,
}

impl Corpus {
    /// The corpus that is part of this crate: sources and documents of sparse24, frozen
    /// (`assets/README.md`).
    ///
    /// # Panics
    /// If the crate was built with another text than the pinned one.
    #[must_use]
    pub fn embedded() -> Self {
        let found = blake3::hash(EMBEDDED.as_bytes()).to_hex();
        assert_eq!(
            found.as_str(),
            EMBEDDED_BLAKE3,
            "assets/corpus.txt is not the text that this version pins"
        );
        Self { text: EMBEDDED.to_owned(), source: PathBuf::from("the embedded corpus") }
    }

    /// A text file; or all files below a folder, sorted by path relative to it (names compared as
    /// bytes, folder by folder), with a line feed between two.
    ///
    /// Below a folder, names that begin with a dot are skipped, and so is what is neither a regular
    /// file nor a folder. A symbolic link to a file is read; one to a folder is not entered, so
    /// that no loop is followed.
    ///
    /// # Errors
    /// [`Error::Io`] for what cannot be read, [`Error::File`] naming the file and byte offset for
    /// what is not UTF-8, for no text at all, and for a path that does not exist.
    pub fn open(path: &Path) -> Result<Self> {
        let expected = "a text file, a folder of them, or a folder of token shards";
        let kind =
            fs::metadata(path).map_err(|e| Error::io("read", path, e).expecting(expected))?;
        let text = if kind.is_dir() {
            let mut files = Vec::new();
            list(path, &mut files)?;
            let texts = files.iter().map(|file| read(file)).collect::<Result<Vec<_>, _>>()?;
            texts.join(SEPARATOR)
        } else {
            read(path)?
        };
        Self::from_text(text, path)
    }

    /// This text; `source` names it in messages.
    ///
    /// # Errors
    /// [`Error::File`] for no text at all.
    pub fn from_text(text: String, source: impl Into<PathBuf>) -> Result<Self> {
        let source = source.into();
        if text.trim().is_empty() {
            bail!(source, "holds no text; a corpus needs at least one sequence and a token");
        }
        Ok(Self { text, source })
    }

    /// The whole text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The file or folder; `the embedded corpus` if it is that.
    #[must_use]
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// The head for training and the tail to be held out: of n characters (not bytes) the first
    /// floor(n * (1 - validation)) are for training. With the default of 0.1 this is nanoGPT's
    /// `data[:int(n * 0.9)]`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a fraction outside of (0, 1); [`Error::File`] if either part would be
    /// empty.
    pub fn split(&self, validation: f64) -> Result<[&str; 2]> {
        if !(validation > 0.0 && validation < 1.0) {
            bail!(
                setting = "data.validation_share",
                "expected more than 0 and less than 1, found {validation}"
            );
        }
        let characters = self.text.chars().count();
        // Rounding to f64 is nanoGPT's too; it is exact below 2^53 characters.
        let kept = (characters as f64 * (1.0 - validation)) as usize;
        if kept == 0 || kept >= characters {
            bail!(
                &self.source,
                "{characters} characters are too few to hold out a share of {validation} for \
                    validation"
            );
        }
        let at = self.text.char_indices().nth(kept).map_or(self.text.len(), |(at, _)| at);
        let (head, tail) = self.text.split_at(at);
        Ok([head, tail])
    }
}

fn read(path: &Path) -> Result<String> {
    if !is_plain(path) {
        bail!(
            path,
            "is JSON lines, Parquet or compressed, which `sparse24 prepare` reads; train \
                       on the folder that it writes"
        );
    }
    let bytes = disk::read(path)?;
    check_text(path, &bytes)?;
    String::from_utf8(bytes).map_err(|e| no_text(path, e.as_bytes(), 0, e.utf8_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_corpus_is_the_pinned_one() {
        let corpus = Corpus::embedded();
        assert!(corpus.text().len() >= 300_000, "{} bytes", corpus.text().len());
    }

    #[test]
    fn a_split_counts_characters() {
        let corpus = Corpus::from_text("äöüß€12345678901234\u{1F600}".to_owned(), "t").unwrap();
        let [train, validation] = corpus.split(0.1).unwrap();
        assert_eq!((train, validation), ("äöüß€1234567890123", "4\u{1F600}"));
        for bad in [0.0, 1.0, -0.1, f64::NAN, f64::INFINITY] {
            assert!(
                corpus.split(bad).unwrap_err().to_string().contains("more than 0 and less than 1")
            );
        }
        let one = Corpus::from_text("x".to_owned(), "t").unwrap();
        assert!(one.split(0.1).unwrap_err().to_string().contains("too few"));
    }

    #[test]
    fn a_split_is_that_of_nanogpt() {
        // int(1115394 * 0.9) in Python.
        let corpus = Corpus::from_text("a".repeat(1_115_394), "t").unwrap();
        assert_eq!(corpus.split(VALIDATION_FRACTION).unwrap().map(str::len), [1_003_854, 111_540]);
    }

    #[test]
    fn a_folder_is_read_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("b")).unwrap();
        fs::create_dir(at(".git")).unwrap();
        for (name, text) in [
            ("b/z", "2"),
            ("c", "3"),
            ("a", "1"),
            (".hidden", "x"),
            (".git/config", "x"),
            ("b/.env", "x"),
        ] {
            fs::write(at(name), text).unwrap();
        }
        assert_eq!(Corpus::open(folder.path()).unwrap().text(), "1\n2\n3");
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(folder.path(), at("loop")).unwrap();
            std::os::unix::fs::symlink(at("a"), at("d")).unwrap();
            assert_eq!(Corpus::open(folder.path()).unwrap().text(), "1\n2\n3\n1");
        }
    }
}
