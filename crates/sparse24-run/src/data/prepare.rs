//! A corpus, encoded once for many runs: the folder that [`Dataset::from_folder`] reads.
//!
//! Invariant: the folder appears whole or not at all, nothing is replaced but what was made here,
//! and memory does not grow with the corpus.

use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io::{self, ErrorKind},
    ops::Range,
    path::{Path, PathBuf},
    str::FromStr,
};
#[cfg(feature = "tokenizers")]
use std::{panic::resume_unwind, sync::mpsc::sync_channel, thread};

#[cfg(feature = "tokenizers")]
use super::{Bpe, WordPiece};
use super::{
    Dataset, Progress, Tokenizer, TokenizerKind, TokenizerSource, VALIDATION_FRACTION,
    documents::Documents,
    encoding::encode,
    folder::{TOKENIZER, TRAIN, VALIDATION},
    shard::{self, Origin, Shard},
    tokenizer::Characters,
};
use crate::{Error, Result, disk};

/// Held while a folder is made; it is removed before the folder gets its name.
const LOCK: &str = "lock";

/// Ids that are searched at a time.
const PIECE: usize = 1 << 16;

/// How much of a corpus is for validation, taken from its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeldOut {
    /// All but the first floor(n (1 - share)) of n tokens, for a share between 0 and 1.
    Share(f64),
    /// This many.
    Tokens(usize),
}

impl HeldOut {
    /// The most tokens that are held out unless more are asked for.
    pub const MOST: usize = 2_000_000;

    /// How many of `all` tokens; by default a tenth, but at most [`HeldOut::MOST`].
    #[must_use]
    pub fn of(this: Option<Self>, all: usize) -> usize {
        let share = |share: f64| all.saturating_sub((all as f64 * (1.0 - share)) as usize);
        match this {
            None => share(VALIDATION_FRACTION).min(Self::MOST),
            Some(Self::Share(part)) => share(part),
            Some(Self::Tokens(count)) => count,
        }
    }
}

impl FromStr for HeldOut {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(share) if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            Ok(count) if (2.0..1e15).contains(&count) && count.fract() == 0.0 => {
                Ok(Self::Tokens(count as usize))
            }
            _ => {
                Err("expected a share between 0 and 1, or a number of tokens from 2 on".to_owned())
            }
        }
    }
}

/// A corpus to encode, and how.
///
/// The corpus is a file or a folder, each file in the format that its name ends in: JSON lines
/// (`.jsonl`) and Parquet (`.parquet`) hold documents, all else is text; text and lines may be
/// compressed (`.zst`). Plain text without a separator is one text, its files joined by a line
/// feed. In any other corpus, a document ends with its file at the latest, and is followed by the
/// tokenizer's end-of-document token, or by a line feed if the tokenizer has none.
#[derive(Debug, Clone)]
pub struct Preparation<'a> {
    /// A file, or a folder whose files are read in the order of [`super::Corpus::open`].
    pub data: &'a Path,
    /// For a vocabulary of its own the corpus is read twice.
    pub tokenizer: TokenizerSource,
    /// Maximum size of a trained vocabulary (WordPiece or BPE), in pieces; capped at 2^20.
    pub pieces: usize,
    /// Divides text files into documents. On a line of its own, it takes the end of the line along.
    pub separator: Option<&'a str>,
    /// Field of JSON lines, and column of Parquet files, that holds the text.
    pub field: &'a str,
    /// The tail for validation; see [`HeldOut::MOST`] for the default. It starts with a document,
    /// if the tokenizer marks their ends, and else with a character.
    pub validation: Option<HeldOut>,
    /// Whether to replace what was prepared earlier.
    pub force: bool,
}

impl Preparation<'_> {
    /// Encodes the corpus into a folder for [`Dataset::from_folder`]: `train.bin`, `val.bin`,
    /// `tokenizer.json`. `progress` is called with bytes read and bytes in all.
    ///
    /// The folder appears whole or not at all: it is made beside its place and renamed. One that
    /// exists must be empty; or prepared earlier, with [`Preparation::force`].
    ///
    /// # Errors
    /// [`Error::File`] for a folder that holds anything else, and for damaged files of the corpus;
    /// [`Error::Io`]; errors from `progress`.
    pub fn write(&self, folder: &Path, progress: Progress<'_>) -> Result<Dataset> {
        // Through links and dots, so that there is a name to rename to.
        let folder = &fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        self.check_replaceable(folder)?;
        let documents = Documents::open(self.data, self.separator, self.field)?;
        let (tokenizer, is_twice) = self.tokenizer(&documents, progress)?;
        let all = documents.bytes * (1 + u64::from(is_twice));
        let parent = disk::parent(folder);
        fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
        let (partial, _lock) = PartialFolder::claim(folder)?;
        let [train, validation] = [TRAIN, VALIDATION].map(|name| partial.0.join(name));
        let origin =
            Origin { vocabulary: tokenizer.vocabulary(), tokenizer: tokenizer.fingerprint() };
        let before = all - documents.bytes;
        shard::write(&train, origin, |shard| {
            encode(&documents, &tokenizer, |ids, read| {
                shard.push(ids)?;
                progress(before + read, all)
            })
        })?;
        let tokens = Shard::open(&train, None)?;
        let cut = self.cut(&tokens, &tokenizer, documents.is_divided)?;
        shard::write(&validation, origin, |shard| {
            for_each_piece(&tokens, cut..tokens.len(), |_, ids| {
                progress(all, all)?;
                shard.push(ids)
            })
        })?;
        tokens.cut(cut, || progress(all, all))?;
        tokenizer.save(&partial.0.join(TOKENIZER))?;
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
        Dataset::from_folder(folder, None, None)
    }

    /// The tokenizer, and whether the corpus was read for it, which is half of the progress.
    fn tokenizer(
        &self,
        documents: &Documents<'_>,
        progress: Progress<'_>,
    ) -> Result<(Tokenizer, bool)> {
        let all = 2 * documents.bytes;
        match &self.tokenizer {
            TokenizerSource::File(path) => Ok((Tokenizer::read(path)?, false)),
            TokenizerSource::Kind(TokenizerKind::Character) => {
                let mut seen = Characters::default();
                documents.read(&Tokenizer::Byte, &mut |batch| {
                    seen.add(&batch.text);
                    progress(batch.read, all)
                })?;
                Ok((seen.tokenizer(), true))
            }
            #[cfg(feature = "tokenizers")]
            &TokenizerSource::Kind(kind @ (TokenizerKind::WordPiece | TokenizerKind::Bpe)) => {
                let (texts, received) = sync_channel(rayon::current_num_threads());
                let trained: Result<_> = thread::scope(|scope| {
                    // Dropped on an error too, which ends the training.
                    let texts = texts;
                    let texts_of = received.into_iter();
                    let training = scope.spawn(|| match kind {
                        TokenizerKind::Bpe => {
                            let size = self.pieces.try_into().unwrap_or(u32::MAX);
                            Tokenizer::Bpe(Bpe::train(size, texts_of))
                        }
                        _ => Tokenizer::WordPiece(WordPiece::train(self.pieces, texts_of)),
                    });
                    let untrained = Tokenizer::WordPiece(WordPiece::untrained());
                    documents.read(&untrained, &mut |batch| {
                        // Training ends only with a panic, which goes on below.
                        let _ = texts.send(batch.lines());
                        progress(batch.read, all)
                    })?;
                    drop(texts);
                    Ok(training.join().unwrap_or_else(|panic| resume_unwind(panic)))
                });
                Ok((trained?, true))
            }
            &TokenizerSource::Kind(kind) => Ok((Tokenizer::for_text(kind, "")?, false)),
        }
    }

    /// Number of tokens to train on.
    fn cut(&self, tokens: &Shard, tokenizer: &Tokenizer, is_divided: bool) -> Result<usize> {
        let all = tokens.len();
        let held_out = HeldOut::of(self.validation, all);
        if held_out == 0 || held_out >= all {
            let problem = match all {
                0 => "holds no text".to_owned(),
                _ => format!("{all} tokens are too few to hold out {held_out} for validation"),
            };
            return Err(Error::file(self.data, problem));
        }
        let aim = all - held_out;
        // The last start of a document below the aim, and the first at or above it.
        let (mut below, mut from) = (None, None);
        if let Some(end) = tokenizer.end_of_document().filter(|_| is_divided) {
            for_each_piece(tokens, aim - 1..all - 1, |first, ids| {
                let start = ids.iter().position(|&id| id == end);
                from = from.or(start.map(|at| first + at + 1));
                Ok(())
            })?;
            if from.is_none() {
                for_each_piece(tokens, 0..aim - 1, |first, ids| {
                    let start = ids.iter().rposition(|&id| id == end);
                    below = start.map(|at| first + at + 1).or(below);
                    Ok(())
                })?;
            }
        }
        if let Some(cut) = from.or(below) {
            return Ok(cut);
        }
        for_each_piece(tokens, aim..all, |first, ids| {
            let start = ids.iter().position(|&id| tokenizer.starts_character(id));
            from = from.or(start.map(|start| first + start));
            Ok(())
        })?;
        Ok(from.unwrap_or(aim))
    }

    fn check_replaceable(&self, folder: &Path) -> Result {
        if !folder.exists() {
            return Ok(());
        }
        if !folder.is_dir() {
            bail!(folder, "exists and is not a folder; name a new one");
        }
        let names = names(folder)?;
        let is_ours =
            |name: &&OsString| [TRAIN, VALIDATION, TOKENIZER].iter().any(|ours| *name == ours);
        let problem = if let Some(stranger) = names.iter().find(|name| !is_ours(name)) {
            format!(
                "is not empty and holds `{}`, which `prepare` never wrote; name a new or empty \
                 folder",
                stranger.display()
            )
        } else if names.is_empty() {
            return Ok(());
        } else if Tokenizer::load(&folder.join(TOKENIZER)).is_err() {
            format!(
                "holds token files without a {TOKENIZER} of sparse24; name a new or empty folder"
            )
        } else if self.force {
            return Ok(());
        } else {
            "holds prepared data: name a new folder, or replace it with --force".to_owned()
        };
        Err(Error::file(folder, problem))
    }
}

/// Calls `piece` with ids in this range and the position of the first of them.
fn for_each_piece(
    tokens: &Shard,
    range: Range<usize>,
    mut piece: impl FnMut(usize, &[u32]) -> Result,
) -> Result {
    let mut ids = Vec::new();
    for first in range.clone().step_by(PIECE) {
        ids.clear();
        tokens.copy_to(first, PIECE.min(range.end - first), &mut ids)?;
        piece(first, &ids)?;
    }
    Ok(())
}

/// A folder that is removed with all that it holds when it goes out of scope under this name.
struct PartialFolder(PathBuf);

impl PartialFolder {
    /// The place where a folder is made, empty but for a lock that this process holds. What a
    /// process that died left there is removed.
    fn claim(folder: &Path) -> Result<(Self, [Option<File>; 2])> {
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
                bail!(folder, "is being prepared by another process; wait for it");
            }
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        // The lock file goes before the folder has its name; the lock on the folder itself lasts.
        let whole = disk::open_directory(&path).ok();
        if let Some(Err(TryLockError::WouldBlock)) = whole.as_ref().map(File::try_lock) {
            bail!(folder, "is being prepared by another process; wait for it");
        }
        // The folder that was to be replaced, if the process died between taking its name away and
        // giving it to the new one.
        drop(Self(disk::aside(&path)));
        for name in names(&path)?.into_iter().filter(|name| name != LOCK) {
            fs::remove_file(path.join(name)).map_err(failed)?;
        }
        Ok((Self(path), [Some(lock), whole]))
    }
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        // After the rename there is nothing here; before it, the error at hand says more than one
        // of the removal would.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn names(folder: &Path) -> Result<Vec<OsString>> {
    let list = || {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()
    };
    list().map_err(|e| Error::io("read", folder, e))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::data::Corpus;

    pub(in crate::data) fn corpus(text: &str) -> Corpus {
        Corpus::from_text(text.to_owned(), "corpus").unwrap()
    }

    fn preparation(data: &Path, tokenizer: TokenizerKind) -> Preparation<'_> {
        let (tokenizer, pieces) = (TokenizerSource::Kind(tokenizer), 100);
        let (separator, field, validation) = (None, "text", None);
        Preparation { data, tokenizer, pieces, separator, field, validation, force: true }
    }

    /// Replaces a folder by the shards of a text.
    pub(in crate::data) fn prepared(folder: &Path, kind: TokenizerKind) -> Result<Dataset> {
        let text = tempfile::NamedTempFile::new().unwrap();
        fs::write(text.path(), TEXT.repeat(20)).unwrap();
        preparation(text.path(), kind).write(folder, &mut |_, _| Ok(()))
    }

    const TEXT: &str = "to be, or not to be: ";

    /// All ids, and how many are for training.
    fn ids(dataset: &Dataset) -> (Vec<u32>, usize) {
        let mut ids = Vec::new();
        for split in [dataset.train(), dataset.validation()] {
            split.copy_to(0, split.len(), &mut ids).unwrap();
        }
        (ids, dataset.train().len())
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
            let tokenizer = written.tokenizer().unwrap();
            let text = TEXT.repeat(20);
            assert_eq!(ids(&written).0, tokenizer.encode(&text).unwrap());
            // The split is that of a text in memory, where a token is a character.
            if matches!(kind, TokenizerKind::Byte | TokenizerKind::Character) {
                let read = Dataset::from_corpus(&corpus(&text), tokenizer.clone(), 0.1).unwrap();
                assert_eq!(read.fingerprint(), written.content_fingerprint().unwrap());
            }
        }
    }

    #[test]
    fn the_tail_starts_with_a_document_or_a_character() {
        let root = tempfile::tempdir().unwrap();
        let text = root.path().join("text");
        let kinds = TokenizerKind::ALL.into_iter();
        let kinds = kinds.filter(|&kind| kind != TokenizerKind::Bpe);
        for kind in kinds.filter(|&kind| Tokenizer::for_text(kind, "").is_ok()) {
            let write = |content: &str, separator, validation: &str| {
                fs::write(&text, content).unwrap();
                let validation = Some(validation.parse().unwrap());
                let preparation = Preparation { separator, validation, ..preparation(&text, kind) };
                preparation.write(&root.path().join("out"), &mut |_, _| Ok(())).map(|d| ids(&d))
            };
            // 31 documents of a word each, and a last one of twenty.
            let documents = "word--".repeat(31) + &" to".repeat(20);
            let (all, ends) = match kind {
                TokenizerKind::Gpt2 | TokenizerKind::WordPiece => (83, [30, 60, 62, 62, 62]),
                _ => (216, [163, 193, 204, 212, 214]),
            };
            let asked = [all - ends[0], all - ends[1], 12, 4, 2];
            for (asked, end) in asked.into_iter().zip(ends) {
                let (ids, train) = write(&documents, Some("--"), &asked.to_string()).unwrap();
                assert_eq!((ids.len(), train), (all, end), "{} {asked}", kind.name());
            }
            // Tokens that are parts of characters.
            for asked in 2..9 {
                let (ids, train) = write("漢\u{1f600}字\u{1f601}", None, &asked.to_string())
                    .unwrap_or_else(|_| (vec![], 0));
                let Some(tail) = ids.get(train..).filter(|tail| !tail.is_empty()) else { continue };
                let tokenizer = Tokenizer::for_text(kind, "漢\u{1f600}字\u{1f601}").unwrap();
                let first = tokenizer.decode(tail).unwrap()[0];
                assert!(first & 0xc0 != 0x80 || train == ids.len() - asked, "{asked}");
            }
            let message = write(&documents, None, "5000").unwrap_err().to_string();
            assert!(message.contains("too few to hold out 5000"), "{message}");
        }
        for (text, expected) in [
            ("0.25", Some(HeldOut::Share(0.25))),
            ("2000", Some(HeldOut::Tokens(2000))),
            ("2e6", Some(HeldOut::Tokens(2_000_000))),
        ] {
            assert_eq!(text.parse().ok(), expected, "{text}");
        }
        for bad in ["0", "1", "-1", "1.5", "NaN", "inf", "1e300", "tenth", ""] {
            assert!(bad.parse::<HeldOut>().is_err(), "{bad}");
        }
        assert_eq!([19, 40_000_000].map(|all| HeldOut::of(None, all)), [2, HeldOut::MOST]);
        assert_eq!(HeldOut::of(Some(HeldOut::Share(-1.0)), 19), 0);
    }

    #[test]
    fn what_was_prepared_is_replaced_only_on_demand() {
        let root = tempfile::tempdir().unwrap();
        let (folder, text) = (root.path().join("out"), root.path().join("text"));
        prepared(&folder, TokenizerKind::Byte).unwrap();
        fs::write(&text, TEXT).unwrap();
        let kept = Preparation { force: false, ..preparation(&text, TokenizerKind::Character) };
        let message = kept.write(&folder, &mut |_, _| Ok(())).unwrap_err().to_string();
        assert!(message.contains("out: holds prepared data") && message.contains("--force"));
        assert_eq!(Tokenizer::load(&folder.join(TOKENIZER)).unwrap(), Tokenizer::Byte);
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
