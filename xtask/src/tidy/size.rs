//! How long a Rust file may be: near 400 lines; 600 wants a reason, which is a row of [`LONG`].
//! Nothing else is measured.

use std::fmt::Write;

use super::{Finding, SourceFile};

/// From here on the listing notes a file.
const NOTED: usize = 400;

/// A file may be longer only with a reason.
const LIMIT: usize = 600;

/// How many files the listing shows.
const LISTED: usize = 15;

/// Files over [`LIMIT`], each with its reason.
const LONG: &[(&str, &str)] = &[];

/// Files over the limit without a reason, and reasons that nothing needs any more.
pub(super) fn check(files: &[SourceFile]) -> Vec<Finding> {
    check_against(LONG, files)
}

fn check_against(long: &[(&str, &str)], files: &[SourceFile]) -> Vec<Finding> {
    let rows = |path: &str| long.iter().any(|(listed, _)| *listed == path);
    let over: Vec<(usize, &str)> =
        sizes(files).into_iter().filter(|&(lines, _)| lines > LIMIT).collect();
    let unreasoned = over.iter().filter(|(_, path)| !rows(path)).map(|&(lines, path)| Finding {
        path: path.to_owned(),
        line: LIMIT + 1,
        what: format!("{lines} lines"),
        why: "over 600 a file is split, or gets a row with its reason in LONG (xtask/src/tidy/size.rs)",
    });
    let stale = long.iter().filter(|(listed, _)| !over.iter().any(|(_, path)| path == listed)).map(
        |(listed, _)| Finding {
            path: (*listed).to_owned(),
            line: 1,
            what: "has a row in LONG (xtask/src/tidy/size.rs)".to_owned(),
            why: "but is not over 600 lines",
        },
    );
    unreasoned.chain(stale).collect()
}

/// The largest files, one a line.
pub(super) fn listing(files: &[SourceFile]) -> String {
    let mut listing = String::from("largest files, in lines:\n");
    for (lines, path) in sizes(files).into_iter().take(LISTED) {
        let note = if lines > NOTED { "  over 400" } else { "" };
        writeln!(listing, "{lines:>6}  {path}{note}").expect("a string takes any text");
    }
    listing
}

/// Rust files with their lines, the largest first.
fn sizes(files: &[SourceFile]) -> Vec<(usize, &str)> {
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    let mut sizes: Vec<(usize, &str)> =
        rust.map(|file| (file.text.lines().count(), file.path.as_str())).collect();
    sizes.sort_by_key(|&(lines, path)| (std::cmp::Reverse(lines), path));
    sizes
}

#[cfg(test)]
mod tests {
    use super::{LIMIT, LISTED, NOTED, check_against, listing};
    use crate::tidy::SourceFile;

    fn file(path: &str, lines: usize) -> SourceFile {
        SourceFile { path: path.to_owned(), text: "x\n".repeat(lines) }
    }

    #[test]
    fn long_files_want_a_reason() {
        let files = [
            file("a.rs", LIMIT),
            file("b.rs", LIMIT + 1),
            file("c.rs", LIMIT + 2),
            file("long.md", 2 * LIMIT),
        ];
        let paths = |long: &[(&str, &str)]| {
            check_against(long, &files).into_iter().map(|f| f.path).collect::<Vec<_>>()
        };
        assert_eq!(paths(&[]), ["c.rs", "b.rs"]);
        assert_eq!(paths(&[("c.rs", "a table"), ("b.rs", "a table")]), [""; 0]);
        assert_eq!(
            paths(&[
                ("c.rs", "a table"),
                ("b.rs", "a table"),
                ("a.rs", "was long"),
                ("gone.rs", "was long")
            ]),
            ["a.rs", "gone.rs"]
        );
    }

    #[test]
    fn the_listing_shows_the_largest_and_notes_the_long() {
        let files: Vec<SourceFile> =
            (0..=LISTED).map(|i| file(&format!("{i}.rs"), NOTED + 1 - i)).collect();
        let listing = listing(&files);
        assert!(listing.contains("   401  0.rs  over 400\n   400  1.rs\n"), "{listing}");
        assert!(!listing.contains(&format!("{LISTED}.rs")), "{listing}");
    }
}
