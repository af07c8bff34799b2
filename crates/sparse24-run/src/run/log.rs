//! `log.txt`: the messages of a run, each line with its time (UTC).
//!
//! Invariant: lines are only appended, each by one write.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    time::SystemTime,
};

use jiff::Timestamp;

use crate::Error;

/// An open `log.txt`.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens for appending, or creates the file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = append_to(path)?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends one line; newlines in `text` become spaces.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn line(&mut self, text: &str) -> Result<(), Error> {
        let line = format!("{} {}\n", now(), text.replace(['\n', '\r'], " "));
        self.file.write_all(line.as_bytes()).map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Opens a file for appending, or creates it.
pub(super) fn append_to(path: &Path) -> Result<File, Error> {
    File::options().append(true).create(true).open(path).map_err(|e| Error::io("open", path, e))
}

/// A time as `20260131-235959` (UTC), for names of directories.
#[must_use]
pub fn timestamp(time: SystemTime) -> String {
    format(time, "%Y%m%d-%H%M%S")
}

/// The time now, as `2026-01-31T23:59:59Z`.
pub(super) fn now() -> String {
    format(SystemTime::now(), "%Y-%m-%dT%H:%M:%SZ")
}

fn format(time: SystemTime, format: &str) -> String {
    // A clock outside the years -9999 to 9999 counts as 1970.
    Timestamp::try_from(time).unwrap_or_default().strftime(format).to_string()
}
