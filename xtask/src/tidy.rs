//! `cargo xtask tidy`: conventions of this repository that rustc, rustfmt and clippy do not check.
//!
//! [`rules`] has a table of the rules about single files, [`layering`] a table of the allowed
//! dependencies between packages. [`modules`] finds cycles of modules, [`size`] limits sizes, and
//! [`links`] finds dead links. A finding prints as `path:line: what, why`. Files that git ignores
//! are not read.

use std::{
    fmt, fs,
    process::{Command, ExitCode},
};

use crate::{Result, output, root};

mod code;
mod layering;
mod links;
mod modules;
mod rules;
mod size;

/// One violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    path: String,
    /// From 1.
    line: usize,
    what: String,
    why: &'static str,
    /// More lines, printed below.
    details: Vec<String>,
}

impl Finding {
    fn new(path: &str, line: usize, what: String, why: &'static str) -> Self {
        Self { path: path.to_owned(), line, what, why, details: Vec::new() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}, {}", self.path, self.line, self.what, self.why)?;
        self.details.iter().try_for_each(|detail| write!(f, "\n    {detail}"))
    }
}

/// A UTF-8 file: its path from the repository's root, with `/`, and its text.
struct SourceFile {
    path: String,
    text: String,
}

impl SourceFile {
    /// Whether it is Rust or CUDA source.
    fn is_source(&self) -> bool {
        rules::is_source(&self.path)
    }
}

/// Prints every finding and their number; fails if there is one.
pub(crate) fn run() -> Result<ExitCode> {
    let root = root()?;
    let listed =
        output(Command::new("git").args(["ls-files", "-co", "-z", "--exclude-standard"]), root)?;
    // A deleted file may still be in the index, and pictures are no text.
    let read = |path: &str| {
        Some(SourceFile { path: path.to_owned(), text: fs::read_to_string(root.join(path)).ok()? })
    };
    let files: Vec<SourceFile> = listed.split('\0').filter_map(read).collect();
    let mut findings = layering::check(&output(
        Command::new(env!("CARGO")).args(["metadata", "--no-deps", "--format-version", "1"]),
        root,
    )?)?;
    findings.extend(files.iter().flat_map(rules::check));
    findings.extend(modules::check(&files));
    findings.extend(size::check(&files));
    findings.extend(links::check(root, &files));
    findings.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));

    findings.iter().for_each(|finding| println!("{finding}"));
    println!("tidy: {} text files, {} findings", files.len(), findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
