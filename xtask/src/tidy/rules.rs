//! The rules about single files. Each is a row of [`RULES`] with examples that break it and that
//! keep it; a test checks every row against its examples.

use std::{mem, sync::LazyLock};

use regex::Regex;

use super::{
    Finding, SourceFile,
    code::{self, pattern},
};

/// A rule about the text or the name of one file.
#[cfg_attr(not(test), expect(dead_code, reason = "the examples are for the test"))]
struct Rule {
    /// The reason; ends each finding.
    why: &'static str,
    /// Whether the rule applies to a path.
    reads: fn(&str) -> bool,
    /// The violations, each with its line, from 1.
    check: fn(&SourceFile) -> Vec<(usize, String)>,
    /// Path and text of files with at least one finding.
    breaks: &'static [(&'static str, &'static str)],
    /// Path and text of files without a finding.
    keeps: &'static [(&'static str, &'static str)],
}

/// Path prefixes where `unsafe` is allowed: SIMD instructions, calls of CUDA, kernels with planted
/// defects, and a `no_std` binary that brings its own runtime.
const UNSAFE_ALLOWED: &[&str] = &[
    "crates/sparse24-cpu/src/simd",
    "crates/sparse24-cuda/src/",
    "crates/sparse24-cuda/tests/gpu/planted.rs",
    "tests/no-std/src/",
];

/// File and folder names that do not describe the contents.
const EMPTY_NAMES: &[&str] = &["common", "helper", "helpers", "misc", "mod", "util", "utils"];

/// Home directories and work trees of developers, not inside a longer path or a URL.
static LOCAL_PATH: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?:^|[^\w.~/-])(/(?:home|Users|root|work)/|C:\\Users\\)"));

static UNSAFE: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bunsafe\b"));

/// The target of a link in Markdown.
static LINK: LazyLock<Regex> = LazyLock::new(|| pattern(r"\]\([^)]*\)"));

static URL: LazyLock<Regex> = LazyLock::new(|| pattern(r"\S*://\S*"));

/// Most columns of a line.
const WIDTH: usize = 100;

/// First words of a doc comment that announce a riddle instead of a subject.
const OPENINGS: &[&str] = &["Of ", "Those of ", "What ", "As [`", "Who "];

/// Words in a comment for which a technical term exists: report, print or return; memory, space or
/// capacity. Text in backticks is code.
static WORDS: LazyLock<Regex> =
    LazyLock::new(|| pattern(r#"(?i)^[^"]*//(?:[^`]|`[^`]*`)*\b(tells?|told|room)\b"#));

/// Half a line, for the examples of the widths.
macro_rules! fifty {
    () => {
        "01234567890123456789012345678901234567890123456789"
    };
}

const RULES: &[Rule] = &[
    Rule {
        why: "the first lines describe the file and its invariant",
        reads: is_rust,
        check: |file| finding_if(!file.text.starts_with("//!"), "does not open with `//!`"),
        breaks: &[("a.rs", ""), ("a.rs", "// A file.\n"), ("a.rs", "use x;\n//! A file.\n")],
        keeps: &[("a.rs", "//! A file.\n")],
    },
    Rule {
        why: "unsafe code is confined to a few files",
        reads: |path| is_rust(path) && !UNSAFE_ALLOWED.iter().any(|place| path.starts_with(place)),
        check: |file| {
            lines(&code::only(&file.text), |line| UNSAFE.is_match(line).then(|| "`unsafe`".into()))
        },
        breaks: &[
            ("a.rs", "fn f() { unsafe { g() } }"),
            ("crates/sparse24-cpu/src/gemm.rs", "unsafe fn f() {}"),
        ],
        keeps: &[
            ("a.rs", "#![forbid(unsafe_code)] // unsafe"),
            ("crates/sparse24-cpu/src/simd/avx2.rs", "unsafe fn f() {}"),
        ],
    },
    Rule {
        why: "a name describes the contents, and the module of a folder foo/ is foo.rs",
        reads: is_rust,
        check: |file| {
            let mut parts = file.path.trim_end_matches(".rs").split('/');
            finding_if(parts.any(|part| EMPTY_NAMES.contains(&part)), "an empty name")
        },
        breaks: &[("crates/x/src/nn/mod.rs", ""), ("tests/common/shapes.rs", "")],
        keeps: &[("crates/x/src/utilisation.rs", "")],
    },
    Rule {
        why: "which exists on one machine only",
        reads: |_| true,
        check: |file| {
            lines(&file.text, |line| {
                Some(format!("a path under {}", &LOCAL_PATH.captures(line)?[1]))
            })
        },
        breaks: &[
            ("README.md", concat!("see `/ho", "me/me/x`")),
            ("a.toml", concat!("path = \"/ro", "ot/x\"")),
            ("a.txt", concat!("C:\\Us", "ers\\me")),
        ],
        keeps: &[
            ("README.md", concat!("https://example.org/ho", "me/x")),
            ("a.rs", concat!("target/wo", "rk/x")),
        ],
    },
    Rule {
        why: "the workspace's lints apply to every package",
        reads: |path| path == "Cargo.toml" || path.ends_with("/Cargo.toml"),
        check: |file| {
            let is_workspace = file.text.lines().any(|line| line == "[workspace]");
            finding_if(
                !is_workspace && !file.text.contains("[lints]\nworkspace = true\n"),
                "does not inherit the lints",
            )
        },
        breaks: &[("crates/x/Cargo.toml", "[package]\nname = \"x\"\n")],
        keeps: &[
            ("crates/x/Cargo.toml", "[package]\n[lints]\nworkspace = true\n"),
            ("Cargo.toml", "[workspace]\n"),
        ],
    },
    Rule {
        why: "a line has at most 100 columns",
        reads: |path| is_source(path) || path.ends_with(".md"),
        check: |file| {
            let mut in_fence = false;
            lines(&file.text, |line| {
                let width = if is_source(&file.path) {
                    columns(line)
                } else {
                    let is_fence = line.trim_start().starts_with("```");
                    in_fence ^= is_fence;
                    let is_free = is_fence || in_fence || line.trim_start().starts_with('|');
                    // Neither targets of links nor URLs can be broken.
                    let text = URL.replace_all(&LINK.replace_all(line, ""), "").into_owned();
                    if is_free { 0 } else { columns(&text) }
                };
                (width > WIDTH).then(|| format!("{width} columns"))
            })
        },
        breaks: &[
            ("a.rs", concat!(fifty!(), fifty!(), "0")),
            ("a.cu", concat!("// ", fifty!(), fifty!())),
            ("a.md", concat!(fifty!(), " ", fifty!())),
            ("a.md", concat!("[", fifty!(), "](a.md) ", fifty!())),
        ],
        keeps: &[
            ("a.cuh", concat!(fifty!(), fifty!())),
            ("a.rs", "// éééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééé"),
            ("a.txt", concat!(fifty!(), fifty!(), "0")),
            ("a.md", concat!("| ", fifty!(), fifty!())),
            ("a.md", concat!("```\n", fifty!(), fifty!(), "0\n```")),
            ("a.md", concat!(fifty!(), "[a](", fifty!(), ").")),
            ("a.md", concat!(fifty!(), " https://", fifty!())),
        ],
    },
    Rule {
        why: "a doc comment starts with its subject or verb",
        reads: is_rust,
        check: |file| {
            let mut starts = true;
            lines(&file.text, |line| {
                let line = line.trim();
                let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
                let text = text.unwrap_or_default().trim_start();
                let is_start = mem::replace(&mut starts, text.is_empty() || text == "# Errors");
                let opening = OPENINGS.iter().find(|&&opening| text.starts_with(opening))?;
                is_start.then(|| format!("a doc comment opens with {:?}", opening.trim()))
            })
        },
        breaks: &[
            ("a.rs", "//! What it is."),
            ("a.rs", "fn f() {}\n    /// Those of `x`.\n    x: u8,"),
            ("a.rs", "/// Adds.\n///\n/// # Errors\n///\n/// As [`f`]."),
        ],
        keeps: &[
            ("a.rs", "/// The sum\n/// Of a line that goes on."),
            ("a.rs", "// What follows is no doc comment."),
        ],
    },
    Rule {
        why: "a technical term says it better",
        reads: is_source,
        check: |file| {
            lines(&file.text, |line| Some(format!("`{}` in a comment", &WORDS.captures(line)?[1])))
        },
        breaks: &[
            ("a.rs", "/// Tells the shape."),
            ("a.cu", "int x; // There is no `x`, no room."),
        ],
        keeps: &[
            ("a.rs", "/// Calls `tell`; a roommate intelligently tells_x."),
            ("a.rs", "let room = \"told\";"),
            ("a.md", "tell"),
        ],
    },
];

/// Every violation in `file`.
pub(super) fn check(file: &SourceFile) -> Vec<Finding> {
    RULES.iter().flat_map(|rule| check_one(rule, file)).collect()
}

fn check_one(rule: &Rule, file: &SourceFile) -> Vec<Finding> {
    let found = if (rule.reads)(&file.path) { (rule.check)(file) } else { Vec::new() };
    let finding = |(line, what)| Finding::new(&file.path, line, what, rule.why);
    found.into_iter().map(finding).collect()
}

/// Whether a path is that of Rust or CUDA source.
pub(super) fn is_source(path: &str) -> bool {
    [".rs", ".cu", ".cuh"].iter().any(|extension| path.ends_with(extension))
}

fn is_rust(path: &str) -> bool {
    path.ends_with(".rs")
}

fn finding_if(broken: bool, what: &str) -> Vec<(usize, String)> {
    if broken { vec![(1, what.to_owned())] } else { Vec::new() }
}

/// The lines for which `find` has something to report.
fn lines(text: &str, mut find: impl FnMut(&str) -> Option<String>) -> Vec<(usize, String)> {
    (1..).zip(text.lines()).filter_map(|(number, line)| Some((number, find(line)?))).collect()
}

fn columns(line: &str) -> usize {
    line.chars().count()
}

#[cfg(test)]
mod tests {
    use super::{RULES, SourceFile, check_one};

    #[test]
    fn rules_hold_for_their_examples() {
        for rule in RULES {
            let findings = |&(path, text): &(&str, &str)| {
                check_one(rule, &SourceFile { path: path.into(), text: text.into() })
            };
            assert!(!rule.breaks.is_empty() && !rule.keeps.is_empty(), "no example: {}", rule.why);
            for example in rule.breaks {
                assert_ne!(findings(example), [], "{example:?} should break: {}", rule.why);
            }
            for example in rule.keeps {
                assert_eq!(findings(example), [], "{example:?} should keep: {}", rule.why);
            }
        }
    }

    #[test]
    fn a_finding_is_one_line() {
        let text = "//! A file.\n\nunsafe fn f() {}\n".into();
        let found = super::check(&SourceFile { path: "a.rs".into(), text });
        assert_eq!(
            found.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["a.rs:3: `unsafe`, unsafe code is confined to a few files"]
        );
    }
}
