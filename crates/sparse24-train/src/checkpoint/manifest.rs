//! The manifest: the last file written, by which all others are proved.
//!
//! Its own checksum is the blake3 of the manifest's bytes with the checksum's 64 digits replaced by `0`; it closes the file, so
//! that it is found without parsing. Invariant: nothing of a checkpoint is believed before its hash is. Deliberately absent: what
//! the files hold.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::Fingerprint;
use crate::{Error, disk};

/// The version of the format that this build writes, and the only one it reads.
pub const FORMAT_VERSION: u32 = 1;

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const MODEL: &str = "model.safetensors";
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";
pub(crate) const MASKS: &str = "masks.safetensors";
pub(crate) const STATE: &str = "state.json";
/// In the order of their names, as a map lists them.
const FILES: [&str; 4] = [MASKS, MODEL, OPTIMIZER, STATE];

const FORMAT: &str = "sparse24-checkpoint";
/// Longest manifest that is read.
const LIMIT: u64 = 8 << 20;
const BEFORE: &[u8] = b",\n  \"checksum\": \"";
const AFTER: &[u8] = b"\"\n}\n";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    format_version: u32,
    pub(crate) step: u32,
    files: BTreeMap<String, FileRecord>,
    #[serde(skip_serializing)]
    #[allow(dead_code, reason = "proved before the rest is parsed")]
    checksum: Fingerprint,
}

/// What a file must be.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileRecord {
    size: u64,
    blake3: Fingerprint,
    /// The header and each tensor, in order and without gap: they tell where a damaged file is damaged.
    parts: Vec<Part>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    name: String,
    end: u64,
    blake3: Fingerprint,
}

impl Manifest {
    pub(crate) fn new(step: u32, files: BTreeMap<String, FileRecord>) -> Self {
        Self { format: FORMAT.into(), format_version: FORMAT_VERSION, step, files, checksum: Fingerprint::from_bytes([0; 32]) }
    }

    /// The bytes of the file.
    pub(crate) fn seal(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("strings and integers are JSON");
        bytes.truncate(bytes.len() - b"\n}".len());
        bytes.extend_from_slice(BEFORE);
        bytes.extend_from_slice(&[b'0'; 64]);
        bytes.extend_from_slice(AFTER);
        let checksum = Fingerprint::of(&bytes).to_string();
        let digits = digits(bytes.len());
        bytes[digits].copy_from_slice(checksum.as_bytes());
        bytes
    }

    /// Proves the checksum, then reads.
    pub(crate) fn open(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(MANIFEST);
        let mut bytes = disk::read_small(&path, LIMIT)?;
        if bytes.len() < BEFORE.len() + 64 + AFTER.len() || !bytes.ends_with(AFTER) {
            return Err(Error::file(path, format!("does not end with its checksum: it is cut or damaged ({} bytes)", bytes.len())));
        }
        let digits = digits(bytes.len());
        let stated = String::from_utf8_lossy(&bytes[digits.clone()]).into_owned();
        let text = bytes.clone();
        bytes[digits].fill(b'0');
        let found = Fingerprint::of(&bytes).to_string();
        if stated != found {
            return Err(Error::file(path, format!("is damaged: its checksum says {stated:?}, its bytes give {found}")));
        }
        #[derive(Deserialize)]
        struct Version {
            format: String,
            format_version: u32,
        }
        let broken = |e: serde_json::Error| Error::file(&path, format!("is no manifest: {e}"));
        let version: Version = serde_json::from_slice(&text).map_err(broken)?;
        if (version.format.as_str(), version.format_version) != (FORMAT, FORMAT_VERSION) {
            return Err(Error::file(
                path,
                format!(
                    "is of format {:?}, version {}; this build reads {FORMAT:?}, version {FORMAT_VERSION}",
                    version.format, version.format_version
                ),
            ));
        }
        let manifest: Self = serde_json::from_slice(&text).map_err(broken)?;
        if !manifest.files.keys().eq(FILES.iter()) {
            return Err(Error::file(path, format!("lists {:?}, expected {FILES:?}", manifest.files.keys().collect::<Vec<_>>())));
        }
        Ok(manifest)
    }

    /// Proves the size and the hash of every file.
    pub(crate) fn prove(&self, directory: &Path) -> Result<(), Error> {
        self.files.iter().try_for_each(|(name, record)| record.prove(&directory.join(name)))
    }
}

/// Where the checksum's digits are in a manifest of this length.
fn digits(length: usize) -> std::ops::Range<usize> {
    length - AFTER.len() - 64..length - AFTER.len()
}

impl FileRecord {
    fn prove(&self, path: &Path) -> Result<(), Error> {
        let (mut file, size) = disk::open(path)?;
        if size != self.size {
            let within = self.parts.iter().find(|part| part.end > size).map(|part| format!(", which is within {:?}", part.name));
            return Err(Error::file(
                path,
                format!("holds {size} bytes, the manifest says {}{}", self.size, within.filter(|_| size < self.size).unwrap_or_default()),
            ));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(&mut file).map_err(|e| Error::io("read", path, e))?;
        let found = Fingerprint::from_bytes(*hasher.finalize().as_bytes());
        if found == self.blake3 { Ok(()) } else { Err(self.locate(path, file, found)) }
    }

    /// The error for a file whose hash is wrong: the first part that is.
    fn locate(&self, path: &Path, mut file: File, found: Fingerprint) -> Error {
        let whole = Error::file(path, format!("is damaged: the manifest says blake3 {}, its bytes give {found}", self.blake3));
        if file.seek(SeekFrom::Start(0)).is_err() {
            return whole;
        }
        let mut begin = 0;
        for part in &self.parts {
            let mut hasher = blake3::Hasher::new();
            if let Err(e) = hasher.update_reader((&mut file).take(part.end.saturating_sub(begin))) {
                return Error::io("read", path, e);
            }
            if hasher.finalize().as_bytes() != part.blake3.as_bytes() {
                return Error::file(path, format!("is damaged in {:?}, bytes {begin}..{}", part.name, part.end));
            }
            begin = part.end;
        }
        whole
    }
}

/// Proves a checkpoint without loading it: the manifest by its own checksum, then every file by size and hash.
///
/// # Errors
/// [`Error::File`] names the file and, in a damaged tensor file, the tensor and its bytes; [`Error::Io`] if one cannot be read.
pub fn verify(checkpoint: &Path) -> Result<(), Error> {
    Manifest::open(checkpoint)?.prove(checkpoint)
}

/// A file being written and hashed, as a whole and part by part.
pub(crate) struct Recorder {
    file: disk::NewFile,
    whole: blake3::Hasher,
    part: blake3::Hasher,
    size: u64,
    parts: Vec<Part>,
}

impl Recorder {
    pub(crate) fn create(path: std::path::PathBuf) -> Result<Self, Error> {
        let file = disk::NewFile::create(path)?;
        Ok(Self { file, whole: blake3::Hasher::new(), part: blake3::Hasher::new(), size: 0, parts: Vec::new() })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write(bytes)?;
        self.whole.update(bytes);
        self.part.update(bytes);
        self.size += bytes.len() as u64;
        Ok(())
    }

    /// What was written since the last part is `name`.
    pub(crate) fn end_part(&mut self, name: &str) {
        let blake3 = Fingerprint::from_bytes(*self.part.finalize().as_bytes());
        self.parts.push(Part { name: name.into(), end: self.size, blake3 });
        self.part.reset();
    }

    /// Syncs, and says what the file must be.
    pub(crate) fn finish(self) -> Result<FileRecord, Error> {
        self.file.sync()?;
        let blake3 = Fingerprint::from_bytes(*self.whole.finalize().as_bytes());
        Ok(FileRecord { size: self.size, blake3, parts: self.parts })
    }
}
