//! `cargo xtask tidy`: conventions of this repository that rustc, rustfmt and clippy do not check.
//!
//! [`rules`] has a table of the rules about single files, [`layering`] a table of the allowed
//! dependencies between packages. [`modules`] finds cycles of modules, [`size`] limits sizes, and
//! [`links`] finds dead links. A finding prints as `path:line: what, why`. Files that git ignores
//! are not read.

use std::{collections::BTreeMap, fmt, fs, path::Path, process::Command, process::ExitCode};

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
    /// The rule's name in the summary.
    rule: &'static str,
    path: String,
    /// From 1.
    line: usize,
    what: String,
    why: &'static str,
    /// More lines, printed below.
    details: Vec<String>,
}

impl Finding {
    fn new(rule: &'static str, path: &str, line: usize, what: String, why: &'static str) -> Self {
        Self { rule, path: path.to_owned(), line, what, why, details: Vec::new() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}, {}", self.path, self.line, self.what, self.why)?;
        self.details.iter().try_for_each(|detail| write!(f, "\n    {detail}"))
    }
}

/// A text file: its path from the repository's root, with `/`, and its text.
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

/// Prints the total sizes, every finding and a summary; fails if there is a finding.
pub(crate) fn run() -> Result<ExitCode> {
    let root = root()?;
    let paths = paths(root)?;
    let files = text_files(root, &paths);
    let mut findings = layering::check(&output(
        Command::new(env!("CARGO")).args(["metadata", "--no-deps", "--format-version", "1"]),
        root,
    )?)?;
    findings.extend(files.iter().flat_map(rules::check));
    findings.extend(modules::check(&files));
    findings.extend(size::check(&files));
    findings.extend(links::check(&files, &paths));
    findings.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));

    print!("{}", size::listing(&files));
    findings.iter().for_each(|finding| println!("{finding}"));
    println!("tidy: {} text files, {} findings{}", files.len(), findings.len(), by_rule(&findings));
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The number of findings of each rule that has some, in brackets.
fn by_rule(findings: &[Finding]) -> String {
    let mut counts = BTreeMap::new();
    findings.iter().for_each(|finding| *counts.entry(finding.rule).or_insert(0) += 1);
    let counts: Vec<String> =
        counts.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
    if counts.is_empty() { String::new() } else { format!(" ({})", counts.join(", ")) }
}

/// The paths of all tracked files, and of untracked files that are not ignored.
fn paths(root: &Path) -> Result<Vec<String>> {
    let listed =
        output(Command::new("git").args(["ls-files", "-co", "-z", "--exclude-standard"]), root)?;
    // A deleted file may still be in the index.
    Ok(listed
        .split('\0')
        .filter(|path| !path.is_empty() && root.join(path).exists())
        .map(str::to_owned)
        .collect())
}

/// The files of `paths` that are UTF-8.
fn text_files(root: &Path, paths: &[String]) -> Vec<SourceFile> {
    let read = |path: &String| {
        Some(SourceFile { path: path.clone(), text: fs::read_to_string(root.join(path)).ok()? })
    };
    paths.iter().filter_map(read).collect()
}
