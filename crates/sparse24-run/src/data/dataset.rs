//! The two token sequences of a run: one to train on, one held out.
//!
//! Invariant: every id that is read is below the vocabulary, and equal fingerprints mean equal
//! tokens under the same tokenizer. Deliberately absent: which part a step sees
//! ([`Dataset::batch`], [`Dataset::evaluation_windows`]).

use std::path::{Path, PathBuf};

use blake3::Hash;

use super::{
    Corpus, Split, Tokenizer, TokenizerKind, Tokens,
    fingerprint::content,
    folder::{Folder, Opening, Scan, is_shards},
};
use crate::{Error, Result};

/// Token ids for training and for validation, and what they mean. A clone shares the tokens.
#[derive(Debug, Clone)]
pub struct Dataset {
    train: Split,
    validation: Split,
    vocabulary: u32,
    tokenizer: Option<Tokenizer>,
    fingerprint: Hash,
    source: PathBuf,
    /// None if it was made of parts.
    opened: Option<Source>,
    scan: Option<Scan>,
}

/// The data of a run, before it is opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    /// The embedded corpus, if absent.
    pub path: Option<PathBuf>,
    /// How text becomes tokens: as bytes, if absent.
    pub kind: Option<TokenizerKind>,
    /// Share of a text, at its end, that is the validation split.
    pub validation: f64,
}

impl Dataset {
    /// Opens the data of a run: without a path the embedded corpus, a folder of token shards as
    /// [`Dataset::from_folder`], anything else as a corpus. Without a kind, a corpus is read as
    /// bytes.
    ///
    /// # Errors
    /// Like [`Corpus::open`], [`Dataset::from_corpus`] and [`Dataset::from_folder`].
    pub fn open(path: Option<&Path>, kind: Option<TokenizerKind>, validation: f64) -> Result<Self> {
        let path = path.map(Path::to_owned);
        Self::open_scanned(Source { path, kind, validation }, Opening::default())
    }

    /// Like [`Dataset::open`], with the result of an earlier start or a display of progress.
    ///
    /// # Errors
    /// Like [`Dataset::open`].
    pub fn open_scanned(source: Source, opening: Opening<'_>) -> Result<Self> {
        let Source { path, kind, validation } = &source;
        let read = |corpus: &Corpus| {
            let kind = kind.unwrap_or(TokenizerKind::Byte);
            let tokenizer = match &opening.tokenizer {
                Some(tokenizer) => tokenizer.clone(),
                None => Tokenizer::for_text(kind, corpus.text())?,
            };
            Self::from_corpus(corpus, tokenizer, *validation)
        };
        let dataset = match path {
            None => read(&Corpus::embedded()),
            Some(folder) if is_shards(folder) => Self::from_shards(folder, *kind, None, opening),
            Some(path) => read(&Corpus::open(path)?),
        };
        Ok(Self { opened: Some(source), ..dataset? })
    }

    /// Whether it was opened from this source.
    #[must_use]
    pub fn is_of(&self, source: &Source) -> bool {
        self.opened.as_ref() == Some(source)
    }

    /// Like [`Dataset::open`], with a tokenizer at hand instead of a kind: how a run sees other
    /// data.
    ///
    /// # Errors
    /// Like [`Dataset::open`]; [`Error::File`] for a folder that another tokenizer prepared.
    pub fn open_with(path: &Path, tokenizer: Tokenizer, validation: f64) -> Result<Self> {
        if !is_shards(path) {
            return Self::from_corpus(&Corpus::open(path)?, tokenizer, validation);
        }
        let read = Self::from_folder(path, None, Some(tokenizer.vocabulary()))?;
        match &read.tokenizer {
            None => {
                let mut read = Self { tokenizer: Some(tokenizer), scan: None, ..read };
                read.fingerprint = read.content_fingerprint()?;
                Ok(read)
            }
            Some(found) if *found == tokenizer => Ok(read),
            Some(_) => {
                Err(Error::file(path, "was prepared with a tokenizer other than the one to use"))
            }
        }
    }

    /// The tokens of a corpus; the two parts of [`Corpus::split`] are encoded apart.
    ///
    /// # Errors
    /// Like [`Corpus::split`]; [`Error::File`] for a text that the tokenizer cannot encode.
    pub fn from_corpus(corpus: &Corpus, tokenizer: Tokenizer, validation: f64) -> Result<Self> {
        let [head, tail] = corpus.split(validation)?;
        let vocabulary = tokenizer.vocabulary();
        let encode = |text: &str, before: usize| {
            let mut tokens = Tokens::for_vocabulary(vocabulary);
            match tokenizer.encode_into(text, &mut tokens) {
                Ok(()) => Ok(tokens),
                Err(e) => Err(Error::file(corpus.source(), e.moved(before).to_string())),
            }
        };
        let (train, validation) = (encode(head, 0)?, encode(tail, head.len())?);
        let splits = [train, validation].map(Split::from);
        let fingerprint = content(vocabulary, Some(&tokenizer), &splits, None)?;
        let [train, validation] = splits;
        let (tokenizer, source) = (Some(tokenizer), corpus.source().to_owned());
        let (opened, scan) = (None, None);
        Ok(Self { train, validation, vocabulary, tokenizer, fingerprint, source, opened, scan })
    }

    /// A prepared folder (`train.bin`, `val.bin`, `tokenizer.json`), or one of foreign shards
    /// (nanoGPT's or llm.c's, no `tokenizer.json`). A split may have any number of shards.
    ///
    /// Foreign shards have no tokenizer: `kind` byte or gpt2 chooses one; otherwise there is none,
    /// and the vocabulary is the one given, or the largest id plus one. They are read whole, unless
    /// an earlier scan is still true. Of prepared shards the headers and sizes are trusted, and
    /// their ids checked as they are read; those of at most 64 MiB are verified.
    ///
    /// # Errors
    /// Like [`Shard::open`](super::shard::Shard::open); [`Error::File`] for shards of another
    /// tokenizer than the folder's, and for another vocabulary than the one given;
    /// [`Error::Setting`] for a kind that contradicts the folder.
    pub fn from_folder(
        folder: &Path,
        kind: Option<TokenizerKind>,
        vocabulary: Option<u32>,
    ) -> Result<Self> {
        Self::from_shards(folder, kind, vocabulary, Opening::default())
    }

    fn from_shards(
        folder: &Path,
        kind: Option<TokenizerKind>,
        vocabulary: Option<u32>,
        opening: Opening<'_>,
    ) -> Result<Self> {
        let source = folder.to_owned();
        let Folder { splits, vocabulary, tokenizer, fingerprint, scan } =
            Folder::open(folder, kind, vocabulary, opening)?;
        let [train, validation] = splits;
        let opened = None;
        Ok(Self { train, validation, vocabulary, tokenizer, fingerprint, source, opened, scan })
    }

    /// The scan of foreign shards, to be kept beside the run.
    #[must_use]
    pub fn scan(&self) -> Option<&Scan> {
        self.scan.as_ref()
    }

    /// Tokens of the training split.
    #[must_use]
    pub fn train(&self) -> &Split {
        &self.train
    }

    /// Tokens of the validation split.
    #[must_use]
    pub fn validation(&self) -> &Split {
        &self.validation
    }

    /// Every id is below it.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// The tokenizer; `None` for foreign shards, which have none.
    #[must_use]
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The fingerprint: of text and foreign shards [`Dataset::content_fingerprint`]; of prepared
    /// shards BLAKE3 of, little endian: `sparse24 shards`, vocabulary (u32), fingerprint of the
    /// tokenizer, and for each split the number of its shards (u64), and length (u64) and checksum
    /// of the ids of each.
    #[must_use]
    pub fn fingerprint(&self) -> Hash {
        self.fingerprint
    }

    /// BLAKE3 of, little endian: vocabulary (u32), fingerprint of the tokenizer (32 zero bytes
    /// without one), and for each split its length (u64) and ids (u32 each). Reads all tokens.
    ///
    /// # Errors
    /// Like [`Split::copy_to`].
    pub fn content_fingerprint(&self) -> Result<Hash> {
        let splits = [self.train.clone(), self.validation.clone()];
        content(self.vocabulary, self.tokenizer.as_ref(), &splits, None)
    }

    /// Path of the data, for messages.
    #[must_use]
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Refuses a dataset that is too short: training needs context + 1 tokens, validation 2.
    ///
    /// # Errors
    /// [`Error::File`] with both numbers.
    pub fn check_context(&self, context: usize) -> Result {
        let (train, needed) = (self.train.len(), context.saturating_add(1));
        if train < needed {
            bail!(
                &self.source,
                "has {train} tokens to train on; sequences of {context} need at least {needed}"
            );
        }
        self.check_held_out()
    }

    /// Refuses a dataset whose validation split has fewer than 2 tokens.
    ///
    /// # Errors
    /// [`Error::File`] with the number of its tokens.
    pub fn check_held_out(&self) -> Result {
        match self.validation.len() {
            few @ (0 | 1) => Err(Error::file(
                &self.source,
                format!("has {few} tokens in its validation split, expected at least 2"),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::data::{
        folder::{TOKENIZER, TRAIN, VALIDATION},
        prepare::tests::{corpus, prepared},
    };

    #[test]
    fn a_folder_must_agree_with_itself_and_with_what_is_asked() {
        let root = tempfile::tempdir().unwrap();
        let [bytes, characters] = ["bytes", "characters"].map(|name| root.path().join(name));
        prepared(&bytes, TokenizerKind::Byte).unwrap();
        prepared(&characters, TokenizerKind::Character).unwrap();
        let refusal = |folder: &Path, kind, vocabulary| {
            Dataset::from_folder(folder, kind, vocabulary).unwrap_err().to_string()
        };
        assert!(refusal(&bytes, Some(TokenizerKind::Gpt2), None).contains("`gpt2` is asked for"));
        assert!(refusal(&bytes, None, Some(257)).contains("of 256 tokens, expected one of 257"));
        fs::copy(characters.join(VALIDATION), bytes.join(VALIDATION)).unwrap();
        assert!(refusal(&bytes, None, None).contains("val.bin: has a vocabulary of"));
        Tokenizer::Character((0..256).filter_map(char::from_u32).collect())
            .save(&bytes.join(TOKENIZER))
            .unwrap();
        assert!(
            refusal(&bytes, None, None).contains("train.bin: was not encoded with the tokenizer")
        );
        fs::remove_file(bytes.join(TOKENIZER)).unwrap();
        assert!(refusal(&bytes, None, None).contains("needs the tokenizer.json"));
        fs::write(characters.join(TRAIN), [0; 8]).unwrap();
        assert!(
            refusal(&characters, None, None).contains("train.bin: not a token shard of sparse24")
        );
        fs::remove_file(characters.join(VALIDATION)).unwrap();
        fs::remove_file(characters.join(TOKENIZER)).unwrap();
        assert!(refusal(&characters, None, None).contains("val.bin"));
    }

    /// Shards as llm.c and others name them are one sequence, in the order of their numbers.
    #[test]
    fn many_shards_are_one_sequence() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, ids: std::ops::Range<u16>| {
            let bytes: Vec<u8> = ids.flat_map(u16::to_le_bytes).collect();
            fs::write(root.path().join(name), bytes).unwrap();
        };
        for name in ["train.bin.txt", ".train.bin", "trainers.bin", "other.bin"] {
            write(name, 900..901);
        }
        assert!(!is_shards(root.path()));
        write("web_train_10.bin", 7..12);
        write("web_train_9.bin", 2..7);
        write("web_train_2.bin", 0..2);
        write("web_train_11.bin", 12..12);
        let alone = Dataset::from_folder(root.path(), None, None).unwrap_err().to_string();
        assert!(alone.contains("no token shards to evaluate on, such as val.bin"), "{alone}");
        write("web_val_000000.bin", 12..15);
        let many = Dataset::from_folder(root.path(), None, None).unwrap();
        assert_eq!((many.train().len(), many.validation().len(), many.vocabulary()), (12, 3, 15));
        for start in 0..12 {
            for count in 0..=12 - start {
                let mut ids = Vec::new();
                many.train().copy_to(start, count, &mut ids).unwrap();
                assert_eq!(ids, (start as u32..(start + count) as u32).collect::<Vec<_>>());
            }
        }
        let whole = tempfile::tempdir().unwrap();
        for (name, ids) in [(TRAIN, 0..12), (VALIDATION, 12..15_u16)] {
            let bytes: Vec<u8> = ids.flat_map(u16::to_le_bytes).collect();
            fs::write(whole.path().join(name), bytes).unwrap();
        }
        let whole = Dataset::from_folder(whole.path(), None, None).unwrap();
        assert_eq!(whole.fingerprint(), many.fingerprint());
    }

    #[test]
    fn foreign_shards_are_read_whole_once() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(TRAIN), [1, 0, 2, 0, 3, 0]).unwrap();
        fs::write(root.path().join(VALIDATION), [4, 0]).unwrap();
        let open = |scan: Option<Scan>| {
            let mut read = Vec::new();
            let progress = &mut |done, all| {
                read.push([done, all]);
                Ok(())
            };
            let opening = Opening { scan, progress: Some(progress), ..Opening::default() };
            let source = Source { path: Some(root.path().into()), kind: None, validation: 0.1 };
            let dataset = Dataset::open_scanned(source, opening).unwrap();
            (dataset, read)
        };
        let (first, read) = open(None);
        assert_eq!(read, [[3, 4], [4, 4]]);
        let json = serde_json::to_string(first.scan().unwrap()).unwrap();
        let scan = || Some(serde_json::from_str(&json).unwrap());
        let (again, read) = open(scan());
        assert_eq!(
            (again.fingerprint(), again.vocabulary(), read.len()),
            (first.fingerprint(), 5, 0)
        );
        fs::write(root.path().join(TRAIN), [1, 0, 2, 0, 3, 0, 9, 0]).unwrap();
        let (changed, read) = open(scan());
        assert_eq!((changed.vocabulary(), read.len()), (10, 2));
        // What changes afterwards is found when it is read.
        fs::write(root.path().join(TRAIN), [1, 0, 2, 0, 3, 0, 99, 0]).unwrap();
        let mut ids = Vec::new();
        let late = changed.train().copy_to(2, 2, &mut ids).unwrap_err().to_string();
        assert!(late.contains("train.bin: token 99 at position 3"), "{late}");
        fs::write(root.path().join(TRAIN), [1, 0]).unwrap();
        assert!(changed.train().copy_to(2, 2, &mut ids).is_err());
    }

    #[test]
    fn every_token_counts_in_the_fingerprint() {
        let of = |text: &str| {
            Dataset::from_corpus(&corpus(text), Tokenizer::Byte, 0.5).unwrap().fingerprint()
        };
        assert_eq!(of("abcdef"), of("abcdef"));
        for other in ["abcdeg", "bbcdef", "abcde", "abdcef"] {
            assert_ne!(of("abcdef"), of(other), "{other}");
        }
        let split = |share| {
            Dataset::from_corpus(&corpus("aaaaaaaa"), Tokenizer::Byte, share).unwrap().fingerprint()
        };
        assert_ne!(split(0.5), split(0.25));
    }

    #[test]
    fn an_unknown_character_is_found_in_either_part() {
        let tokenizer = Tokenizer::for_text(TokenizerKind::Character, "ab").unwrap();
        let message =
            Dataset::from_corpus(&corpus("abababababX"), tokenizer, 0.5).unwrap_err().to_string();
        assert!(message.starts_with("corpus: the character 'X' (U+0058) at byte 10"), "{message}");
    }
}
