//! The rules about one file: a row each, with a file that breaks it and one that keeps it. The test
//! below runs every row against its own examples, so a rule that cannot fail does not pass. Add a
//! rule by adding its row.

use super::{Finding, SourceFile, code};

/// A rule about the text or the name of one file.
struct Rule {
    /// Why the house wants it; ends each finding.
    why: &'static str,
    /// Which paths it reads.
    reads: fn(&str) -> bool,
    /// What is wrong, with the line, from 1.
    check: fn(&SourceFile) -> Vec<(usize, String)>,
    /// Path and text of files with at least one finding.
    #[cfg_attr(not(test), expect(dead_code, reason = "the examples are for the test"))]
    breaks: &'static [(&'static str, &'static str)],
    /// Path and text of files without a finding.
    #[cfg_attr(not(test), expect(dead_code, reason = "the examples are for the test"))]
    keeps: &'static [(&'static str, &'static str)],
}

/// The only places where `unsafe` may stand, as beginnings of paths: vector instructions, calls of
/// CUDA, defects planted to be found, and the runtime that std would bring.
const UNSAFE_LIVES_IN: &[&str] = &[
    "crates/sparse24-cpu/src/simd",
    "crates/sparse24-cuda/src/",
    "crates/sparse24-cuda/tests/gpu/planted.rs",
    "tests/no-std/src/",
];

/// Crates that the compiler holds to no `unsafe` at all.
const FORBIDS_UNSAFE: &[&str] = &["crates/sparse24-core/src/lib.rs", "xtask/src/main.rs"];

/// Names that say nothing about what is inside.
const EMPTY_NAMES: &[&str] = &["common", "helper", "helpers", "misc", "mod", "util", "utils"];

/// Where the home directories and work trees of developers begin. Each is written in two parts, so
/// as not to be found here.
const DEVELOPER_ROOTS: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("C:\\Us", "ers\\"),
];

const RULES: &[Rule] = &[
    Rule {
        why: "a reader first learns what the file is, its invariant and what is deliberately absent",
        reads: is_rust,
        check: |file| finding_if(!file.text.starts_with("//!"), "does not open with `//!`"),
        breaks: &[
            ("a.rs", ""),
            ("a.rs", "// What it is.\n"),
            ("a.rs", "use x;\n//! What it is.\n"),
        ],
        keeps: &[("a.rs", "//! What it is.\n")],
    },
    Rule {
        why: "unsafe lives in a few files that argue for it",
        reads: |path| is_rust(path) && !UNSAFE_LIVES_IN.iter().any(|place| path.starts_with(place)),
        check: |file| {
            let lines = code::lines_with_word(&code::only(&file.text), "unsafe");
            lines.into_iter().map(|line| (line, "`unsafe`".to_owned())).collect()
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
        why: "this crate promises it to who embeds it",
        reads: |path| FORBIDS_UNSAFE.contains(&path),
        check: |file| {
            finding_if(
                !code::only(&file.text).contains("#![forbid(unsafe_code)]"),
                "no `#![forbid(unsafe_code)]`",
            )
        },
        breaks: &[("crates/sparse24-core/src/lib.rs", "//! #![forbid(unsafe_code)]\n")],
        keeps: &[
            ("crates/sparse24-core/src/lib.rs", "#![no_std]\n#![forbid(unsafe_code)]\n"),
            ("a.rs", ""),
        ],
    },
    Rule {
        why: "a file or folder is named after what it holds, and a folder foo/ has its face in foo.rs",
        reads: is_rust,
        check: |file| {
            let mut parts = file.path.trim_end_matches(".rs").split('/');
            finding_if(parts.any(|part| EMPTY_NAMES.contains(&part)), "a name that says nothing")
        },
        breaks: &[
            ("crates/x/src/nn/mod.rs", ""),
            ("tests/common/shapes.rs", ""),
            ("crates/x/src/utils.rs", ""),
        ],
        keeps: &[("crates/x/src/model.rs", ""), ("crates/x/src/utilisation.rs", "")],
    },
    Rule {
        why: "what lands is finished",
        reads: is_rust,
        check: |file| {
            let code = code::only(&file.text);
            let macros = ["todo!", "unimplemented!", "dbg!"];
            macros
                .iter()
                .flat_map(|name| {
                    lines_with(&code, name).map(move |line| (line, format!("`{name}`")))
                })
                .collect()
        },
        breaks: &[
            ("a.rs", "fn f() { todo!() }"),
            ("a.rs", "\nunimplemented!()"),
            ("a.rs", "dbg!(x)"),
        ],
        keeps: &[("a.rs", "// todo!\nlet x = \"dbg!\";")],
    },
    Rule {
        why: "history is git's business",
        reads: is_rust,
        check: |file| {
            let comments = (1..)
                .zip(file.text.lines().map(str::trim_start))
                .filter_map(|(line, text)| Some((line, text.strip_prefix("// ")?)));
            comments
                .filter(|(_, text)| reads_like_code(text))
                .map(|(line, _)| (line, "commented-out code".to_owned()))
                .collect()
        },
        breaks: &[
            ("a.rs", "// let x = 1;"),
            ("a.rs", "    // use a::b;"),
            ("a.rs", "// if x {"),
            ("a.rs", "// self.count += 1;"),
            ("a.rs", "// println!(\"{x}\");"),
            ("a.rs", "// x = y.z();"),
            ("a.rs", "// pub(crate) fn f(x: f32) -> f32 {"),
            ("a.rs", "// }"),
        ],
        keeps: &[
            ("a.rs", "// If x, then y; let z be 1;"),
            ("a.rs", "// in   values bf16 [m,k/2]; meta u32"),
            ("a.rs", "// D = {4, 8, C}: the nibbles;"),
            ("a.rs", "/// let x = 1;"),
            ("a.rs", "//! use a::b;"),
            ("a.rs", "// for every group the pair is kept;"),
            ("a.rs", "// SAFETY: the check above;"),
        ],
    },
    Rule {
        why: "it exists on one machine only",
        reads: |_| true,
        check: |file| {
            let lines = |root: &'static str| {
                let found = move |line: &str| {
                    line.match_indices(root).any(|(at, _)| starts_a_path(&line[..at]))
                };
                let numbered = (1..).zip(file.text.lines());
                numbered
                    .filter(move |(_, line)| found(line))
                    .map(move |(line, _)| (line, format!("a path under {root}")))
            };
            DEVELOPER_ROOTS.iter().copied().flat_map(lines).collect()
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
        why: "the workspace's lints hold everywhere",
        reads: |path| path == "Cargo.toml" || path.ends_with("/Cargo.toml"),
        check: |file| {
            let of_another_workspace = file.text.lines().any(|line| line == "[workspace]");
            finding_if(
                !of_another_workspace && !file.text.contains("[lints]\nworkspace = true\n"),
                "does not inherit the lints",
            )
        },
        breaks: &[("crates/x/Cargo.toml", "[package]\nname = \"x\"\n")],
        keeps: &[
            ("crates/x/Cargo.toml", "[package]\n[lints]\nworkspace = true\n"),
            ("Cargo.toml", "[workspace]\n"),
        ],
    },
];

/// Every rule that `file` breaks.
pub(super) fn check(file: &SourceFile) -> Vec<Finding> {
    RULES.iter().flat_map(|rule| check_one(rule, file)).collect()
}

fn check_one(rule: &Rule, file: &SourceFile) -> Vec<Finding> {
    let found = if (rule.reads)(&file.path) { (rule.check)(file) } else { Vec::new() };
    found
        .into_iter()
        .map(|(line, what)| Finding { path: file.path.clone(), line, what, why: rule.why })
        .collect()
}

fn is_rust(path: &str) -> bool {
    path.ends_with(".rs")
}

fn finding_if(broken: bool, what: &str) -> Vec<(usize, String)> {
    if broken { vec![(1, what.to_owned())] } else { Vec::new() }
}

fn lines_with<'a>(text: &'a str, part: &'a str) -> impl Iterator<Item = usize> + 'a {
    (1..).zip(text.lines()).filter(move |(_, line)| line.contains(part)).map(|(number, _)| number)
}

/// Whether a path can start after `before`: it is not the middle of a longer one, or of an address.
fn starts_a_path(before: &str) -> bool {
    !before.ends_with(|c: char| c.is_alphanumeric() || "._-~/".contains(c))
}

/// Whether a comment's text is a statement or the head of a block rather than a sentence. It would
/// rather miss than accuse.
fn reads_like_code(text: &str) -> bool {
    let text = text.trim();
    let starts = |words: &[&str]| words.iter().any(|word| text.starts_with(word));
    if text == "}" || text == "{" {
        return true;
    }
    if text.ends_with('{') {
        return starts(&[
            "if ", "for ", "while ", "match ", "loop ", "else ", "fn ", "pub ", "pub(", "impl ",
            "struct ", "enum ", "mod ",
        ]);
    }
    let Some(statement) = text.strip_suffix(';') else { return false };
    let names_a_place = |place: &str| {
        !place.is_empty() && place.chars().all(|c| c.is_alphanumeric() || "_.:*[]!".contains(c))
    };
    let declares = (starts(&["let ", "const ", "static "]) && statement.contains('='))
        || (starts(&["use ", "pub use "]) && statement.contains("::"));
    let calls = statement.ends_with(')')
        && statement.split_once('(').is_some_and(|(name, _)| names_a_place(name));
    // Equations end comments too; a call on the right makes it code.
    let assigns = statement
        .split_once('=')
        .is_some_and(|(place, value)| names_a_place(place.trim_end()) && value.ends_with("()"));
    let updates = ["+=", "-=", "*=", "/="].iter().any(|sign| {
        statement.split_once(sign).is_some_and(|(place, _)| names_a_place(place.trim_end()))
    });
    declares || calls || assigns || updates || starts(&["return "])
}

#[cfg(test)]
mod tests {
    use super::{RULES, SourceFile, check_one};

    #[test]
    fn every_rule_finds_what_breaks_it_and_nothing_else() {
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
        let file = SourceFile {
            path: "a.rs".into(),
            text: "//! What it is.\n\nfn f() { todo!() }\n".into(),
        };
        let lines: Vec<String> = super::check(&file).iter().map(ToString::to_string).collect();
        assert_eq!(lines, ["a.rs:3: `todo!`, what lands is finished"]);
    }
}
