//! `log.txt`: the messages of a run, each line with its time (UTC).
//!
//! Invariant: lines are only appended, each by one write.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use jiff::Timestamp;

use crate::{
    Error, Result,
    disk::{self, As},
};

/// Maximum number of bytes searched for the first save; a sparse file may be of any length.
const SEARCHED: u64 = 16 << 20;

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
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), file: disk::open_as(path, As::Appended)? })
    }

    /// A second handle.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn try_clone(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(|e| Error::io("open", &self.path, e))?;
        Ok(Self { path: self.path.clone(), file })
    }

    /// Whether a log reports a saved checkpoint; no log reports none.
    pub(super) fn reports_save(path: &Path) -> bool {
        let Ok((file, _)) = disk::open(path) else { return false };
        let mut lines = BufReader::new(file.take(SEARCHED)).lines().map_while(Result::ok);
        lines.any(|line| line.contains(": saved "))
    }

    /// Appends one line; newlines in `text` become spaces.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn line(&mut self, text: &str) -> Result {
        let line = format!("{} {}\n", now(), text.replace(['\n', '\r'], " "));
        self.file.write_all(line.as_bytes()).map_err(|e| Error::io("write", &self.path, e))
    }
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
