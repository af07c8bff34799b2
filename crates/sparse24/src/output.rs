//! Standard output and standard error, either of which may be closed while we write.
//!
//! Invariant: a closed pipe never panics. What goes to standard output is the answer, so its loss
//! ends the command; what goes to standard error is for a person, and training goes on without.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
    path::Path,
};

use crate::failure::{Exit, Failure};

/// Writes to standard output.
pub(crate) fn write(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => {
            Failure::new(Exit::Unread, "standard output was closed by its reader")
        }
        _ => Failure::new(Exit::Io, format!("cannot write to standard output: {error}")),
    })
}

/// Writes a line to standard output.
pub(crate) fn line(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    write(format_args!("{text}\n"))
}

/// Writes a line to standard error, if anybody reads it.
pub(crate) fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// A path as one word of a command line for a shell.
pub(crate) fn word(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,=@%:".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

pub(crate) use sparse24_lab::counted;

/// [`line()`] as `println!`; leaves the function if it cannot be written.
macro_rules! say {
    ($($argument:tt)*) => {
        $crate::output::line(format_args!($($argument)*))?
    };
}

pub(crate) use say;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word() {
        for (path, expected) in [
            ("runs/a-1", "runs/a-1"),
            ("a b", "'a b'"),
            ("it's", r"'it'\''s'"),
            ("$x", "'$x'"),
            ("", "''"),
        ] {
            assert_eq!(word(Path::new(path)), expected);
        }
    }
}
