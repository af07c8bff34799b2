//! Standard output and standard error, either of which may be closed while we write.
//!
//! Invariant: a closed pipe never panics. What goes to standard output is the answer, so its loss ends the command; what goes to standard
//! error is for a person, and training goes on without.

use std::{
    fmt,
    io::{self, ErrorKind, Write},
};

use crate::failure::{Exit, Failure};

/// Writes to standard output.
pub(crate) fn write(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Failure::new(Exit::Unread, "standard output was closed by its reader"),
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

/// [`line()`] as `println!`; leaves the function if it cannot be written.
macro_rules! say {
    ($($argument:tt)*) => {
        $crate::output::line(format_args!($($argument)*))?
    };
}

pub(crate) use say;
