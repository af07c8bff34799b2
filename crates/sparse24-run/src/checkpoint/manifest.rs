//! The manifest: written last, with the hashes of all other files.
//!
//! Its own checksum is the BLAKE3 of its bytes with the 64 digits of the checksum replaced by `0`.
//! The checksum ends the file, so it is found without parsing. Invariant: nothing of a checkpoint
//! is parsed before its hash is verified.

use std::{collections::BTreeMap, io::Read, path::Path};

use serde::{Deserialize, Serialize};

use super::Fingerprint;
use crate::{Error, Result, disk};

/// The format version that this build writes. It reads this one and all before it.
pub const FORMAT_VERSION: u32 = 2;

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const MODEL: &str = "model.safetensors";
pub(crate) const OPTIMIZER: &str = "optimizer.safetensors";
pub(crate) const MASKS: &str = "masks.safetensors";
pub(crate) const STATE: &str = "state.json";
/// In the order of their names, as a map lists them.
const FILES: [&str; 4] = [MASKS, MODEL, OPTIMIZER, STATE];

const FORMAT: &str = "sparse24-checkpoint";
/// Longest manifest that is read, enough for 5000 weights. Parsed, its lists of names take about 12
/// times as much memory.
const LIMIT: u64 = 4 << 20;
const BEFORE: &[u8] = b",\n  \"checksum\": \"";
const AFTER: &[u8] = b"\"\n}\n";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    pub(crate) format_version: u32,
    pub(crate) step: u32,
    files: BTreeMap<String, Parts>,
    #[serde(skip_serializing)]
    #[allow(dead_code, reason = "verified before the rest is parsed")]
    checksum: Fingerprint,
}

/// The parts of a file, in order and without gap: of a tensor file its header and each tensor, so
/// that an error names the damaged one; any other file is one part.
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
            checksum: Fingerprint::of(&[]),
        }
    }

    /// The bytes of the manifest, refused if they exceed the limit for reading one.
    pub(crate) fn seal(&self, directory: &Path) -> Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("strings and integers are JSON");
        bytes.truncate(bytes.len() - b"\n}".len());
        bytes.extend_from_slice(BEFORE);
        bytes.extend_from_slice(&[b'0'; 64]);
        bytes.extend_from_slice(AFTER);
        let checksum = Fingerprint::of(&bytes).to_string();
        let digits = digits(bytes.len());
        bytes[digits].copy_from_slice(checksum.as_bytes());
        disk::check_size(&directory.join(MANIFEST), bytes.len() as u64, LIMIT)?;
        Ok(bytes)
    }

    /// Verifies the checksum, then parses.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST);
        let mut bytes = disk::read_small(&path, LIMIT)?;
        let refuse = |problem: String| Err(Error::file(&path, problem));
        let length = bytes.len();
        if length < BEFORE.len() + 64 + AFTER.len() || !bytes.ends_with(AFTER) {
            return refuse(format!(
                "does not end with its checksum at byte {length}: cut or damaged"
            ));
        }
        let digits = digits(length);
        let stated = String::from_utf8_lossy(&bytes[digits.clone()]).into_owned();
        let text = bytes.clone();
        bytes[digits].fill(b'0');
        let found = Fingerprint::of(&bytes).to_string();
        if stated != found {
            return refuse(format!(
                "is damaged, bytes 0..{length}: checksum {stated:?}, expected {found}"
            ));
        }
        #[derive(Deserialize)]
        struct Version {
            format: String,
            format_version: u32,
        }
        let broken = |e: serde_json::Error| Error::file(&path, format!("not a manifest: {e}"));
        let Version { format, format_version } = serde_json::from_slice(&text).map_err(broken)?;
        if format != FORMAT || !(1..=FORMAT_VERSION).contains(&format_version) {
            return refuse(format!(
                "has format {format:?}, version {format_version}; this build reads {FORMAT:?}, \
                    versions 1 to {FORMAT_VERSION}"
            ));
        }
        let manifest: Self = serde_json::from_slice(&text).map_err(broken)?;
        let names: Vec<_> = manifest.files.keys().collect();
        if names != FILES {
            return refuse(format!("lists {names:?}, expected {FILES:?}"));
        }
        Ok(manifest)
    }

    /// Verifies the size and the hashes of every file.
    pub(crate) fn prove(&self, directory: &Path) -> Result {
        self.files.iter().try_for_each(|(name, parts)| parts.prove(&directory.join(name)))
    }
}

/// The bytes of the checksum's digits in a manifest of this length.
fn digits(length: usize) -> std::ops::Range<usize> {
    length - AFTER.len() - 64..length - AFTER.len()
}

impl Parts {
    /// Parts of these names and lengths, to be written.
    pub(crate) fn planned(parts: impl IntoIterator<Item = (String, u64)>) -> Self {
        let mut end = 0;
        let part = |(name, length)| {
            end += length;
            Part { name, end, blake3: Fingerprint::of(&[]) }
        };
        Self(parts.into_iter().map(part).collect())
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.0.last().map_or(0, |part| part.end)
    }

    fn prove(&self, path: &Path) -> Result {
        let (mut file, size) = disk::open(path)?;
        let expected = self.size();
        if size != expected {
            let cut = self.0.iter().find(|part| part.end > size).filter(|_| size < expected);
            let within =
                cut.map_or_else(String::new, |part| format!(", which is within {:?}", part.name));
            bail!(path, "ends at byte {size}, but the manifest says {expected}{within}");
        }
        let mut begin = 0;
        for Part { name, end, blake3 } in &self.0 {
            let mut hasher = blake3::Hasher::new();
            hasher
                .update_reader((&mut file).take(end.saturating_sub(begin)))
                .map_err(|e| Error::io("read", path, e))?;
            if Fingerprint::from(hasher.finalize()) != *blake3 {
                bail!(path, "is damaged in {name:?}, bytes {begin}..{end}");
            }
            begin = *end;
        }
        Ok(())
    }
}

/// Verifies a checkpoint without loading it: the manifest by its own checksum, then every file by
/// its size and hashes.
///
/// # Errors
/// [`Error::File`] names the file and, in a damaged tensor file, the tensor and its bytes;
/// [`Error::Io`] if one cannot be read.
pub fn verify(checkpoint: &Path) -> Result {
    Manifest::open(checkpoint)?.prove(checkpoint)
}

/// Writes a file and hashes it part by part.
pub(crate) struct Recorder {
    file: disk::NewFile,
    hasher: blake3::Hasher,
    size: u64,
    parts: Vec<Part>,
}

impl Recorder {
    pub(crate) fn create(path: std::path::PathBuf) -> Result<Self> {
        Ok(Self {
            file: disk::NewFile::create(path)?,
            hasher: blake3::Hasher::new(),
            size: 0,
            parts: Vec::new(),
        })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result {
        self.file.write(bytes)?;
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        Ok(())
    }

    /// Ends a part: what was written since the last one is `name`.
    pub(crate) fn end_part(&mut self, name: &str) {
        let blake3 = self.hasher.finalize().into();
        self.parts.push(Part { name: name.into(), end: self.size, blake3 });
        self.hasher.reset();
    }

    /// Syncs the file and returns its parts.
    pub(crate) fn finish(self) -> Result<Parts> {
        self.file.sync()?;
        Ok(Parts(self.parts))
    }
}
