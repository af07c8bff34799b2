//! `log.txt`: what a run said, each line under the time it was said (UTC).
//!
//! Invariant: lines are only appended, each by one write. Deliberately absent: levels, and the
//! terminal.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::Error;

/// An open `log.txt`.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens for appending; creates the file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = File::options()
            .append(true)
            .create(true)
            .open(path)
            .map_err(|e| Error::io("open", path, e))?;
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

/// A time as `20260131-235959` (UTC), for names of directories; times before 1970 count as 1970.
#[must_use]
pub fn timestamp(time: SystemTime) -> String {
    let [year, month, day, hour, minute, second] = civil(seconds(time));
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// The time now, as `2026-01-31T23:59:59Z`.
pub(super) fn now() -> String {
    let [year, month, day, hour, minute, second] = civil(seconds(SystemTime::now()));
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Seconds since 1970 in the Gregorian calendar: year, month, day, hour, minute, second.
fn civil(seconds: u64) -> [u64; 6] {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March put the leap day last; 719,468 days lie between 0000-03-01 and
    // 1970-01-01.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // From March on, five months have 153 days.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    [400 * era + year_of_era + carry, month, day, second / 3_600, second / 60 % 60, second % 60]
}
