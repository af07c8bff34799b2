//! A folder of token shards: which files it has, and whether they agree with one another.

use std::{
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use blake3::Hash;
use serde::{Deserialize, Serialize};

use super::{
    Split, Tokenizer, TokenizerKind,
    fingerprint::{Progress, content, prepared},
    shard::Shard,
};
use crate::{Error, Result, checkpoint::Fingerprint, disk};

pub(super) const TRAIN: &str = "train.bin";
pub(super) const VALIDATION: &str = "val.bin";
pub(super) const TOKENIZER: &str = "tokenizer.json";

/// Prepared shards of at most this many bytes are verified at every start.
const VERIFIED: u64 = 64 << 20;

/// The contents of a folder of shards.
pub(super) struct Folder {
    pub(super) splits: [Split; 2],
    pub(super) vocabulary: u32,
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) fingerprint: Hash,
    /// Only foreign shards have one.
    pub(super) scan: Option<Scan>,
}

/// The result of reading foreign shards whole, which a later start need not repeat: they have no
/// checksum, and often no vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scan {
    /// Name, size in bytes, and time of the last change in nanoseconds since 1970, of each file.
    files: Vec<(String, u64, u64)>,
    /// [`Tokenizer::fingerprint`].
    tokenizer: Option<Fingerprint>,
    vocabulary: u32,
    fingerprint: Fingerprint,
}

/// How to open text and foreign shards.
#[derive(Default)]
pub struct Opening<'a> {
    /// Reads text, instead of one for the text.
    pub tokenizer: Option<Tokenizer>,
    /// The result of an earlier start; ignored if the files have changed.
    pub scan: Option<Scan>,
    /// Called with tokens read and tokens in all, while foreign shards are read whole; an error
    /// ends that.
    pub progress: Option<Progress<'a>>,
}

/// The token files of a folder, by split and in the order of their numbers: those ending in `.bin`
/// with `train`, or `val`, as a word of their names, such as `train.bin` and
/// `fineweb_val_000000.bin`. None without files to train on, or without a folder.
///
/// # Errors
/// [`Error::File`] for a name with both words; [`Error::Io`] if the folder cannot be listed.
fn shard_files(folder: &Path) -> Result<Option<[Vec<PathBuf>; 2]>> {
    if !folder.is_dir() {
        return Ok(None);
    }
    let failed = |e| Error::io("list", folder, e);
    let mut splits = [Vec::new(), Vec::new()];
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else { continue };
        let Some(stem) = name.strip_suffix(".bin") else { continue };
        let unnumbered = stem.trim_end_matches(|c: char| c.is_ascii_digit());
        let number: u64 = stem[unnumbered.len()..].parse().unwrap_or(0);
        let words = || unnumbered.split(|c: char| !c.is_ascii_alphabetic());
        let [train, val] = ["train", "val"].map(|split| words().any(|word| word == split));
        if train && val {
            bail!(
                folder.join(name),
                "is called both train and val, so it could be in either split"
            );
        }
        if train || val {
            splits[usize::from(val)].push((unnumbered.to_owned(), number, folder.join(name)));
        }
    }
    splits.iter_mut().for_each(|files| files.sort());
    let splits = splits.map(|files| files.into_iter().map(|(.., path)| path).collect::<Vec<_>>());
    Ok((!splits[0].is_empty()).then_some(splits))
}

/// Whether a path is a folder of token shards.
#[must_use]
pub fn is_shards(path: &Path) -> bool {
    // Names that contradict themselves are an error of the folder, not a text.
    shard_files(path).map_or_else(|e| matches!(e, Error::File { .. }), |found| found.is_some())
}

/// The kind of the tokenizer that prepared a folder of shards.
#[must_use]
pub fn tokenizer_of(folder: &Path) -> Option<TokenizerKind> {
    let tokenizer = is_shards(folder).then(|| Tokenizer::load(&folder.join(TOKENIZER)).ok())??;
    Some(tokenizer.kind())
}

impl Folder {
    /// Opens a folder; see [`Dataset::from_folder`](super::Dataset::from_folder).
    pub(super) fn open(
        folder: &Path,
        kind: Option<TokenizerKind>,
        vocabulary: Option<u32>,
        opening: Opening<'_>,
    ) -> Result<Self> {
        let paths = shard_files(folder)?.unwrap_or_default();
        for (paths, (name, aim)) in
            paths.iter().zip([(TRAIN, "train on"), (VALIDATION, "evaluate on")])
        {
            if paths.is_empty() {
                bail!(folder, "holds no token shards to {aim}, such as {name}");
            }
        }
        let described = folder.join(TOKENIZER);
        let is_foreign = !disk::is_file(&described)?;
        let tokenizer = match kind {
            _ if !is_foreign => Some(Tokenizer::load(&described)?),
            Some(kind @ (TokenizerKind::Byte | TokenizerKind::Gpt2)) => {
                Some(Tokenizer::for_text(kind, "")?)
            }
            Some(_) | None => None,
        };
        if let (Some(asked), Some(found)) = (kind, tokenizer.as_ref().map(Tokenizer::kind))
            && asked != found
        {
            let (asked, found) = (asked.name(), found.name());
            bail!(
                setting = "data.tokenizer",
                "`{asked}` is asked for, but {} was prepared with `{found}`: set \
                    data.tokenizer={found}",
                folder.display()
            );
        }
        let known = tokenizer.as_ref().map(Tokenizer::vocabulary);
        if let (Some(asked), Some(known)) = (vocabulary, known)
            && asked != known
        {
            bail!(folder, "has a tokenizer of {known} tokens, expected one of {asked}");
        }
        let open = |paths: Vec<PathBuf>| {
            let split = Split::open(&paths, known.or(vocabulary))?;
            for shard in split.shards() {
                let problem = match (shard.origin(), &tokenizer) {
                    (None, _) if is_foreign => continue,
                    (Some(origin), Some(own)) if origin.tokenizer == own.fingerprint() => continue,
                    (None, _) => {
                        format!("not a token shard of sparse24, despite the {TOKENIZER} beside it")
                    }
                    (Some(_), _) if is_foreign => {
                        format!("needs the {TOKENIZER} that was prepared with it")
                    }
                    (Some(_), _) => {
                        format!("was not encoded with the tokenizer of the {TOKENIZER} beside it")
                    }
                };
                return Err(Error::file(shard.path(), problem));
            }
            Ok(split)
        };
        let [train, validation] = paths;
        let splits = [open(train)?, open(validation)?];
        if let Some(vocabulary) = known.filter(|_| !is_foreign) {
            let mut small = splits.iter().flat_map(Split::shards);
            small.try_for_each(
                |shard| if shard.bytes() <= VERIFIED { shard.verify() } else { Ok(()) },
            )?;
            let fingerprint = prepared(vocabulary, tokenizer.as_ref(), &splits);
            return Ok(Self { splits, vocabulary, tokenizer, fingerprint, scan: None });
        }
        let scan = Scan::of(folder, splits, tokenizer.as_ref(), known.or(vocabulary), opening)?;
        let (mut splits, scan) = scan;
        splits.iter_mut().for_each(|split| split.limit(scan.vocabulary));
        let (vocabulary, fingerprint) = (scan.vocabulary, scan.hash());
        Ok(Self { splits, vocabulary, tokenizer, fingerprint, scan: Some(scan) })
    }
}

impl Scan {
    /// Reads all ids, unless an earlier scan is of the same files and tokenizer.
    fn of(
        folder: &Path,
        splits: [Split; 2],
        tokenizer: Option<&Tokenizer>,
        vocabulary: Option<u32>,
        Opening { scan: earlier, progress, .. }: Opening<'_>,
    ) -> Result<([Split; 2], Self)> {
        let described = |shard: &Shard| {
            let path = shard.path();
            let about = fs::metadata(path).map_err(|e| Error::io("read", path, e))?;
            let changed = about.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok((name, about.len(), changed.map_or(0, |since| since.as_nanos() as u64)))
        };
        let files = splits.iter().flat_map(Split::shards).map(described);
        let files = files.collect::<Result<Vec<_>>>()?;
        let of_tokenizer = tokenizer.map(|tokenizer| tokenizer.fingerprint().into());
        let is_same = |scan: &Self| {
            scan.files == files
                && scan.tokenizer == of_tokenizer
                && vocabulary.is_none_or(|vocabulary| vocabulary == scan.vocabulary)
        };
        if let Some(scan) = earlier.filter(is_same) {
            return Ok((splits, scan));
        }
        let vocabulary = match vocabulary {
            Some(vocabulary) => vocabulary,
            None => {
                let mut largest = None;
                for split in &splits {
                    split.for_each_piece(|ids| {
                        largest = largest.max(ids.iter().max().copied());
                        Ok(())
                    })?;
                }
                let beyond = || {
                    let problem = format!(
                        "holds the token {}, which no vocabulary has; not a folder of token shards",
                        u32::MAX
                    );
                    Error::file(folder, problem)
                };
                largest.map_or(Some(0), |id: u32| id.checked_add(1)).ok_or_else(beyond)?
            }
        };
        let hash = content(vocabulary, tokenizer, &splits, progress)?;
        let scan = Self { files, tokenizer: of_tokenizer, vocabulary, fingerprint: hash.into() };
        Ok((splits, scan))
    }

    fn hash(&self) -> Hash {
        self.fingerprint.into()
    }
}
