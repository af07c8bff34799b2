//! The two token sequences of a run: one to train on, one held out.
//!
//! Invariant: every id is below the vocabulary, and equal fingerprints mean equal tokens under the
//! same tokenizer. Deliberately absent: which part a step sees ([`Dataset::batch`],
//! [`Dataset::evaluation_windows`]).

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use blake3::Hash;

use super::{Corpus, Tokenizer, TokenizerKind, Tokens, shard};
use crate::Error;

pub(super) const TRAIN: &str = "train.bin";
pub(super) const VALIDATION: &str = "val.bin";
pub(super) const TOKENIZER: &str = "tokenizer.json";

/// Token ids for training and for validation, and what they mean.
#[derive(Debug, Clone)]
pub struct Dataset {
    train: Tokens,
    validation: Tokens,
    vocabulary: u32,
    tokenizer: Option<Tokenizer>,
    fingerprint: Hash,
    source: PathBuf,
}

impl Dataset {
    /// Opens the data of a run: without a path the embedded corpus, a folder with a
    /// `train.bin` is [`Dataset::from_folder`], anything else is a corpus. Without a kind, a corpus
    /// is read as bytes.
    ///
    /// # Errors
    /// Like [`Corpus::open`], [`Dataset::from_corpus`] and [`Dataset::from_folder`].
    pub fn open(
        path: Option<&Path>,
        kind: Option<TokenizerKind>,
        validation: f64,
    ) -> Result<Self, Error> {
        let corpus = match path {
            None => Corpus::embedded(),
            Some(folder) if folder.join(TRAIN).exists() => {
                return Self::from_folder(folder, kind, None);
            }
            Some(path) => Corpus::open(path)?,
        };
        let tokenizer = Tokenizer::for_text(kind.unwrap_or(TokenizerKind::Byte), corpus.text())?;
        Self::from_corpus(&corpus, tokenizer, validation)
    }

    /// Like [`Dataset::open`], with a tokenizer at hand instead of a kind: how a run sees other
    /// data.
    ///
    /// # Errors
    /// Like [`Dataset::open`]; [`Error::File`] for a folder that another tokenizer prepared.
    pub fn open_with(path: &Path, tokenizer: Tokenizer, validation: f64) -> Result<Self, Error> {
        if !path.join(TRAIN).exists() {
            return Self::from_corpus(&Corpus::open(path)?, tokenizer, validation);
        }
        let read = Self::from_folder(path, None, Some(tokenizer.vocabulary()))?;
        match &read.tokenizer {
            None => {
                Ok(Self::new(read.train, read.validation, read.vocabulary, Some(tokenizer), path))
            }
            Some(found) if *found == tokenizer => Ok(read),
            Some(_) => {
                Err(Error::file(path, "was prepared with another tokenizer than the one to use"))
            }
        }
    }

    /// The tokens of a corpus; the two parts of [`Corpus::split`] are encoded apart.
    ///
    /// # Errors
    /// Like [`Corpus::split`]; [`Error::File`] for a text that the tokenizer cannot encode.
    pub fn from_corpus(
        corpus: &Corpus,
        tokenizer: Tokenizer,
        validation: f64,
    ) -> Result<Self, Error> {
        Self::encoded(corpus, tokenizer, validation, &AtomicBool::new(false))
    }

    /// Like [`Dataset::from_corpus`], until the flag is set.
    pub(super) fn encoded(
        corpus: &Corpus,
        tokenizer: Tokenizer,
        validation: f64,
        interrupt: &AtomicBool,
    ) -> Result<Self, Error> {
        let [head, tail] = corpus.split(validation)?;
        let vocabulary = tokenizer.vocabulary();
        let encode = |text: &str, before: usize| {
            let mut tokens = Tokens::for_vocabulary(vocabulary);
            match tokenizer.encode_into(text, &mut tokens, interrupt) {
                Ok(()) => Ok(tokens),
                Err(Error::Interrupted) => Err(Error::Interrupted),
                Err(e) => Err(Error::file(corpus.source(), e.moved(before).to_string())),
            }
        };
        let (train, validation) = (encode(head, 0)?, encode(tail, head.len())?);
        Ok(Self::new(train, validation, vocabulary, Some(tokenizer), corpus.source()))
    }

    /// A prepared folder (`train.bin`, `val.bin`, `tokenizer.json`), or one of foreign shards
    /// (nanoGPT's or llm.c's, no `tokenizer.json`).
    ///
    /// Foreign shards have no tokenizer: `kind` byte or gpt2 chooses one; otherwise there is none,
    /// and the vocabulary is the one given, or the largest id plus one.
    ///
    /// # Errors
    /// Like [`shard::read`]; [`Error::File`] for shards of another tokenizer than the folder's, and
    /// for another vocabulary than the one given; [`Error::Setting`] for a kind that contradicts
    /// the folder.
    pub fn from_folder(
        folder: &Path,
        kind: Option<TokenizerKind>,
        vocabulary: Option<u32>,
    ) -> Result<Self, Error> {
        let [train, validation] = [TRAIN, VALIDATION].map(|name| folder.join(name));
        let described = folder.join(TOKENIZER);
        let foreign = !described.exists();
        let tokenizer = match kind {
            _ if !foreign => Some(Tokenizer::load(&described)?),
            Some(kind @ (TokenizerKind::Byte | TokenizerKind::Gpt2)) => {
                Some(Tokenizer::for_text(kind, "")?)
            }
            Some(TokenizerKind::Character) | None => None,
        };
        if let (Some(asked), Some(found)) = (kind, tokenizer.as_ref().map(Tokenizer::kind))
            && asked != found
        {
            let (asked, found) = (asked.name(), found.name());
            let problem = format!(
                "`{asked}` is asked for, but {} was prepared with `{found}`: set \
                    data.tokenizer={found}",
                folder.display()
            );
            return Err(Error::setting("data.tokenizer", problem));
        }
        let known = tokenizer.as_ref().map(Tokenizer::vocabulary);
        if let (Some(asked), Some(known)) = (vocabulary, known)
            && asked != known
        {
            return Err(Error::file(
                folder,
                format!("has a tokenizer of {known} tokens, expected one of {asked}"),
            ));
        }
        let read = |path: &Path| {
            let shard = shard::read(path, known.or(vocabulary))
                .map_err(|e| e.expecting("token shards for training and validation"))?;
            match (&shard.origin, &tokenizer) {
                (None, _) if foreign => Ok(shard),
                (None, _) => Err(Error::file(
                    path,
                    format!("not a token shard of sparse24, despite the {TOKENIZER} beside it"),
                )),
                (Some(_), _) if foreign => Err(Error::file(
                    path,
                    format!("needs the {TOKENIZER} that was prepared with it"),
                )),
                (Some(origin), Some(tokenizer)) if origin.tokenizer == tokenizer.fingerprint() => {
                    Ok(shard)
                }
                (Some(_), _) => Err(Error::file(
                    path,
                    format!("was not encoded with the tokenizer of the {TOKENIZER} beside it"),
                )),
            }
        };
        let (train, validation) = (read(&train)?.tokens, read(&validation)?.tokens);
        let largest = train.largest().max(validation.largest());
        let Some(vocabulary) =
            known.or(vocabulary).or(largest.map_or(Some(0), |id| id.checked_add(1)))
        else {
            return Err(Error::file(
                folder,
                format!(
                    "holds the token {}, which no vocabulary has; not a folder of token shards",
                    u32::MAX
                ),
            ));
        };
        Ok(Self::new(train, validation, vocabulary, tokenizer, folder))
    }

    fn new(
        train: Tokens,
        validation: Tokens,
        vocabulary: u32,
        tokenizer: Option<Tokenizer>,
        source: &Path,
    ) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&vocabulary.to_le_bytes());
        hasher
            .update(tokenizer.as_ref().map_or([0; 32], |t| *t.fingerprint().as_bytes()).as_slice());
        for tokens in [&train, &validation] {
            hasher.update(&(tokens.len() as u64).to_le_bytes());
            let Ok(()) = tokens.for_each_piece(4, |ids| {
                hasher.update(ids);
                Ok::<_, Infallible>(())
            });
        }
        Self {
            train,
            validation,
            vocabulary,
            tokenizer,
            fingerprint: hasher.finalize(),
            source: source.to_owned(),
        }
    }

    /// Tokens of the training split.
    #[must_use]
    pub fn train(&self) -> &Tokens {
        &self.train
    }

    /// Tokens of the validation split.
    #[must_use]
    pub fn validation(&self) -> &Tokens {
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

    /// BLAKE3 of, little endian: vocabulary (u32), fingerprint of the tokenizer (32 zero bytes
    /// without one), and for each part its length (u64) and ids (u32 each). Where the tokens came
    /// from and how wide they were stored does not matter.
    #[must_use]
    pub fn fingerprint(&self) -> Hash {
        self.fingerprint
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
    pub fn check_context(&self, context: usize) -> Result<(), Error> {
        let (train, needed) = (self.train.len(), context.saturating_add(1));
        if train < needed {
            let problem = format!(
                "has {train} tokens to train on; a context of {context} needs at least {needed}"
            );
            return Err(Error::file(&self.source, problem));
        }
        self.check_held_out()
    }

    /// Refuses a dataset whose validation split has fewer than 2 tokens.
    ///
    /// # Errors
    /// [`Error::File`] with the number of its tokens.
    pub fn check_held_out(&self) -> Result<(), Error> {
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
    use crate::data::prepare::tests::{corpus, prepared};

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

    #[test]
    fn other_data_under_the_tokenizer_of_a_run() {
        let root = tempfile::tempdir().unwrap();
        let [folder, text, foreign] =
            ["folder", "text", "foreign"].map(|name| root.path().join(name));
        let written = prepared(&folder, TokenizerKind::Character).unwrap();
        let tokenizer = written.tokenizer().unwrap();
        let open =
            |path: &Path, tokenizer: &Tokenizer| Dataset::open_with(path, tokenizer.clone(), 0.1);
        assert_eq!(open(&folder, tokenizer).unwrap().fingerprint(), written.fingerprint());
        let refusal =
            |path: &Path, tokenizer: &Tokenizer| open(path, tokenizer).unwrap_err().to_string();
        assert!(refusal(&folder, &Tokenizer::Byte).contains("expected one of 256"));
        let other = Tokenizer::Character(
            (32..32 + tokenizer.vocabulary()).filter_map(char::from_u32).collect(),
        );
        assert!(refusal(&folder, &other).contains("prepared with another tokenizer"));
        fs::write(&text, "not to be".repeat(9)).unwrap();
        assert_eq!(open(&text, tokenizer).unwrap().vocabulary(), tokenizer.vocabulary());
        fs::write(&text, "¿ser?".repeat(9)).unwrap();
        assert!(refusal(&text, tokenizer).contains("text: the character '¿'"));
        fs::create_dir(&foreign).unwrap();
        fs::write(foreign.join(TRAIN), [1, 0, 2, 0]).unwrap();
        fs::write(foreign.join(VALIDATION), [3, 0]).unwrap();
        assert_eq!(open(&foreign, tokenizer).unwrap().tokenizer(), Some(tokenizer));
        fs::write(foreign.join(VALIDATION), [99, 0]).unwrap();
        assert!(refusal(&foreign, tokenizer).contains("val.bin: token 99"));
    }

    #[test]
    fn foreign_folders() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(TRAIN), [1, 0, 200, 0, 3, 0]).unwrap();
        fs::write(root.path().join(VALIDATION), [255, 0]).unwrap();
        let open = |kind, vocabulary| Dataset::from_folder(root.path(), kind, vocabulary);
        let inferred = open(None, None).unwrap();
        assert_eq!((inferred.vocabulary(), inferred.tokenizer()), (256, None));
        assert_eq!(open(None, Some(300)).unwrap().vocabulary(), 300);
        let known = open(Some(TokenizerKind::Byte), None).unwrap();
        assert_eq!(known.tokenizer(), Some(&Tokenizer::Byte));
        assert_ne!(known.fingerprint(), inferred.fingerprint());
        assert!(
            open(None, Some(200))
                .unwrap_err()
                .to_string()
                .contains("train.bin: token 200 at position 1")
        );
        assert!(
            open(Some(TokenizerKind::Byte), Some(300))
                .unwrap_err()
                .to_string()
                .contains("expected one of 300")
        );
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
    fn a_short_dataset_is_refused_with_both_numbers() {
        let dataset = Dataset::from_corpus(&corpus("0123456789"), Tokenizer::Byte, 0.2).unwrap();
        dataset.check_context(7).unwrap();
        let message = dataset.check_context(8).unwrap_err().to_string();
        assert!(
            message.contains("corpus: has 8 tokens") && message.contains("at least 9"),
            "{message}"
        );
        assert!(dataset.check_context(usize::MAX).is_err());
        let dataset = Dataset::from_corpus(&corpus("0123456789"), Tokenizer::Byte, 0.1).unwrap();
        assert!(
            dataset
                .check_context(4)
                .unwrap_err()
                .to_string()
                .contains("has 1 tokens in its validation")
        );
        assert!(
            dataset
                .check_held_out()
                .unwrap_err()
                .to_string()
                .contains("has 1 tokens in its validation")
        );
    }

    #[test]
    fn an_unknown_character_is_found_in_either_part() {
        let tokenizer = Tokenizer::for_text(TokenizerKind::Character, "ab").unwrap();
        let message =
            Dataset::from_corpus(&corpus("abababababX"), tokenizer, 0.5).unwrap_err().to_string();
        assert!(message.starts_with("corpus: the character 'X' (U+0058) at byte 10"), "{message}");
    }
}
