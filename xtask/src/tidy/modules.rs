//! Finds cycles of modules. In each crate the modules must form a directed acyclic graph, level by
//! level: the top-level modules, then the direct submodules of each module. A file and its
//! submodules are one node, so uses between a module and its descendants do not count.
//!
//! A use is an import, or a path in code that starts with `crate`, `super` or `self`. The crate's
//! root is not a node: a name that it, or another ancestor, re-exports counts as a use of the
//! module that it comes from, unless a glob re-exports it. Items of `#[cfg(test)]` and files of
//! modules named `tests` are ignored, and inline modules are parts of their files. The code is
//! expected to be formatted by rustfmt.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use regex::{Captures, Regex};

use super::{
    Finding, SourceFile,
    code::{self, pattern},
};

/// Segments of a path, from the crate's root if absolute.
type Path = Vec<String>;

/// A path as written, and where.
struct Use<'a> {
    module: Path,
    path: Path,
    file: &'a str,
    line: usize,
}

/// The uses between the children of a module, by user and used child.
type Arrows<'a, 'b> = BTreeMap<(String, String), Vec<&'b Use<'a>>>;

#[derive(Default)]
struct Crate<'a> {
    modules: BTreeSet<Path>,
    uses: Vec<Use<'a>>,
    /// Path as written, by the importing module and the name it gets there.
    imports: BTreeMap<(Path, String), Path>,
}

/// The tree of an import, or a path in code. `pub(in crate::a)` is no use of `a`.
static USE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"\buse\s+(?<tree>[^;]+);|(?<place>\(in\s+)?\b(?<path>(?:crate|super|self)(?:::\w+)+)")
});

/// The innermost braces of a `use` tree, with the path before them.
static BRACES: LazyLock<Regex> = LazyLock::new(|| pattern(r"([\w:]*)\{([^{}]*)\}"));

/// One finding for every level of modules that has cycles.
pub(super) fn check(files: &[SourceFile]) -> Vec<Finding> {
    let root = |file: &SourceFile| {
        let path = &file.path;
        let source = path.strip_suffix("lib.rs").or_else(|| path.strip_suffix("main.rs"))?;
        source.ends_with("src/").then(|| source.to_owned())
    };
    let roots: BTreeSet<String> = files.iter().filter_map(root).collect();
    roots.iter().flat_map(|root| check_crate(root, files)).collect()
}

fn check_crate(root: &str, files: &[SourceFile]) -> Vec<Finding> {
    let mut all = Crate::default();
    for file in files {
        if let Some(module) = file.path.strip_prefix(root).and_then(module_of) {
            all.read(file, module);
        }
    }
    let name = root.trim_end_matches("/src/").rsplit('/').next().unwrap_or_default();
    let mut findings = Vec::new();
    for (parent, mut arrows) in all.arrows() {
        let names = loop {
            let users: BTreeSet<_> = arrows.keys().map(|(user, _)| user.clone()).collect();
            let used: BTreeSet<_> = arrows.keys().map(|(_, used)| used.clone()).collect();
            if users == used {
                break users;
            }
            // A module that nothing uses, or that uses nothing, is on no cycle.
            arrows.retain(|(from, to), _| used.contains(from) && users.contains(to));
        };
        let Some(first) = arrows.values().next().map(|places| places[0]) else { continue };
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        let place = [&[name.to_owned()], parent.as_slice()].concat().join("::");
        let what = format!("{names} form a cycle of modules in {place}");
        let why = "modules form a directed acyclic graph";
        let describe = |((from, to), places): (&(String, String), &Vec<&Use<'_>>)| {
            let Use { file, line, .. } = places[0];
            format!("{from} -> {to} at {file}:{line} ({} in all)", places.len())
        };
        let details = arrows.iter().map(describe).collect();
        findings.push(Finding { details, ..Finding::new(first.file, first.line, what, why) });
    }
    findings
}

/// The module that a file below `src/` holds; `None` for tests, binaries and other files.
fn module_of(path: &str) -> Option<Path> {
    let path: Path = path.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if path[0] == "bin" || path.iter().any(|part| part == "tests") {
        return None;
    }
    Some(if path == ["lib"] || path == ["main"] { Vec::new() } else { path })
}

impl<'a> Crate<'a> {
    /// Collects the uses of one file.
    fn read(&mut self, file: &'a SourceFile, module: Path) {
        let code = without_tests(&code::only(&file.text));
        for found in USE.captures_iter(&code) {
            let line = 1 + code[..found.get_match().start()].matches('\n').count();
            let mut add = |path: Path| {
                self.uses.push(Use { module: module.clone(), path, file: &file.path, line });
            };
            if let Some(tree) = found.name("tree") {
                for (path, name) in leaves(tree.as_str()) {
                    self.imports.insert((module.clone(), name), path.clone());
                    add(path);
                }
            } else if found.name("place").is_none() {
                add(found["path"].split("::").map(str::to_owned).collect());
            }
        }
        self.modules.insert(module);
    }

    /// `path` as written in `module`, from the root; `None` if it leads out of the crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Path> {
        match path.first()?.as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" | "super" => {
                let up = path.iter().filter(|part| *part == "super").count();
                let rest =
                    path.iter().skip_while(|part| ["self", "super"].contains(&part.as_str()));
                let base = &module[..module.len().checked_sub(up)?];
                Some(base.iter().chain(rest).cloned().collect())
            }
            name => self.modules.contains(&child(module, name)).then(|| [module, path].concat()),
        }
    }

    /// The module that `path` leads to, through re-exports of the ancestors of `module`.
    fn target(&self, module: &[String], path: &[String]) -> Option<Path> {
        let mut path = self.absolute(module, path)?;
        // More steps than any chain of re-exports has; a chain that loops ends too.
        for _ in 0..8 {
            let end = (0..=path.len()).rev().find(|&end| self.modules.contains(&path[..end]))?;
            let (found, rest) = path.split_at(end);
            let Some(name) = rest.first().filter(|_| module.starts_with(found)) else {
                return Some(found.to_vec());
            };
            let imported = self.imports.get(&(found.to_vec(), name.clone()));
            let source = imported.and_then(|import| self.absolute(found, import));
            let Some(source) = source else { return Some(found.to_vec()) };
            path = [&source, &rest[1..]].concat();
        }
        None
    }

    /// The uses between siblings, by parent.
    fn arrows(&self) -> BTreeMap<Path, Arrows<'a, '_>> {
        let mut arrows: BTreeMap<Path, Arrows<'a, '_>> = BTreeMap::new();
        for use_ in &self.uses {
            let Some(target) = self.target(&use_.module, &use_.path) else { continue };
            let shared = use_.module.iter().zip(&target).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (use_.module.get(shared), target.get(shared)) {
                let level = arrows.entry(target[..shared].to_vec()).or_default();
                level.entry((from.clone(), to.clone())).or_default().push(use_);
            }
        }
        arrows
    }
}

fn child(module: &[String], name: &str) -> Path {
    [module, &[name.to_owned()]].concat()
}

/// `code` with empty lines for items of tests, each of which ends at the indentation of its
/// attribute.
fn without_tests(code: &str) -> String {
    let mut skipped = None;
    let keep = |line| {
        let text = str::trim(line);
        let indentation = line.len() - line.trim_start().len();
        if text.starts_with("#[cfg(test)]") || text.starts_with("#[cfg(all(test,") {
            skipped = Some(indentation);
        }
        let Some(outer) = skipped else { return line };
        if indentation == outer && text.ends_with([';', ',', '}']) {
            skipped = None;
        }
        ""
    };
    code.lines().map(keep).collect::<Vec<_>>().join("\n")
}

/// The paths in the tree of a `use`, with the names that they get.
fn leaves(tree: &str) -> Vec<(Path, String)> {
    let mut flat: String = tree.replace(" as ", "=").split_whitespace().collect();
    while BRACES.is_match(&flat) {
        let spread = |found: &Captures<'_>| {
            let inside = found[2].split(',').filter(|leaf| !leaf.is_empty());
            inside.map(|leaf| format!("{}{leaf}", &found[1])).collect::<Vec<_>>().join(",")
        };
        flat = BRACES.replace_all(&flat, spread).into_owned();
    }
    let leaf = |leaf: &str| {
        let (path, name) = leaf.split_once('=').unwrap_or((leaf, ""));
        // The `self` of `a::{self}` adds nothing; a glob is a use of what it is below.
        let parts = path.split("::").enumerate();
        let parts = parts.filter(|(at, part)| *at == 0 || !["self", "*"].contains(part));
        let path: Path = parts.map(|(_, part)| part.to_owned()).collect();
        let name = if name.is_empty() { path[path.len() - 1].clone() } else { name.to_owned() };
        (path, name)
    };
    flat.split(',').map(leaf).collect()
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::{Finding, SourceFile};

    /// The findings in a crate with these files below `src/`.
    fn findings(files: &[(&str, &str)]) -> Vec<Finding> {
        let file = |(path, text): &(&str, &str)| SourceFile {
            path: format!("x/src/{path}"),
            text: (*text).to_owned(),
        };
        check(&files.iter().map(file).collect::<Vec<_>>())
    }

    fn cycles(files: &[(&str, &str)]) -> Vec<String> {
        findings(files).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn cycles_are_found_at_every_level() {
        for (text, what) in [
            ("use crate::b::B;", "an import"),
            ("use super::b;", "an import through super"),
            ("use crate::{c::C, b::{self, B}};", "a tree"),
            ("use crate::b::*;", "a glob"),
            ("fn f() -> crate::b::B { g() }", "a path in code"),
            ("use crate::B;", "a re-export of the root"),
            ("use crate::Renamed;", "a renamed re-export of the root"),
            ("macro_rules! m { () => { $crate::b::g() } }", "a path in a macro"),
            ("#[cfg(test)]\nmod tests {\n    use x;\n}\nuse crate::b::B;", "code after tests"),
        ] {
            let root = "mod a; mod b; pub use b::B; pub use b::B as Renamed;";
            let files = [("lib.rs", root), ("a.rs", text), ("b.rs", "use crate::a::A;")];
            assert_eq!(cycles(&files), ["a, b form a cycle of modules in x"], "{what}");
        }
        let nested = [
            ("main.rs", "mod a;"),
            ("a.rs", "mod b; mod c; pub use c::C;"),
            ("a/b.rs", "use super::C;"),
            ("a/c.rs", "use crate::a::d::D;"),
            ("a/d.rs", "fn f(x: super::b::B) {}"),
            ("e.rs", "use crate::a::C;"),
        ];
        assert_eq!(cycles(&nested), ["b, c, d form a cycle of modules in x::a"]);
    }

    #[test]
    fn other_uses_are_no_cycles() {
        for (text, what) in [
            ("// use crate::b::B;\nconst S: &str = \"crate::b\";", "prose"),
            ("#[cfg(test)]\nmod tests { use crate::b::B; }", "a block of tests"),
            ("#[cfg(test)]\n#[allow(unused)]\nuse crate::b::B;", "an import for tests"),
            ("use crate::a::inner; use self::inner::X;", "its own submodule"),
            ("use b::B; use std::b::C;", "another crate"),
            ("use crate::Root;", "an item of the root"),
            ("pub(in crate::b) fn f() {}", "a visibility"),
        ] {
            let files = [
                ("lib.rs", "mod a; mod b; pub use b::B; pub struct Root;"),
                ("a.rs", text),
                ("a/inner.rs", "use super::A;"),
                ("a/tests.rs", "use crate::b::B;"),
                ("b.rs", "use crate::a::A;"),
            ];
            assert_eq!(cycles(&files), [""; 0], "{what}");
        }
    }

    #[test]
    fn the_arrows_of_a_cycle_are_listed() {
        let files = [
            ("lib.rs", ""),
            ("a.rs", "\nuse crate::b::B;\nuse crate::b::C;\nuse crate::c::D;"),
            ("b.rs", "use crate::a::A;"),
            ("c.rs", ""),
        ];
        assert_eq!(
            findings(&files)[0].details,
            ["a -> b at x/src/a.rs:2 (2 in all)", "b -> a at x/src/b.rs:1 (1 in all)"]
        );
    }
}
