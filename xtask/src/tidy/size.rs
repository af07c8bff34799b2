//! Limits on size: of each Rust file, of `sparse24-train`, and of all source together.

use super::{Finding, SourceFile};

/// Most lines of a Rust file.
const LIMIT: usize = 600;

/// The crate that holds what is trained and how, and nothing else.
const SUBJECT: &str = "crates/sparse24-train/src/";

/// Most lines of [`SUBJECT`].
const SUBJECT_LINES: usize = 8_000;

/// Most bytes of all Rust and CUDA files together, whitespace left out.
const TOTAL: usize = 3_450_000;

/// Every limit that is exceeded.
pub(super) fn check(files: &[SourceFile]) -> Vec<Finding> {
    let (mut findings, mut subject, mut total) = (Vec::new(), 0, 0);
    for SourceFile { path, text } in files.iter().filter(|file| file.is_source()) {
        let lines = text.lines().count();
        if path.ends_with(".rs") && lines > LIMIT {
            let why = "a file over 600 lines is split";
            findings.push(Finding::new(path, LIMIT + 1, format!("{lines} lines"), why));
        }
        subject += if path.starts_with(SUBJECT) { lines } else { 0 };
        total += text.bytes().filter(|byte| !byte.is_ascii_whitespace()).count();
    }
    if subject > SUBJECT_LINES {
        let what = format!("{subject} lines, limit {SUBJECT_LINES}");
        let why = "devices belong to sparse24-backend, configuration and files to sparse24-run";
        findings.push(Finding::new(SUBJECT, 1, what, why));
    }
    if total > TOTAL {
        let what = format!("{total} non-whitespace bytes of source, limit {TOTAL}");
        findings.push(Finding::new("all files", 1, what, "source that is not needed is deleted"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold() {
        let file = |path: &str, lines| SourceFile { path: path.into(), text: "x\n".repeat(lines) };
        let subject = |lines| file(&format!("{SUBJECT}a.cu"), lines);
        for (files, expected) in [
            (vec![file("a.rs", LIMIT), file("long.md", TOTAL + 1)], [].as_slice()),
            (vec![file("b.rs", LIMIT + 1)], &["b.rs"]),
            (vec![subject(SUBJECT_LINES)], &[]),
            (vec![subject(SUBJECT_LINES), subject(1)], &[SUBJECT]),
            (vec![file("a.cu", TOTAL)], &[]),
            (vec![file("a.cu", TOTAL), file("b.cuh", 1)], &["all files"]),
        ] {
            let paths: Vec<String> = check(&files).into_iter().map(|f| f.path).collect();
            assert_eq!(paths, expected);
        }
    }
}
