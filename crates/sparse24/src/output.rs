//! Standard output and standard error. Either may be closed while we write.
//!
//! Invariant: a closed pipe never causes a panic. Standard output carries the result, so the
//! command ends if it is lost. Standard error is informational: training continues without it.

use std::{
    fmt,
    io::{self, ErrorKind, IsTerminal, Write},
    sync::LazyLock,
};

use indicatif::MultiProgress;
use serde::Serialize;

use crate::failure::{Exit, Failure, Result};

pub(crate) fn write(text: fmt::Arguments<'_>) -> Result {
    let mut out = io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => {
            Failure::new(Exit::Unread, "standard output was closed by its reader")
        }
        _ => Failure::new(Exit::Io, format!("cannot write to standard output: {error}")),
    })
}

pub(crate) fn line(text: fmt::Arguments<'_>) -> Result {
    write(format_args!("{}\n", one_line(text)))
}

/// Writes indented JSON to standard output.
pub(crate) fn print_json(value: &impl Serialize) -> Result {
    let text = serde_json::to_string_pretty(value).expect("plain values");
    write(format_args!("{}\n", escaped(&text)))
}

/// JSON on one line.
pub(crate) fn json_line(value: &impl Serialize) -> String {
    escaped(&serde_json::to_string(value).expect("plain values"))
}

/// JSON in which harmful characters are escaped, so that its strings keep them.
fn escaped(json: &str) -> String {
    let escaped = |c: char| match is_harmful(c) {
        true => format!("\\u{:04x}", u32::from(c)),
        false => c.into(),
    };
    json.chars().map(escaped).collect()
}

/// The live lines at the bottom of standard error, if it is a terminal.
pub(crate) static LIVE: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Writes a line to standard error, above the live ones; errors are ignored.
pub(crate) fn note(text: impl fmt::Display) {
    let text = one_line(text);
    LIVE.suspend(|| drop(writeln!(io::stderr(), "{text}")));
}

/// Writes text that a model made. A terminal would obey its control characters.
pub(crate) fn write_made(text: &str) -> Result {
    match io::stdout().is_terminal() {
        true => write(format_args!("{}", printable(text))),
        false => write(format_args!("{text}")),
    }
}

/// Control characters but tabs and line feeds, and characters that change the direction of text.
fn is_harmful(c: char) -> bool {
    c.is_control() && !['\t', '\n'].contains(&c)
        || matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}')
        || ('\u{2066}'..='\u{2069}').contains(&c)
}

/// Text without harmful characters: paths and files may hold escape sequences for the terminal.
fn printable(text: &str) -> String {
    text.replace(is_harmful, "\u{fffd}")
}

/// The same without line feeds: one in a path or a name would begin a line of its own.
fn one_line(text: impl fmt::Display) -> String {
    printable(&text.to_string()).replace('\n', "\u{fffd}")
}

/// Notes that the path of a setting is about to be read: in the run directory of others it may be
/// any file.
pub(crate) fn note_outside(key: &str, path: &str) {
    if !path.is_empty() {
        note(format_args!("{key}: reads {path}"));
    }
}

pub(crate) use sparse24_lab::counted;
pub(crate) use sparse24_run::word;

/// `println!` through [`line()`]; returns from the function on failure.
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
    fn harmful_characters_are_replaced_and_escaped_in_json() {
        assert_eq!(json_line(&"a\u{200f}\u{61c}\n\u{9b}é"), r#""a\u200f\u061c\n\u009bé""#);
        assert_eq!(
            printable("a\tb\n\u{1b}[31m\u{9b}\u{202e}\u{61c}é"),
            "a\tb\n\u{fffd}[31m\u{fffd}\u{fffd}\u{fffd}é"
        );
    }
}
