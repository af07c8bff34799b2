//! Token shards: files of token ids, in our layout and two foreign ones.
//!
//! Ours, little endian: 128 bytes of header, then the ids without padding.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0..4 | magic `S24T` |
//! | 4..8 | version, u32: 1 |
//! | 8..12 | bytes per token, u32: 2 or 4 |
//! | 12..16 | vocabulary size, u32; every id is below it |
//! | 16..24 | token count, u64 |
//! | 24..56 | fingerprint of the tokenizer ([`super::Tokenizer::fingerprint`]) |
//! | 56..88 | BLAKE3 of the ids |
//! | 88..96 | zero |
//! | 96..128 | BLAKE3 of bytes 0..96 |
//!
//! Read only: nanoGPT's `.bin` (u16 ids and nothing else) and llm.c's (256 i32 of header: magic,
//! version, token count; then u16 ids for magic 20240520 version 1, u32 ids for magic 20240801
//! version 7).
//!
//! Invariant: a file is opened only if its size is the one that its header says, and every id that
//! is read is below the vocabulary. Files stay on disk: reading takes memory for what is read.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use blake3::{Hash, Hasher};

use super::Tokens;
use crate::{Error, Result, disk};

const MAGIC: [u8; 4] = *b"S24T";
const VERSION: u32 = 1;
const HEADER: usize = 128;
const CHECKED: usize = 96;

const LLM_C_HEADER: usize = 1024;
/// Magic, version and bytes per token of llm.c's layouts.
const LLM_C: [(u32, u32, usize); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];

/// Ids that are read or written at a time.
const PIECE: usize = 1 << 16;

/// An open shard.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    /// Bytes before the first id.
    header: usize,
    count: usize,
    width: usize,
    /// Every id must be below it, where it is known.
    vocabulary: Option<u32>,
    origin: Option<Origin>,
    /// BLAKE3 of the ids, from the header.
    ids_hash: Option<Hash>,
}

/// Origin of the ids of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Size of the vocabulary; every id is below it.
    pub vocabulary: u32,
    /// Fingerprint of the tokenizer.
    pub tokenizer: Hash,
}

/// Whether a file begins like a token shard of ours or of llm.c.
pub(super) fn is_shard(head: &[u8]) -> bool {
    let is_llm_c = |magic: &[u8; 4]| LLM_C.iter().any(|layout| layout.0.to_le_bytes() == *magic);
    head.first_chunk().is_some_and(|magic| *magic == MAGIC || is_llm_c(magic))
}

impl Shard {
    /// Opens a shard of any layout, recognized by its first bytes; a file without a magic is
    /// nanoGPT's. Only the header and the size are checked; see [`Shard::verify`].
    ///
    /// Ids are checked against the vocabulary in the header as they are read; in a foreign layout
    /// against `vocabulary`, if it is given.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::File`] for a size other than the header says, a damaged header, and
    /// one that contradicts `vocabulary`.
    pub fn open(path: &Path, vocabulary: Option<u32>) -> Result<Self> {
        let (mut file, size) = disk::open(path)?;
        let mut header = Vec::with_capacity(HEADER);
        (&mut file)
            .take(HEADER as u64)
            .read_to_end(&mut header)
            .map_err(|e| Error::io("read", path, e))?;
        let refuse = |problem: String| Err(Error::file(path, problem));
        let number = |at: usize| {
            let bytes = header.get(at..at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
        };
        let mut origin = None;
        let (length, count, width) = if header.starts_with(&MAGIC) {
            let (count, width, found) = own(path, &header, size, vocabulary)?;
            origin = Some(found);
            (HEADER, count, width)
        } else if let Some((magic, version, width)) =
            LLM_C.into_iter().find(|layout| number(0) == Some(layout.0))
        {
            let (found, count) = (number(4).unwrap_or(0), number(8).unwrap_or(0));
            if found != version {
                return refuse(format!(
                    "has llm.c's magic {magic}, so expected version {version}, found {found}"
                ));
            }
            (LLM_C_HEADER, u64::from(count), width)
        } else if header.len() == HEADER
            && checksum(&[&MAGIC, &header[4..CHECKED]]).as_bytes() == &header[CHECKED..]
        {
            return refuse(
                "the magic of this token shard is damaged, the rest of its header is intact"
                    .to_owned(),
            );
        } else if !size.is_multiple_of(2) {
            return refuse(format!(
                "holds {size} bytes without a known header; raw u16 tokens would take one byte \
                 less or more"
            ));
        } else {
            (0, size / 2, 2)
        };
        let expected = length as u128 + u128::from(count) * width as u128;
        let difference = match u128::from(size) {
            size if size < expected => format!("{} bytes are missing", expected - size),
            size if size > expected => format!("{} bytes too many", size - expected),
            _ => String::new(),
        };
        if !difference.is_empty() {
            return refuse(format!(
                "its header claims {count} tokens, {expected} bytes in all, but it holds \
                 {size}: {difference}"
            ));
        }
        let Ok(count) = usize::try_from(count) else {
            return refuse(format!("{count} tokens are more than this machine can address"));
        };
        let vocabulary = origin.map(|origin| origin.vocabulary).or(vocabulary);
        let ids_hash =
            origin.map(|_| Hash::from_bytes(header[56..88].try_into().expect("32 bytes")));
        let path = path.to_owned();
        Ok(Self { path, file, header: length, count, width, vocabulary, origin, ids_hash })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of the tokens.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.count as u64 * self.width as u64
    }

    /// Vocabulary size and tokenizer; foreign layouts have neither.
    #[must_use]
    pub fn origin(&self) -> Option<Origin> {
        self.origin
    }

    /// Checks ids against this vocabulary from now on.
    pub(super) fn limit(&mut self, vocabulary: u32) {
        self.vocabulary = Some(vocabulary);
    }

    /// Appends `count` ids from position `start` on to `out`.
    ///
    /// # Errors
    /// [`Error::Io`], also where the file was cut since it was opened; [`Error::File`] for an id
    /// beyond the vocabulary.
    ///
    /// # Panics
    /// Outside of the shard.
    pub fn copy_to(&self, start: usize, count: usize, out: &mut Vec<u32>) -> Result {
        let before = out.len();
        for at in (start..start + count).step_by(PIECE) {
            let mut bytes = vec![0; PIECE.min(start + count - at) * self.width];
            self.read(at, &mut bytes)?;
            out.extend(bytes.chunks_exact(self.width).map(id));
        }
        self.check(start, out[before..].iter().copied())
    }

    /// Refuses ids beyond the vocabulary; the first is at `start`.
    fn check(&self, start: usize, mut ids: impl Iterator<Item = u32>) -> Result {
        let Some(vocabulary) = self.vocabulary else { return Ok(()) };
        let Some((at, id)) = (start..).zip(&mut ids).find(|&(_, id)| id >= vocabulary) else {
            return Ok(());
        };
        let advice = match (self.origin, id) {
            (None, ..50257) if vocabulary == 256 => {
                "; if these are GPT-2's tokens, set data.tokenizer=gpt2; otherwise, set \
                 data.tokenizer=char"
            }
            (None, _) if vocabulary == 256 => "; set data.tokenizer=char",
            _ => "",
        };
        let problem =
            format!("token {id} at position {at} is beyond the vocabulary of {vocabulary}{advice}");
        Err(Error::file(&self.path, problem))
    }

    fn read(&self, start: usize, bytes: &mut [u8]) -> Result {
        assert!(start * self.width + bytes.len() <= self.count * self.width, "beyond the shard");
        let offset = self.header + start * self.width;
        disk::read_at(&self.file, offset as u64, bytes)
            .map_err(|e| Error::io("read", &self.path, e))
    }

    /// Reads all ids and compares them with the checksum in the header. Foreign layouts have none.
    ///
    /// # Errors
    /// [`Error::File`] for damage; as [`Shard::copy_to`].
    pub fn verify(&self) -> Result {
        let Some(expected) = self.ids_hash else { return Ok(()) };
        let (mut hasher, mut bytes) = (Hasher::new(), Vec::new());
        for start in (0..self.count).step_by(PIECE) {
            bytes.resize(PIECE.min(self.count - start) * self.width, 0);
            self.read(start, &mut bytes)?;
            self.check(start, bytes.chunks_exact(self.width).map(id))?;
            hasher.update(&bytes);
        }
        if hasher.finalize() == expected {
            return Ok(());
        }
        let problem = format!(
            "the tokens from offset {HEADER} on do not match their checksum: the file is damaged"
        );
        Err(Error::file(&self.path, problem))
    }

    /// BLAKE3 of the ids, as the header has it; foreign layouts have none.
    #[must_use]
    pub fn ids_hash(&self) -> Option<Hash> {
        self.ids_hash
    }
}

/// Token count, bytes per token and origin from a header of our layout.
fn own(
    path: &Path,
    header: &[u8],
    size: u64,
    expected: Option<u32>,
) -> Result<(u64, usize, Origin)> {
    let refuse = |problem: String| Err(Error::file(path, problem));
    if header.len() < HEADER {
        return refuse(format!(
            "holds {size} bytes; the header of a token shard alone takes {HEADER}"
        ));
    }
    if checksum(&[&header[..CHECKED]]).as_bytes() != &header[CHECKED..] {
        return refuse(format!(
            "the checksum at offset {CHECKED} does not match the header: the file is damaged"
        ));
    }
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let (version, width, vocabulary) = (number(4), number(8) as usize, number(12));
    if version != VERSION {
        return refuse(format!(
            "is a token shard of version {version}, expected {VERSION}; a newer sparse24 may read \
             it"
        ));
    }
    if width != 2 && width != 4 {
        return refuse(format!("has {width} bytes per token, expected 2 or 4"));
    }
    if let Some(expected) = expected.filter(|&expected| expected != vocabulary) {
        return refuse(format!(
            "has a vocabulary of {vocabulary}, expected {expected}; it needs the tokenizer.json \
             that was prepared with it"
        ));
    }
    let count = u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"));
    let tokenizer = Hash::from_bytes(header[24..56].try_into().expect("32 bytes"));
    Ok((count, width, Origin { vocabulary, tokenizer }))
}

fn checksum(parts: &[&[u8]]) -> Hash {
    let mut hasher = Hasher::new();
    parts.iter().for_each(|part| _ = hasher.update(part));
    hasher.finalize()
}

/// A little-endian id.
fn id(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte))
}

/// Writes a shard of our layout, atomically; `fill` pushes its ids.
///
/// # Errors
/// [`Error::Io`]; [`Error::UnknownToken`] for an id beyond the vocabulary; errors from `fill`.
pub fn write(path: &Path, origin: Origin, fill: impl FnOnce(&mut Writer<'_>) -> Result) -> Result {
    disk::replace(path, |file| {
        file.write(&[0; HEADER])?;
        let width = Tokens::for_vocabulary(origin.vocabulary).width();
        let (hasher, bytes) = (Hasher::new(), Vec::new());
        let mut writer = Writer { file, origin, width, count: 0, hasher, bytes };
        fill(&mut writer)?;
        writer.finish()
    })
}

/// A shard being written.
pub struct Writer<'a> {
    file: &'a mut disk::NewFile,
    origin: Origin,
    width: usize,
    count: usize,
    hasher: Hasher,
    bytes: Vec<u8>,
}

impl Writer<'_> {
    /// Appends ids.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::UnknownToken`] for an id beyond the vocabulary.
    pub fn push(&mut self, ids: &[u32]) -> Result {
        let vocabulary = self.origin.vocabulary;
        if let Some(at) = ids.iter().position(|&id| id >= vocabulary) {
            let (token, position) = (ids[at], self.count + at);
            return Err(Error::UnknownToken { token, position, vocabulary });
        }
        for ids in ids.chunks(PIECE) {
            self.bytes.clear();
            let width = self.width;
            self.bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes().into_iter().take(width)));
            self.hasher.update(&self.bytes);
            self.file.write(&self.bytes)?;
        }
        self.count += ids.len();
        Ok(())
    }

    fn finish(self) -> Result {
        let hash = self.hasher.finalize();
        self.file.write_start(&header(self.origin, self.count as u64, hash))
    }
}

fn header(origin: Origin, count: u64, ids: Hash) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    let width = Tokens::for_vocabulary(origin.vocabulary).width();
    header[..4].copy_from_slice(&MAGIC);
    header[4..8].copy_from_slice(&VERSION.to_le_bytes());
    header[8..12].copy_from_slice(&(width as u32).to_le_bytes());
    header[12..16].copy_from_slice(&origin.vocabulary.to_le_bytes());
    header[16..24].copy_from_slice(&count.to_le_bytes());
    header[24..56].copy_from_slice(origin.tokenizer.as_bytes());
    header[56..88].copy_from_slice(ids.as_bytes());
    let checksum = blake3::hash(&header[..CHECKED]);
    header[CHECKED..].copy_from_slice(checksum.as_bytes());
    header
}

impl Shard {
    /// Cuts a shard of our layout after its first `count` ids, in place; `progress` is called while
    /// these are read.
    ///
    /// # Errors
    /// [`Error::Io`]; errors from `progress`.
    ///
    /// # Panics
    /// For a foreign layout, and beyond the end.
    pub(super) fn cut(self, count: usize, mut progress: impl FnMut() -> Result) -> Result {
        assert!(count <= self.count, "beyond the shard");
        let origin = self.origin.expect("a shard of our layout");
        let (mut hasher, mut bytes) = (Hasher::new(), Vec::new());
        for start in (0..count).step_by(PIECE) {
            progress()?;
            bytes.resize(PIECE.min(count - start) * self.width, 0);
            self.read(start, &mut bytes)?;
            hasher.update(&bytes);
        }
        let mut file = disk::NewFile::reopen(self.path)?;
        file.truncate((HEADER + count * self.width) as u64)?;
        file.write_start(&header(origin, count as u64, hasher.finalize()))?;
        file.sync()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn origin(vocabulary: u32) -> Origin {
        Origin { vocabulary, tokenizer: blake3::hash(b"a tokenizer") }
    }

    fn shard(vocabulary: u32, ids: &[u32]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.bin");
        write(&path, origin(vocabulary), |shard| shard.push(ids)).unwrap();
        (folder, path)
    }

    /// All ids, verified.
    fn read(path: &Path, vocabulary: Option<u32>) -> Result<Vec<u32>> {
        let shard = Shard::open(path, vocabulary)?;
        shard.verify()?;
        let mut ids = Vec::new();
        shard.copy_to(0, shard.len(), &mut ids)?;
        Ok(ids)
    }

    fn refusal(path: &Path, vocabulary: Option<u32>) -> String {
        read(path, vocabulary).unwrap_err().to_string()
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let (_folder, path) = shard(300, &[1, 299, 2]);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes[..24], *b"S24T\x01\0\0\0\x02\0\0\0\x2c\x01\0\0\x03\0\0\0\0\0\0\0");
        assert_eq!(bytes[24..56], *blake3::hash(b"a tokenizer").as_bytes());
        assert_eq!(bytes[56..88], *blake3::hash(b"\x01\0\x2b\x01\x02\0").as_bytes());
        assert_eq!(bytes[88..96], [0; 8]);
        assert_eq!(bytes[96..128], *blake3::hash(&bytes[..96]).as_bytes());
        assert_eq!(bytes[128..], *b"\x01\0\x2b\x01\x02\0");
    }

    #[test]
    fn no_flip_and_no_truncation_loads_silently() {
        let (_folder, path) = shard(70_000, &[5, 69_999, 7, 8]);
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            for flip in [1 << (at % 8), 0xff] {
                let mut damaged = whole.clone();
                damaged[at] ^= flip;
                fs::write(&path, &damaged).unwrap();
                let message = refusal(&path, None);
                assert!(message.contains("shard.bin"), "byte {at}, flip {flip:#x}: {message}");
            }
        }
        for length in 4..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(read(&path, None).is_err(), "{length}");
        }
        fs::write(&path, [&whole[..], b"xyz"].concat()).unwrap();
        assert!(
            refusal(&path, None)
                .contains("claims 4 tokens, 144 bytes in all, but it holds 147: 3 bytes too many")
        );
        fs::write(&path, &whole[..141]).unwrap();
        assert!(
            refusal(&path, None)
                .contains("144 bytes in all, but it holds 141: 3 bytes are missing")
        );
    }

    #[test]
    fn a_header_may_not_lie() {
        let (_folder, path) = shard(10, &[5, 9]);
        let whole = fs::read(&path).unwrap();
        for (at, value, expected) in [
            (4, 2_u32, "version 2, expected 1"),
            (8, 3, "3 bytes per token, expected 2 or 4"),
            (12, 9, "token 9 at position 1 is beyond the vocabulary of 9"),
            (20, u32::MAX, "bytes are missing"),
            (56, 0, "do not match their checksum"),
        ] {
            let mut lying = whole.clone();
            lying[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let checksum = blake3::hash(&lying[..CHECKED]);
            lying[CHECKED..HEADER].copy_from_slice(checksum.as_bytes());
            fs::write(&path, &lying).unwrap();
            let message = refusal(&path, None);
            assert!(message.contains("shard.bin") && message.contains(expected), "{message}");
        }
        fs::write(&path, &whole).unwrap();
        assert!(refusal(&path, Some(11)).contains("vocabulary of 10, expected 11"));
        let refused = write(&path, origin(10), |shard| shard.push(&[1, 10])).unwrap_err();
        assert!(refused.to_string().contains("token 10 at position 1"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), whole, "a refused write touched the file");
    }

    #[test]
    fn foreign_layouts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("foreign.bin");
        let raw: Vec<u8> = (0..300_u16).flat_map(u16::to_le_bytes).collect();
        fs::write(&path, &raw).unwrap();
        assert_eq!(read(&path, Some(300)).unwrap(), (0..300).collect::<Vec<_>>());
        assert_eq!(Shard::open(&path, None).unwrap().origin(), None);
        assert!(
            refusal(&path, Some(299))
                .contains("foreign.bin: token 299 at position 299 is beyond the vocabulary of 299")
        );
        fs::write(&path, &raw[..599]).unwrap();
        assert!(refusal(&path, None).contains("holds 599 bytes"));
        for (magic, version, width) in [(20_240_520_u32, 1_u32, 2), (20_240_801, 7, 4)] {
            let mut bytes = vec![0; 1024];
            bytes[..4].copy_from_slice(&magic.to_le_bytes());
            bytes[4..8].copy_from_slice(&version.to_le_bytes());
            bytes[8..12].copy_from_slice(&3_u32.to_le_bytes());
            [7_u32, 8, 9].iter().for_each(|id| bytes.extend(&id.to_le_bytes()[..width]));
            fs::write(&path, &bytes).unwrap();
            assert_eq!(read(&path, None).unwrap(), [7, 8, 9]);
            assert!(refusal(&path, Some(8)).contains("token 8 at position 1"));
            fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert!(refusal(&path, None).contains("1 bytes are missing"));
            fs::write(&path, &bytes[..7]).unwrap();
            assert!(refusal(&path, None).contains("so expected version"));
            bytes[4] = 9;
            fs::write(&path, &bytes).unwrap();
            assert!(refusal(&path, None).contains("found 9"));
        }
        assert!(refusal(folder.path(), None).contains("is a folder"));
    }

    proptest! {
        #[test]
        fn read_inverts_write(
            ids in prop::collection::vec(0_u32..70_000, 0..200),
            wide in any::<bool>(),
        ) {
            let vocabulary = if wide { 70_000 } else { 60_000 };
            let ids: Vec<u32> = ids.into_iter().filter(|&id| id < vocabulary).collect();
            let (_folder, path) = shard(vocabulary, &ids);
            prop_assert_eq!(&read(&path, Some(vocabulary)).unwrap(), &ids);
            let shard = Shard::open(&path, None).unwrap();
            prop_assert_eq!(shard.origin(), Some(origin(vocabulary)));
            let (mut part, at) = (vec![1], ids.len() / 3);
            shard.copy_to(at, ids.len() / 2, &mut part).unwrap();
            prop_assert_eq!(&part[1..], &ids[at..at + ids.len() / 2]);
        }
    }
}
