//! Pairs of sentences: a line of one file, and the same line of another.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use blake3::Hash;
use rayon::prelude::*;

use super::epoch::Epoch;
use crate::{
    Error, Result,
    data::{END, Tokenizer, TokenizerKind},
    disk,
};

/// Names of the training files, before the language.
const TRAIN: [&str; 1] = ["train"];
/// Names of the validation files.
const VALIDATION: [&str; 3] = ["valid", "val", "dev"];

/// The largest file.
const MOST: u64 = 1 << 32;

/// The pairs that a configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairSource {
    /// The folder with `train.SOURCE`, `train.TARGET`, and `valid.` or `val.` or `dev.` likewise.
    pub folder: PathBuf,
    /// The languages, as the files end: that of the sources and that of the targets.
    pub languages: [String; 2],
    /// How text becomes tokens.
    pub kind: TokenizerKind,
    /// The most tokens of a vocabulary that is trained on both languages.
    pub vocabulary: u32,
    /// The most tokens of a sentence with its end; longer pairs are left out.
    pub longest: usize,
}

/// The pairs of a split, as tokens; every sentence ends with [`END`].
#[derive(Debug, Default)]
pub struct PairSplit {
    tokens: Vec<u32>,
    /// Where the source and the target of each pair end.
    ends: Vec<[usize; 2]>,
    /// The line of each pair in its files, from 0.
    lines: Vec<u32>,
    /// Pairs that were too long.
    pub left_out: usize,
}

impl PairSplit {
    /// Number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no pair.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Source and target of a pair.
    ///
    /// # Panics
    /// Unless the number is below [`Self::len`].
    #[must_use]
    pub fn pair(&self, number: usize) -> [&[u32]; 2] {
        let start = number.checked_sub(1).map_or(0, |before| self.ends[before][1]);
        let [middle, end] = self.ends[number];
        [&self.tokens[start..middle], &self.tokens[middle..end]]
    }

    /// Tokens of the longer sentence of a pair.
    pub(super) fn length(&self, number: usize) -> usize {
        self.pair(number).map(<[u32]>::len).into_iter().fold(0, usize::max)
    }

    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).map(|number| self.length(number))
    }

    /// Tokens of the longest sentence.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.lengths().max().unwrap_or(0)
    }

    /// Tokens of both languages.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// Tokens of all targets.
    pub(super) fn target_tokens(&self) -> usize {
        self.ends.iter().map(|[middle, end]| end - middle).sum()
    }

    fn encode(files: &[Lines; 2], tokenizer: &Tokenizer, longest: usize) -> Result<Self> {
        let encoded = |of: &Lines| -> Result<Vec<Vec<u32>>> {
            let lines: Vec<_> = of.text.lines().zip(1..).collect();
            lines
                .into_par_iter()
                .map(|(line, number)| {
                    let ids = tokenizer.encode(line.trim());
                    let mut ids = ids.map_err(|e| of.refuse(number, &e.to_string()))?;
                    ids.push(END);
                    Ok(ids)
                })
                .collect()
        };
        let (sources, targets) = (encoded(&files[0])?, encoded(&files[1])?);
        let mut split = Self::default();
        for (line, (source, target)) in (0..).zip(sources.into_iter().zip(targets)) {
            if source.len().max(target.len()) > longest {
                split.left_out += 1;
                continue;
            }
            split.tokens.extend(source);
            let middle = split.tokens.len();
            split.tokens.extend(target);
            split.ends.push([middle, split.tokens.len()]);
            split.lines.push(line);
        }
        if split.is_empty() {
            bail!(
                &files[0].path,
                "holds no pair of sentences of at most {longest} tokens; raise \
                    model.sequence_length"
            );
        }
        Ok(split)
    }
}

/// The pairs of a run.
#[derive(Debug)]
pub struct Pairs {
    /// Where they came from.
    pub source: PairSource,
    /// The training split; empty if it was not read.
    pub train: PairSplit,
    /// The validation split.
    pub validation: PairSplit,
    /// The targets of the validation split as words, also those that the vocabulary lacks.
    pub references: Vec<String>,
    tokenizer: Tokenizer,
    fingerprint: Hash,
    /// The batches of the epoch that was asked for last.
    pub(super) epoch: Mutex<Option<Arc<Epoch>>>,
}

impl Pairs {
    /// Reads the files of a folder. Without a tokenizer, its vocabulary is trained on the lines of
    /// both training files, or is the folder's dictionary.
    ///
    /// # Errors
    /// [`Error::File`] naming the line for files that are not pairs of sentences;
    /// [`Error::Setting`] for languages and a tokenizer that are not the folder's; [`Error::Io`].
    pub fn open(source: PairSource, tokenizer: Option<Tokenizer>) -> Result<Self> {
        let train = source.files(&TRAIN, "training")?;
        let validation = source.files(&VALIDATION, "validation")?;
        let tokenizer = match tokenizer {
            Some(tokenizer) => source.check_dictionary(&tokenizer).map(|()| tokenizer)?,
            None => source.tokenizer(&train)?,
        };
        let train = PairSplit::encode(&train, &tokenizer, source.longest)?;
        Self::of(source, train, &validation, tokenizer)
    }

    /// Reads the validation files alone.
    ///
    /// # Errors
    /// Errors of [`Self::open`].
    pub fn open_validation(source: PairSource, tokenizer: &Tokenizer) -> Result<Self> {
        let validation = source.files(&VALIDATION, "validation")?;
        source.check_dictionary(tokenizer)?;
        Self::of(source, PairSplit::default(), &validation, tokenizer.clone())
    }

    fn of(
        source: PairSource,
        train: PairSplit,
        validation: &[Lines; 2],
        tokenizer: Tokenizer,
    ) -> Result<Self> {
        let texts: Vec<&str> = validation[1].text.lines().collect();
        let validation = PairSplit::encode(validation, &tokenizer, source.longest)?;
        let text = |&line: &u32| words(&tokenizer, texts[line as usize].trim());
        let references = validation.lines.iter().map(text).collect();
        let splits = [train, validation];
        let fingerprint = fingerprint(&tokenizer, &splits);
        let ([train, validation], epoch) = (splits, Mutex::default());
        Ok(Self { source, train, validation, references, tokenizer, fingerprint, epoch })
    }

    /// The tokenizer of both languages.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// BLAKE3 of, little endian: `sparse24 pairs`, the tokenizer's fingerprint, and for each split
    /// the number of pairs (u64), and of each the number of tokens of source and target (u64 each)
    /// and these tokens (u32 each).
    #[must_use]
    pub fn fingerprint(&self) -> Hash {
        self.fingerprint
    }
}

/// A line with the `@@` pieces of a dictionary joined into words.
#[must_use]
pub fn words(tokenizer: &Tokenizer, line: &str) -> String {
    match tokenizer.kind() {
        TokenizerKind::Dictionary => line.strip_suffix("@@").unwrap_or(line).replace("@@ ", ""),
        _ => line.to_owned(),
    }
}

fn fingerprint(tokenizer: &Tokenizer, splits: &[PairSplit; 2]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"sparse24 pairs").update(tokenizer.fingerprint().as_bytes());
    let mut bytes = Vec::new();
    for split in splits {
        hasher.update(&(split.len() as u64).to_le_bytes());
        for number in 0..split.len() {
            bytes.clear();
            let pair = split.pair(number);
            pair.iter().for_each(|ids| bytes.extend((ids.len() as u64).to_le_bytes()));
            pair.iter().flat_map(|ids| *ids).for_each(|id| bytes.extend(id.to_le_bytes()));
            hasher.update(&bytes);
        }
    }
    hasher.finalize()
}

/// The sentences of a file.
struct Lines {
    path: PathBuf,
    text: String,
}

impl Lines {
    fn read(path: PathBuf) -> Result<Self> {
        let mut bytes = disk::read_small(&path, MOST)?;
        if bytes.starts_with(b"\xef\xbb\xbf") {
            bytes.drain(..3);
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + valid.iter().filter(|&&byte| byte == b'\n').count();
            Error::file(&path, format!("line {line}: is not UTF-8"))
        })?;
        let lines = Self { path, text };
        match lines.text.lines().position(|line| line.trim().is_empty()) {
            Some(at) => Err(lines.refuse(
                at + 1,
                "is empty, expected a sentence; remove the line from the files of both languages",
            )),
            None => Ok(lines),
        }
    }

    fn refuse(&self, line: usize, problem: &str) -> Error {
        Error::file(&self.path, format!("line {line}: {problem}"))
    }
}

impl PairSource {
    /// The files of a split in both languages, which have as many lines.
    fn files(&self, names: &[&str], split: &str) -> Result<[Lines; 2]> {
        let Self { folder, languages, .. } = self;
        if !disk::is_folder(folder)? {
            bail!(
                folder,
                "is not a folder; expected one with sentence pairs, such as train.en and \
                train.de"
            );
        }
        let paths = |name: &&str| {
            let files = languages.each_ref().map(|language| format!("{name}.{language}"));
            files.map(|file| folder.join(file))
        };
        let found = disk::first(names.iter().map(paths), |[source, target]| {
            Ok(disk::is_file(source)? && disk::is_file(target)?)
        })?;
        let Some([source, target]) = found else {
            let [from, to] = languages;
            let expected: Vec<_> =
                names.iter().map(|name| format!("{name}.{from} and {name}.{to}")).collect();
            let expected = expected.join(", or ");
            let there = found_languages(folder, names);
            let advice = if there.is_empty() {
                String::new()
            } else {
                let there = there.join(", ");
                format!("; it holds {there}: set data.source and data.target")
            };
            bail!(folder, "holds no {split} pairs: expected {expected}{advice}");
        };
        let files = [Lines::read(source)?, Lines::read(target)?];
        let [from, to] = files.each_ref().map(|file| file.text.lines().count());
        if from == 0 && to == 0 {
            bail!(&files[0].path, "holds no sentences");
        }
        if from != to {
            let other = files[0].path.display();
            bail!(&files[1].path, "has {to} lines, but {other} {from}; expected a line for each");
        }
        Ok(files)
    }

    /// The dictionaries of both languages, as far as the folder has them.
    fn dictionaries(&self) -> Result<[Option<PathBuf>; 2]> {
        let [source, target] = self.languages.each_ref().map(|language| {
            let path = self.folder.join(format!("dict.{language}.txt"));
            disk::is_file(&path).map(|is_file| is_file.then_some(path))
        });
        Ok([source?, target?])
    }

    /// Refuses data of another dictionary than that of a model: their pieces would be unknown.
    #[cfg_attr(not(feature = "tokenizers"), expect(unused_variables, reason = "no dictionaries"))]
    fn check_dictionary(&self, tokenizer: &Tokenizer) -> Result {
        #[cfg(feature = "tokenizers")]
        if let (Tokenizer::Dictionary(own), [Some(path), _] | [_, Some(path)]) =
            (tokenizer, self.dictionaries()?)
            && pieces(&path)? != own.pieces()
        {
            bail!(
                path,
                "is not the model's dictionary; split the sentences into the model's \
                pieces"
            );
        }
        Ok(())
    }

    /// A tokenizer for the training files.
    fn tokenizer(&self, files: &[Lines; 2]) -> Result<Tokenizer> {
        match (self.kind, self.dictionaries()?) {
            #[cfg(feature = "tokenizers")]
            (TokenizerKind::Bpe, [None, None]) => {
                let lines = files.iter().flat_map(|file| file.text.lines().map(str::trim));
                let lines: Vec<&str> = lines.collect();
                let size = match self.vocabulary {
                    0 => crate::data::DEFAULT_PIECES as u32,
                    size => size,
                };
                Ok(Tokenizer::Bpe(crate::data::Bpe::train(size, lines.into_iter())))
            }
            #[cfg(feature = "tokenizers")]
            (TokenizerKind::Dictionary, [Some(source), Some(target)]) => {
                let (dictionary, other) = (pieces(&source)?, pieces(&target)?);
                if dictionary != other {
                    bail!(
                        target,
                        "differs from {}; expected one dictionary of both languages (fairseq: \
                            --joined-dictionary)",
                        source.display()
                    );
                }
                let refuse = |problem: String| Error::file(source, problem);
                let dictionary = crate::data::Dictionary::try_from(dictionary).map_err(refuse)?;
                Ok(Tokenizer::Dictionary(dictionary))
            }
            (TokenizerKind::Dictionary, _) => {
                let [from, to] = &self.languages;
                let problem = format!("holds no dict.{from}.txt and dict.{to}.txt");
                Err(Error::file(&self.folder, problem))
            }
            #[cfg(not(feature = "tokenizers"))]
            (TokenizerKind::Bpe, [None, None]) => Tokenizer::for_text(self.kind, &files[0].text),
            (kind, [None, None]) => {
                let name = kind.name();
                let problem =
                    format!("expected \"bpe\" or \"dictionary\" for pairs, found {name:?}");
                Err(Error::setting("data.tokenizer", problem))
            }
            (kind, _) => {
                let problem = format!(
                    "holds a dictionary (dict.*.txt), so its sentences are pieces, not text for \
                        {}: set data.tokenizer=dictionary",
                    kind.name()
                );
                Err(Error::file(&self.folder, problem))
            }
        }
    }
}

/// The pieces of a fairseq dictionary: a piece and its count on each line.
#[cfg(feature = "tokenizers")]
fn pieces(path: &Path) -> Result<Vec<String>> {
    let lines = Lines::read(path.to_owned())?;
    let piece = |(line, number): (&str, usize)| {
        let piece = line.rsplit_once(' ').filter(|(_, count)| count.parse::<u64>().is_ok());
        let piece = piece.map(|(piece, _)| piece.to_owned());
        piece.ok_or_else(|| lines.refuse(number, "expected a piece, a space and its count"))
    };
    lines.text.lines().zip(1..).map(piece).collect()
}

/// The files of a split that a folder holds in any language.
fn found_languages(folder: &Path, names: &[&str]) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let file = |entry: fs::DirEntry| entry.file_name().into_string().ok();
    let is_one =
        |file: &String| names.iter().any(|name| file.strip_prefix(name).is_some_and(is_language));
    let mut found: Vec<String> = entries.filter_map(file).filter(is_one).collect();
    found.sort();
    found.truncate(6);
    found
}

fn is_language(rest: &str) -> bool {
    rest.strip_prefix('.').is_some_and(|language| !language.is_empty())
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::*;

    fn source(folder: &Path, kind: TokenizerKind) -> PairSource {
        let languages = ["en", "de"].map(str::to_owned);
        PairSource { folder: folder.to_owned(), languages, kind, vocabulary: 300, longest: 16 }
    }

    fn write(folder: &Path, files: &[(&str, &str)]) {
        files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }

    const GOOD: [(&str, &str); 4] = [
        ("train.en", "a dog\r\na dog and a cat\nthis sentence is much too long for the model\n"),
        ("train.de", "ein Hund\nein Hund und eine Katze\nzu lang\n"),
        ("val.en", "a cat\n"),
        ("val.de", "eine Katze\n"),
    ];

    #[test]
    fn lines_become_pairs_that_end() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &GOOD);
        let pairs = Pairs::open(source(folder.path(), TokenizerKind::Bpe), None).unwrap();
        let text = |ids: &[u32]| String::from_utf8(pairs.tokenizer().decode(ids).unwrap()).unwrap();
        assert_eq!((pairs.train.len(), pairs.train.left_out), (2, 1));
        let [source, target] = pairs.train.pair(1);
        assert_eq!([text(source), text(target)], ["a dog and a cat", "ein Hund und eine Katze"]);
        assert!([source, target].iter().all(|ids| ids.last() == Some(&END)));
        let again = Pairs::open(pairs.source.clone(), Some(pairs.tokenizer().clone())).unwrap();
        assert_eq!(again.fingerprint(), pairs.fingerprint());
        write(folder.path(), &[("val.de", "ein Hund\n")]);
        let other = Pairs::open(pairs.source.clone(), Some(pairs.tokenizer().clone())).unwrap();
        assert_ne!(other.fingerprint(), pairs.fingerprint());
    }

    #[test]
    fn a_dictionary_is_that_of_both_languages() {
        let folder = tempfile::tempdir().unwrap();
        let dictionary = "ein 5\nHun@@ 2\nd 2\na 1\n";
        write(
            folder.path(),
            &[
                ("train.en", "a d\n"),
                ("train.de", "ein Hun@@ d\n"),
                ("valid.en", "a cat\n"),
                ("valid.de", "ein d\n"),
                ("dict.en.txt", dictionary),
                ("dict.de.txt", dictionary),
            ],
        );
        let open = |kind| Pairs::open(source(folder.path(), kind), None);
        let pairs = open(TokenizerKind::Dictionary).unwrap();
        assert_eq!(pairs.train.pair(0), [&[7, 6, END][..], &[4, 5, 6, END]]);
        assert_eq!(pairs.validation.pair(0)[0], [7, 3, END]);
        let error = open(TokenizerKind::Bpe).unwrap_err().to_string();
        assert!(error.contains("set data.tokenizer=dictionary"), "{error}");
        for (text, expected) in [("ein 5\n", "differs from"), ("ein\n", "line 1: expected a piece")]
        {
            write(folder.path(), &[("dict.de.txt", text)]);
            let error = open(TokenizerKind::Dictionary).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("dict.de.txt"), "{error}");
        }
    }

    #[test]
    fn files_that_are_no_pairs_are_refused_by_line() {
        for (name, bytes, expected) in [
            ("train.de", &b"ein\n"[..], "train.de: has 1 lines, but"),
            ("train.en", b"a\n \nb\n", "train.en: line 2: is empty"),
            ("val.de", b"eine \xff\n", "val.de: line 1: is not UTF-8"),
            ("val.en", b"", "val.de: has 1 lines, but"),
            ("train.en train.de", b"", "train.en: holds no sentences"),
            ("val.en", b"this sentence is much too long for the model\n", "no pair of sentences"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &GOOD);
            name.split(' ').for_each(|name| fs::write(folder.path().join(name), bytes).unwrap());
            let opened = Pairs::open(source(folder.path(), TokenizerKind::Bpe), None);
            let error = opened.unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &GOOD);
        fs::rename(folder.path().join("train.de"), folder.path().join("train.fr")).unwrap();
        let opened = Pairs::open(source(folder.path(), TokenizerKind::Bpe), None);
        let error = opened.unwrap_err().to_string();
        assert!(error.contains("it holds train.en, train.fr: set data.source"), "{error}");
        let byte = Pairs::open(source(folder.path(), TokenizerKind::Byte), None);
        assert!(byte.unwrap_err().to_string().contains("holds no training pairs"));
    }
}
