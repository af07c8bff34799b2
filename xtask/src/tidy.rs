//! `cargo xtask tidy`: the rules of the house that neither rustc, rustfmt nor clippy knows.
//!
//! A rule about one file is a row of `rules::RULES`; who may depend on whom is the table
//! `layering::FLOORS`; how long a file may be is in [`size`]; [`links`] looks for dead ones. Each
//! finding is one line, `path:line: what, why`. Files that git ignores are not read.

use std::{fmt, fs, path::Path, process::Command, process::ExitCode};

use crate::{Result, output};

mod code;
mod layering;
mod links;
mod rules;
mod size;

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    path: String,
    /// From 1.
    line: usize,
    what: String,
    why: &'static str,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}, {}", self.path, self.line, self.what, self.why)
    }
}

/// A text file: its path from the repository's root, with `/`, and its text.
struct SourceFile {
    path: String,
    text: String,
}

/// Prints every finding and the largest files; fails if there is a finding.
pub(crate) fn run() -> Result<ExitCode> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no workspace")?;
    let paths = paths(root)?;
    let files = text_files(root, &paths);
    let packages = layering::packages(&output(
        Command::new(env!("CARGO")).args(["metadata", "--no-deps", "--format-version", "1"]),
        root,
    )?)?;

    let mut findings = layering::check(&packages);
    findings.extend(files.iter().flat_map(rules::check));
    findings.extend(size::check(&files));
    findings.extend(links::check(&files, &paths));
    findings.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));

    print!("{}", size::listing(&files));
    for finding in &findings {
        println!("{finding}");
    }
    println!(
        "tidy: {} packages, {} text files, {} findings",
        packages.len(),
        files.len(),
        findings.len()
    );
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Every file that is tracked, or untracked and not ignored, from the root.
fn paths(root: &Path) -> Result<Vec<String>> {
    let listed =
        output(Command::new("git").args(["ls-files", "-co", "-z", "--exclude-standard"]), root)?;
    // A file that was deleted may still be in the index.
    Ok(listed
        .split('\0')
        .filter(|path| !path.is_empty() && root.join(path).exists())
        .map(str::to_owned)
        .collect())
}

/// Those of `paths` that are UTF-8.
fn text_files(root: &Path, paths: &[String]) -> Vec<SourceFile> {
    let read = |path: &String| {
        Some(SourceFile { path: path.clone(), text: fs::read_to_string(root.join(path)).ok()? })
    };
    paths.iter().filter_map(read).collect()
}
