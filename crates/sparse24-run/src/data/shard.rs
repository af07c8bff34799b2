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
//! Invariant: reading returns what was written, or an error that locates the damage; memory is
//! bounded by the file's size.

use std::{
    convert::Infallible,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use blake3::Hash;

use super::Tokens;
use crate::{Error, disk};

const MAGIC: [u8; 4] = *b"S24T";
const VERSION: u32 = 1;
const HEADER: usize = 128;
const CHECKED: usize = 96;

const LLM_C_HEADER: usize = 1024;
/// Magic, version and bytes per token of llm.c's layouts.
const LLM_C: [(u32, u32, usize); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];

/// The contents of a shard.
#[derive(Debug, Clone, PartialEq)]
pub struct Shard {
    /// The ids.
    pub tokens: Tokens,
    /// Vocabulary size and tokenizer; foreign layouts have neither.
    pub origin: Option<Origin>,
}

/// Origin of the ids of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Size of the vocabulary; every id is below it.
    pub vocabulary: u32,
    /// Fingerprint of the tokenizer.
    pub tokenizer: Hash,
}

/// Writes a shard of our layout, atomically.
///
/// # Errors
/// [`Error::Io`]; [`Error::UnknownToken`] for an id beyond the vocabulary.
pub fn write(path: &Path, tokens: &Tokens, origin: Origin) -> Result<(), Error> {
    let beyond =
        (0..tokens.len()).map(|at| (at, tokens.get(at))).find(|&(_, id)| id >= origin.vocabulary);
    if let Some((position, token)) = beyond {
        return Err(Error::UnknownToken { token, position, vocabulary: origin.vocabulary });
    }
    let width = tokens.width();
    let mut hasher = blake3::Hasher::new();
    let Ok(()) = tokens.for_each_piece(width, |bytes| {
        hasher.update(bytes);
        Ok::<_, Infallible>(())
    });
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&MAGIC);
    header[4..8].copy_from_slice(&VERSION.to_le_bytes());
    header[8..12].copy_from_slice(&(width as u32).to_le_bytes());
    header[12..16].copy_from_slice(&origin.vocabulary.to_le_bytes());
    header[16..24].copy_from_slice(&(tokens.len() as u64).to_le_bytes());
    header[24..56].copy_from_slice(origin.tokenizer.as_bytes());
    header[56..88].copy_from_slice(hasher.finalize().as_bytes());
    let checksum = blake3::hash(&header[..CHECKED]);
    header[CHECKED..].copy_from_slice(checksum.as_bytes());
    disk::replace(path, |file| {
        file.write(&header)?;
        tokens.for_each_piece(width, |bytes| file.write(bytes))
    })
}

/// Reads a shard of any layout, recognized by its first bytes; a file without a magic is nanoGPT's.
///
/// Ids are checked against the vocabulary in the header; in a foreign layout against `vocabulary`,
/// if it is given.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] where the size differs from what the header says, an id is beyond
/// the vocabulary, the header contradicts `vocabulary`, or a checksum does not match.
pub fn read(path: &Path, vocabulary: Option<u32>) -> Result<Shard, Error> {
    let (mut file, size) = disk::open(path)?;
    let mut header = Vec::with_capacity(LLM_C_HEADER);
    (&mut file)
        .take(HEADER as u64)
        .read_to_end(&mut header)
        .map_err(|e| Error::io("read", path, e))?;
    let mut reader = Reader { path: path.to_owned(), file, size };
    if header.starts_with(&MAGIC) {
        return reader.own(&header, vocabulary);
    }
    let number = |at: usize| {
        header
            .get(at..at + 4)
            .map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    };
    if let Some(&(magic, version, width)) = LLM_C.iter().find(|layout| number(0) == Some(layout.0))
    {
        let (found, count) = (number(4).unwrap_or(0), number(8).unwrap_or(0));
        if found != version {
            return Err(reader.refuse(format!(
                "llm.c's magic {magic} comes with version {version}, found {found}"
            )));
        }
        reader.check_size(LLM_C_HEADER, u64::from(count), width)?;
        reader.skip(LLM_C_HEADER - header.len())?;
        return Ok(Shard {
            tokens: reader.ids(&[], u64::from(count), width, vocabulary)?.0,
            origin: None,
        });
    }
    if header.len() == HEADER
        && checksum(&[&MAGIC, &header[4..CHECKED]]).as_bytes() == &header[CHECKED..]
    {
        return Err(reader
            .refuse("the magic of this token shard is damaged, the rest of its header is intact"));
    }
    if !size.is_multiple_of(2) {
        return Err(reader.refuse(format!(
            "holds {size} bytes without a known header; raw u16 \
            tokens would take one byte less or more"
        )));
    }
    Ok(Shard { tokens: reader.ids(&header, size / 2, 2, vocabulary)?.0, origin: None })
}

fn checksum(parts: &[&[u8]]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    parts.iter().for_each(|part| {
        hasher.update(part);
    });
    hasher.finalize()
}

struct Reader {
    path: PathBuf,
    file: File,
    size: u64,
}

impl Reader {
    fn refuse(&self, problem: impl Into<String>) -> Error {
        Error::file(&self.path, problem)
    }

    fn own(&mut self, header: &[u8], expected: Option<u32>) -> Result<Shard, Error> {
        if header.len() < HEADER {
            return Err(self.refuse(format!(
                "holds {} bytes; the header of a token shard alone takes {HEADER}",
                self.size
            )));
        }
        if checksum(&[&header[..CHECKED]]).as_bytes() != &header[CHECKED..] {
            return Err(self.refuse(format!(
                "the checksum at offset {CHECKED} does not match the header: the file is damaged"
            )));
        }
        let number =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let hash = |at: usize| Hash::from_bytes(header[at..at + 32].try_into().expect("32 bytes"));
        let (version, width, vocabulary) = (number(4), number(8) as usize, number(12));
        if version != VERSION {
            return Err(self.refuse(format!(
                "is a token shard of version {version}, expected \
                {VERSION}; a newer sparse24 may read it"
            )));
        }
        if width != 2 && width != 4 {
            return Err(self.refuse(format!("has {width} bytes per token, expected 2 or 4")));
        }
        if let Some(expected) = expected.filter(|&expected| expected != vocabulary) {
            return Err(
                self.refuse(format!("has a vocabulary of {vocabulary}, expected {expected}"))
            );
        }
        let count = u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"));
        self.check_size(HEADER, count, width)?;
        let (tokens, payload) = self.ids(&[], count, width, Some(vocabulary))?;
        if payload != hash(56) {
            return Err(self.refuse(format!(
                "the tokens from offset {HEADER} on do not match \
                their checksum: the file is damaged"
            )));
        }
        Ok(Shard { tokens, origin: Some(Origin { vocabulary, tokenizer: hash(24) }) })
    }

    /// Refuses a file that is not exactly header and ids.
    fn check_size(&self, header: usize, count: u64, width: usize) -> Result<(), Error> {
        let (size, expected) =
            (u128::from(self.size), header as u128 + u128::from(count) * width as u128);
        let difference = match size {
            _ if size < expected => format!("{} bytes are missing", expected - size),
            _ if size > expected => format!("{} bytes are too many", size - expected),
            _ => return Ok(()),
        };
        Err(self.refuse(format!(
            "its header tells of {count} tokens, {expected} bytes in all, \
            but it holds {size}: {difference}"
        )))
    }

    fn skip(&mut self, bytes: usize) -> Result<(), Error> {
        self.file.read_exact(&mut vec![0; bytes]).map_err(|e| Error::io("read", &self.path, e))
    }

    /// The rest of the file after `head`, as ids below the vocabulary, and the hash of its bytes.
    fn ids(
        &mut self,
        head: &[u8],
        count: u64,
        width: usize,
        vocabulary: Option<u32>,
    ) -> Result<(Tokens, Hash), Error> {
        let count = usize::try_from(count).map_err(|_| {
            self.refuse(format!("{count} tokens are more than this machine can address"))
        })?;
        let mut tokens = match width {
            2 => Tokens::U16(disk::reserve(&self.path, count)?),
            _ => Tokens::U32(disk::reserve(&self.path, count)?),
        };
        let mut hasher = blake3::Hasher::new();
        let mut piece = head.to_vec();
        let mut left = count * width - head.len();
        loop {
            hasher.update(&piece);
            let position = tokens.len();
            let id =
                |bytes: &[u8]| bytes.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte));
            if let Some(vocabulary) = vocabulary {
                let beyond =
                    piece.chunks_exact(width).map(id).enumerate().find(|&(_, id)| id >= vocabulary);
                if let Some((at, id)) = beyond {
                    let at = position + at;
                    return Err(self.refuse(format!(
                        "token {id} at position {at} is beyond the vocabulary of {vocabulary}"
                    )));
                }
            }
            tokens.extend(piece.chunks_exact(width).map(id));
            if left == 0 {
                return Ok((tokens, hasher.finalize()));
            }
            piece.resize(left.min(1 << 16), 0);
            self.file.read_exact(&mut piece).map_err(|e| Error::io("read", &self.path, e))?;
            left -= piece.len();
        }
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

    fn shard(vocabulary: u32, ids: &[u32]) -> (tempfile::TempDir, PathBuf, Tokens) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.bin");
        let mut tokens = Tokens::for_vocabulary(vocabulary);
        tokens.extend(ids.iter().copied());
        write(&path, &tokens, origin(vocabulary)).unwrap();
        (folder, path, tokens)
    }

    fn refusal(path: &Path, vocabulary: Option<u32>) -> String {
        read(path, vocabulary).unwrap_err().to_string()
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let (_folder, path, _) = shard(300, &[1, 299, 2]);
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
        let (_folder, path, _) = shard(70_000, &[5, 69_999, 7, 8]);
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
        assert!(refusal(&path, None).contains(
            "tells of 4 tokens, 144 bytes in all, but it holds 147: 3 bytes are too many"
        ));
        fs::write(&path, &whole[..141]).unwrap();
        assert!(
            refusal(&path, None)
                .contains("144 bytes in all, but it holds 141: 3 bytes are missing")
        );
    }

    #[test]
    fn a_header_may_not_lie() {
        let (_folder, path, _) = shard(10, &[5, 9]);
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
        let mut tokens = Tokens::for_vocabulary(10);
        tokens.extend([1, 10]);
        assert!(
            write(&path, &tokens, origin(10))
                .unwrap_err()
                .to_string()
                .contains("token 10 at position 1")
        );
        assert_eq!(fs::read(&path).unwrap(), whole, "a refused write touched the file");
    }

    #[test]
    fn foreign_layouts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("foreign.bin");
        let raw: Vec<u8> = (0..300_u16).flat_map(u16::to_le_bytes).collect();
        fs::write(&path, &raw).unwrap();
        assert_eq!(
            read(&path, Some(300)).unwrap(),
            Shard { tokens: Tokens::U16((0..300).collect()), origin: None }
        );
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
            let mut ids = Vec::new();
            let tokens = read(&path, None).unwrap().tokens;
            tokens.copy_to(0, 3, &mut ids);
            assert_eq!((ids, tokens.width()), (vec![7, 8, 9], width));
            assert!(refusal(&path, Some(8)).contains("token 8 at position 1"));
            fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert!(refusal(&path, None).contains("1 bytes are missing"));
            fs::write(&path, &bytes[..7]).unwrap();
            assert!(refusal(&path, None).contains("comes with version"));
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
            let (_folder, path, tokens) = shard(vocabulary, &ids);
            let expected = Shard { tokens, origin: Some(origin(vocabulary)) };
            prop_assert_eq!(read(&path, Some(vocabulary)).unwrap(), expected);
        }

        #[test]
        fn no_bytes_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            start in 0_usize..4,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("any.bin");
            let magic = [u32::from_le_bytes(MAGIC), LLM_C[0].0, LLM_C[1].0, 7][start];
            fs::write(&path, [&magic.to_le_bytes(), &bytes[..]].concat()).unwrap();
            if let Err(e) = read(&path, Some(1000)) {
                prop_assert!(e.to_string().contains("any.bin"));
            }
        }
    }
}
