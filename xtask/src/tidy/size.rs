//! Limits on size: of each Rust file, of `sparse24-train`, and of all source together.

use std::cmp::Reverse;

use super::{Finding, SourceFile};

/// Most lines of a Rust file.
const LIMIT: usize = 600;

/// The crate that holds what is trained and how, and nothing else.
const SUBJECT: &str = "crates/sparse24-train/src/";

/// Most lines of [`SUBJECT`].
const SUBJECT_LINES: usize = 8_000;

/// Most bytes of all Rust and CUDA files together, whitespace left out.
const TOTAL: usize = 2_190_000;

/// Every limit that is exceeded.
pub(super) fn check(files: &[SourceFile]) -> Vec<Finding> {
    let finding = |path, line, what, why| Finding::new("sizes", path, line, what, why);
    let long = sizes(files).into_iter().filter(|&(lines, _)| lines > LIMIT);
    let mut findings: Vec<Finding> = long
        .map(|(lines, path)| {
            finding(path, LIMIT + 1, format!("{lines} lines"), "a file over 600 lines is split")
        })
        .collect();
    let (subject, total) = totals(files);
    if subject > SUBJECT_LINES {
        let why = "configuration, files and reports belong to sparse24-run or sparse24-lab";
        findings.push(finding(SUBJECT, 1, format!("{subject} lines, limit {SUBJECT_LINES}"), why));
    }
    if total > TOTAL {
        let what = format!("{total} non-whitespace bytes of source, limit {TOTAL}");
        findings.push(finding("all files", 1, what, "source that is not needed is deleted"));
    }
    findings
}

/// The totals that have a limit, one per line.
pub(super) fn listing(files: &[SourceFile]) -> String {
    let (subject, total) = totals(files);
    format!(
        "{SUBJECT}: {subject} lines (limit {SUBJECT_LINES})\n\
         all source: {total} non-whitespace bytes (limit {TOTAL})\n"
    )
}

/// Lines of [`SUBJECT`], and bytes of all Rust and CUDA files without whitespace.
fn totals(files: &[SourceFile]) -> (usize, usize) {
    let subject = sizes(files).into_iter().filter(|(_, path)| path.starts_with(SUBJECT));
    let source = files.iter().filter(|file| file.is_source());
    let bytes = |file: &SourceFile| file.text.bytes().filter(|b| !b.is_ascii_whitespace()).count();
    (subject.map(|(lines, _)| lines).sum(), source.map(bytes).sum())
}

/// Rust files with their numbers of lines, the largest first.
fn sizes(files: &[SourceFile]) -> Vec<(usize, &str)> {
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    let mut sizes: Vec<(usize, &str)> =
        rust.map(|file| (file.text.lines().count(), file.path.as_str())).collect();
    sizes.sort_by_key(|&(lines, path)| (Reverse(lines), path));
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, lines: usize) -> SourceFile {
        SourceFile { path: path.to_owned(), text: "x\n".repeat(lines) }
    }

    #[test]
    fn limits_hold() {
        let in_subject = |lines| {
            (0..20).map(|i| file(&format!("{SUBJECT}{i}.rs"), lines / 20)).collect::<Vec<_>>()
        };
        for (files, expected) in [
            (vec![file("a.rs", LIMIT), file("long.md", TOTAL + 1)], [].as_slice()),
            (vec![file("b.rs", LIMIT + 1), file("c.rs", LIMIT + 2)], &["c.rs", "b.rs"]),
            (in_subject(SUBJECT_LINES), &[]),
            (in_subject(SUBJECT_LINES + 20), &[SUBJECT]),
            (vec![file("a.cu", TOTAL)], &[]),
            (vec![file("a.cu", TOTAL), file("b.cuh", 1)], &["all files"]),
        ] {
            let paths: Vec<String> = check(&files).into_iter().map(|f| f.path).collect();
            assert_eq!(paths, expected);
        }
    }
}
