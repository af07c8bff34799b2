//! The files of a corpus: which there are, and which are text.

use std::{
    fs, io,
    path::{Path, PathBuf},
    str::Utf8Error,
};

use super::shard::is_shard;
use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    Lines,
    Parquet,
}

/// The format and whether it is compressed, by the ending of the name.
pub(super) fn format(path: &Path) -> (Format, bool) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let (name, is_compressed) = match name.strip_suffix(".zst") {
        Some(name) => (name, true),
        None => (name.as_str(), false),
    };
    let format = match name.rsplit_once('.') {
        Some((_, "jsonl" | "ndjson")) => Format::Lines,
        Some((_, "parquet")) => Format::Parquet,
        _ => Format::Text,
    };
    (format, is_compressed)
}

/// Whether a file is plain text by its name.
pub(super) fn is_plain(path: &Path) -> bool {
    format(path) == (Format::Text, false)
}

/// Refuses what begins like a token shard.
pub(super) fn check_text(path: &Path, head: &[u8]) -> Result {
    // nanoGPT's shards have nothing but their name.
    if is_shard(head) || path.extension().is_some_and(|kind| kind == "bin") {
        bail!(
            path,
            "is a token shard, not text; to train on shards, name a folder with some to \
                       train on and some to evaluate on, such as train.bin and val.bin"
        );
    }
    Ok(())
}

/// The error of bytes that are not UTF-8, which start at this offset of the text.
pub(super) fn no_text(path: &Path, bytes: &[u8], start: usize, error: Utf8Error) -> Error {
    let (byte, offset) = (bytes[error.valid_up_to()], start + error.valid_up_to());
    let problem = format!(
        "is not UTF-8 text: byte {byte:#04x} at offset {offset}; convert it or take it out of the \
            corpus"
    );
    Error::file(path, problem)
}

/// Appends the files below `folder`, in order.
pub(crate) fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result {
    let failed = |e: io::Error| Error::io("read", folder, e);
    let mut entries =
        fs::read_dir(folder).map_err(failed)?.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    entries.retain(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
    entries.sort_by(|a, b| a.file_name().as_encoded_bytes().cmp(b.file_name().as_encoded_bytes()));
    for entry in entries {
        let path = entry.path();
        let kind = entry.file_type().map_err(|e| Error::io("read", &path, e))?;
        if kind.is_dir() {
            list(&path, files)?;
        } else if kind.is_file()
            || kind.is_symlink()
                && fs::metadata(&path).map_err(|e| Error::io("read", &path, e))?.is_file()
        {
            files.push(path);
        }
    }
    Ok(())
}
