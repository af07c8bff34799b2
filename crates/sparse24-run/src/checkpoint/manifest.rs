//! The manifest: the last file written, by which all others are proved.
//!
//! Its own checksum is the blake3 of the manifest's bytes with the checksum's 64 digits replaced by
//! `0`; it closes the file, so that it is found without parsing. Invariant: nothing of a checkpoint
//! is believed before its hash is. Deliberately absent: what the files hold.

use std::{collections::BTreeMap, io::Read, path::Path};

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
/// Longest manifest that is read; five thousand weights fit, and lists of names take a dozen times
/// the memory of their text.
const LIMIT: u64 = 4 << 20;
const BEFORE: &[u8] = b",\n  \"checksum\": \"";
const AFTER: &[u8] = b"\"\n}\n";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    format_version: u32,
    pub(crate) step: u32,
    files: BTreeMap<String, Parts>,
    #[serde(skip_serializing)]
    #[allow(dead_code, reason = "proved before the rest is parsed")]
    checksum: Fingerprint,
}

/// What a file must be: its parts, in order and without gap. A tensor file has its header and each
/// tensor, so that what is damaged is named; any other file is one part.
#[derive(Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Parts(Vec<Part>);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    name: String,
    end: u64,
    blake3: Fingerprint,
}

impl Manifest {
    pub(crate) fn new(step: u32, files: BTreeMap<String, Parts>) -> Self {
        Self {
            format: FORMAT.into(),
            format_version: FORMAT_VERSION,
            step,
            files,
            checksum: Fingerprint::from_bytes([0; 32]),
        }
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
        assert!(
            bytes.len() as u64 <= LIMIT,
            "a manifest of {} bytes could not be read again, {LIMIT} at most are",
            bytes.len()
        );
        bytes
    }

    /// Proves the checksum, then reads.
    pub(crate) fn open(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(MANIFEST);
        let mut bytes = disk::read_small(&path, LIMIT)?;
        if bytes.len() < BEFORE.len() + 64 + AFTER.len() || !bytes.ends_with(AFTER) {
            return Err(Error::file(
                path,
                format!(
                    "does not end with its checksum at byte {}: it is cut or damaged",
                    bytes.len()
                ),
            ));
        }
        let digits = digits(bytes.len());
        let stated = String::from_utf8_lossy(&bytes[digits.clone()]).into_owned();
        let text = bytes.clone();
        bytes[digits].fill(b'0');
        let found = Fingerprint::of(&bytes).to_string();
        if stated != found {
            let length = bytes.len();
            return Err(Error::file(
                path,
                format!(
                    "is damaged, bytes 0..{length}: its checksum says {stated:?}, they give {found}"
                ),
            ));
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
            return Err(Error::file(
                path,
                format!(
                    "lists {:?}, expected {FILES:?}",
                    manifest.files.keys().collect::<Vec<_>>()
                ),
            ));
        }
        Ok(manifest)
    }

    /// Proves the size and the hashes of every file.
    pub(crate) fn prove(&self, directory: &Path) -> Result<(), Error> {
        self.files.iter().try_for_each(|(name, parts)| parts.prove(&directory.join(name)))
    }
}

/// Where the checksum's digits are in a manifest of this length.
fn digits(length: usize) -> std::ops::Range<usize> {
    length - AFTER.len() - 64..length - AFTER.len()
}

impl Parts {
    fn prove(&self, path: &Path) -> Result<(), Error> {
        let (mut file, size) = disk::open(path)?;
        let expected = self.0.last().map_or(0, |part| part.end);
        if size != expected {
            let cut = self.0.iter().find(|part| part.end > size).filter(|_| size < expected);
            let within =
                cut.map_or_else(String::new, |part| format!(", which is within {:?}", part.name));
            return Err(Error::file(
                path,
                format!("ends at byte {size}, the manifest says {expected}{within}"),
            ));
        }
        let mut begin = 0;
        for Part { name, end, blake3 } in &self.0 {
            let mut hasher = blake3::Hasher::new();
            hasher
                .update_reader((&mut file).take(end.saturating_sub(begin)))
                .map_err(|e| Error::io("read", path, e))?;
            if hasher.finalize().as_bytes() != blake3.as_bytes() {
                return Err(Error::file(
                    path,
                    format!("is damaged in {name:?}, bytes {begin}..{end}"),
                ));
            }
            begin = *end;
        }
        Ok(())
    }
}

/// Proves a checkpoint without loading it: the manifest by its own checksum, then every file by its
/// size and hashes.
///
/// # Errors
/// [`Error::File`] names the file and, in a damaged tensor file, the tensor and its bytes;
/// [`Error::Io`] if one cannot be read.
pub fn verify(checkpoint: &Path) -> Result<(), Error> {
    Manifest::open(checkpoint)?.prove(checkpoint)
}

/// A file being written, and hashed part by part.
pub(crate) struct Recorder {
    file: disk::NewFile,
    hasher: blake3::Hasher,
    size: u64,
    parts: Vec<Part>,
}

impl Recorder {
    pub(crate) fn create(path: std::path::PathBuf) -> Result<Self, Error> {
        Ok(Self {
            file: disk::NewFile::create(path)?,
            hasher: blake3::Hasher::new(),
            size: 0,
            parts: Vec::new(),
        })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write(bytes)?;
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        Ok(())
    }

    /// What was written since the last part is `name`.
    pub(crate) fn end_part(&mut self, name: &str) {
        let blake3 = Fingerprint::from_bytes(*self.hasher.finalize().as_bytes());
        self.parts.push(Part { name: name.into(), end: self.size, blake3 });
        self.hasher.reset();
    }

    /// Syncs, and says what the file must be.
    pub(crate) fn finish(self) -> Result<Parts, Error> {
        self.file.sync()?;
        Ok(Parts(self.parts))
    }
}
