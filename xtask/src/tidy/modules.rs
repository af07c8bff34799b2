//! Finds cycles of modules. In each crate the modules must form a directed acyclic graph, level by
//! level: the top-level modules, then the direct submodules of each module. A file and its
//! submodules are one node, so uses between a module and its descendants do not count.
//!
//! A use is an import or a path in code that starts with `crate`, `super`, `self` or the name of a
//! child module. The crate's root is not a node: a name that it, or another ancestor, re-exports
//! counts as a use of the module that it comes from, unless a glob re-exports it. Test code is
//! ignored.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use regex::Regex;

use super::{
    Finding, SourceFile,
    code::{self, pattern},
};

/// Segments of a path, from the crate's root if absolute.
type Path = Vec<String>;

/// A line of code and a token on it: an identifier, a number, `::` or one other character.
type Token<'a> = (usize, &'a str);

/// A path as written, and where.
struct Use<'a> {
    module: Path,
    path: Path,
    file: &'a str,
    line: usize,
}

#[derive(Default)]
struct Crate<'a> {
    modules: BTreeSet<Path>,
    test_modules: BTreeSet<Path>,
    uses: Vec<Use<'a>>,
    /// Path as written, by the importing module and the name it gets there.
    imports: BTreeMap<(Path, String), Path>,
}

/// One finding for every strongly connected component of more than one module.
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
            all.read(&file.path, module, &file.text);
        }
    }
    let name = root.trim_end_matches("/src/").rsplit('/').next().unwrap_or_default();
    let mut findings = Vec::new();
    for (parent, arrows) in all.arrows() {
        for component in components(&arrows) {
            let held: Vec<_> = arrows
                .iter()
                .filter(|((from, to), _)| component.contains(from) && component.contains(to))
                .collect();
            let describe = |((from, to), places): &(&(String, String), &Vec<&Use<'_>>)| {
                let first = places[0];
                let count = places.len();
                format!("{from} -> {to} at {}:{} ({count} in all)", first.file, first.line)
            };
            let names: Vec<&str> = component.iter().map(|name| name.as_str()).collect();
            let place = [&[name.to_owned()], parent.as_slice()].concat().join("::");
            findings.push(Finding {
                rule: "cycles",
                path: held[0].1[0].file.to_owned(),
                line: held[0].1[0].line,
                what: format!("{} form a cycle of modules in {place}", names.join(", ")),
                why: "modules form a directed acyclic graph",
                details: held.iter().map(describe).collect(),
            });
        }
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
    /// Collects the modules and uses of one file.
    fn read(&mut self, file: &'a str, module: Path, text: &str) {
        let code = code::only(text);
        let tokens = tokens(&code);
        let token = |at: usize| tokens.get(at).map_or("", |&(_, token)| token);
        self.add_module(&module);
        // The innermost module, and the depth of braces outside each inline one.
        let (mut module, mut outside, mut depth) = (module, Vec::new(), 0);
        let mut at = 0;
        while at < tokens.len() {
            let line = tokens[at].0;
            let next = token(at + 1);
            match token(at) {
                "#" if is_test_attribute(&tokens[at..]) => {
                    let end = item_end(&tokens, at + 1);
                    let end = item_end(&tokens, end);
                    let item = &tokens[at..end];
                    if let [.., (_, "mod"), (_, name), (_, ";")] = item {
                        self.test_modules.insert(child(&module, name));
                    }
                    at = end;
                    continue;
                }
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    if outside.last() == Some(&depth) {
                        outside.pop();
                        module.pop();
                    }
                }
                "mod" if token(at + 2) == "{" => {
                    outside.push(depth);
                    module.push(next.to_owned());
                    self.add_module(&module);
                }
                "use" if next != "<" => {
                    let mut leaves = Vec::new();
                    at = use_tree(&tokens, at + 1, &[], &mut leaves);
                    for (line, path, name) in leaves {
                        self.imports.insert((module.clone(), name), path.clone());
                        self.uses.push(Use { module: module.clone(), path, file, line });
                    }
                    continue;
                }
                "crate" | "super" | "self" if next == "::" => {
                    let start = at;
                    let mut path = vec![token(at).to_owned()];
                    while token(at + 1) == "::" && is_name(token(at + 2)) {
                        path.push(token(at + 2).to_owned());
                        at += 2;
                    }
                    // `pub(in crate::a)` is no use of `a`.
                    let is_visibility =
                        start > 1 && token(start - 1) == "in" && token(start - 2) == "(";
                    if !is_visibility {
                        self.uses.push(Use { module: module.clone(), path, file, line });
                    }
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Adds a module with its ancestors.
    fn add_module(&mut self, module: &[String]) {
        self.modules.extend((0..=module.len()).map(|end| module[..end].to_vec()));
    }

    /// `path` as written in `module`, from the root; `None` if it leads out of the crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Path> {
        let mut base = module.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &path[1..];
            }
            "self" => rest = &path[1..],
            "super" => {}
            name => {
                self.modules.get(&child(module, name))?;
            }
        }
        while let Some((first, after)) = rest.split_first()
            && first == "super"
        {
            base.pop();
            rest = after;
        }
        Some([&base, rest].concat())
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

    /// The uses between siblings, by parent, then by user and used module.
    fn arrows(&self) -> BTreeMap<Path, BTreeMap<(String, String), Vec<&Use<'a>>>> {
        let mut arrows: BTreeMap<Path, BTreeMap<(String, String), Vec<&Use<'a>>>> = BTreeMap::new();
        for use_ in &self.uses {
            if (0..=use_.module.len()).any(|end| self.test_modules.contains(&use_.module[..end])) {
                continue;
            }
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

static TOKEN: LazyLock<Regex> = LazyLock::new(|| pattern(r"\w+|::|\S"));

fn tokens(code: &str) -> Vec<Token<'_>> {
    let lines = (1..).zip(code.lines());
    let of_line = |(number, line)| TOKEN.find_iter(line).map(move |found| (number, found.as_str()));
    lines.flat_map(of_line).collect()
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// Whether `tokens` start with `#[cfg(test)]` or `#[cfg(all(test, ...))]`.
fn is_test_attribute(tokens: &[Token<'_>]) -> bool {
    let words: Vec<&str> = tokens.iter().take(7).map(|&(_, word)| word).collect();
    words.starts_with(&["#", "[", "cfg", "(", "test", ")"])
        || words == ["#", "[", "cfg", "(", "all", "(", "test"]
}

/// Where the item or attribute at `at` ends: after `;` or a closing brace, or, if it starts with
/// `[`, after the closing bracket.
fn item_end(tokens: &[Token<'_>], at: usize) -> usize {
    let is_attribute = tokens.get(at).is_some_and(|&(_, token)| token == "[");
    let mut depth = 0;
    for (end, &(_, token)) in tokens.iter().enumerate().skip(at) {
        match token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        let closes = token == ";" || token == "}" || (is_attribute && token == "]");
        if depth < 0 {
            return end;
        }
        if depth == 0 && closes {
            return end + 1;
        }
    }
    tokens.len()
}

/// Reads the tree of a `use` below `prefix`: the line, path and name of every leaf; `*` is the name
/// of a glob. Returns the index after the tree.
fn use_tree(
    tokens: &[Token<'_>],
    mut at: usize,
    prefix: &[String],
    leaves: &mut Vec<(usize, Path, String)>,
) -> usize {
    let mut path = prefix.to_vec();
    let token = |at: usize| tokens.get(at).map_or("", |&(_, token)| token);
    while at < tokens.len() {
        let line = tokens[at].0;
        match token(at) {
            "::" => at += 1,
            "*" => {
                leaves.push((line, path, "*".to_owned()));
                return at + 1;
            }
            "{" => {
                at += 1;
                while !["}", ""].contains(&token(at)) {
                    at = use_tree(tokens, at, &path, leaves).max(at + 1);
                    at += usize::from(token(at) == ",");
                }
                return at + 1;
            }
            name if is_name(name) => {
                if name != "self" || path.is_empty() {
                    path.push(name.to_owned());
                }
                at += 1;
                match token(at) {
                    "::" => {}
                    "as" => {
                        leaves.push((line, path, token(at + 1).to_owned()));
                        return at + 2;
                    }
                    _ => {
                        let name = path.last().cloned().unwrap_or_default();
                        leaves.push((line, path, name));
                        return at;
                    }
                }
            }
            _ => return at,
        }
    }
    at
}

/// The strongly connected components of more than one node.
fn components<T>(arrows: &BTreeMap<(String, String), T>) -> BTreeSet<BTreeSet<&String>> {
    let reachable = |start| {
        let mut reached = BTreeSet::new();
        let mut open = vec![start];
        while let Some(node) = open.pop() {
            let next = arrows.keys().filter(|(from, _)| from == node).map(|(_, to)| to);
            open.extend(next.filter(|to| reached.insert(*to)));
        }
        reached
    };
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        arrows.keys().map(|(from, _)| (from, reachable(from))).collect();
    let component = |(from, to): (&&String, &BTreeSet<_>)| {
        let returns = |to: &&String| reached.get(to).is_some_and(|back| back.contains(from));
        to.iter().copied().filter(returns).collect::<BTreeSet<_>>()
    };
    reached.iter().map(component).filter(|component| !component.is_empty()).collect()
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
            ("fn f() -> crate::b::B { g() }", "a path in code"),
            ("mod inner { fn f() { super::super::b::g() } }", "a path in an inline module"),
            ("use crate::B;", "a re-export of the root"),
            ("use crate::Renamed;", "a renamed re-export of the root"),
            ("macro_rules! m { () => { $crate::b::g() } }", "a path in a macro"),
            ("#[cfg(test)] mod tests { use super::*; } use crate::b::B;", "code after tests"),
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
        let oracle = [
            ("lib.rs", "mod a; #[cfg(test)] mod oracle;"),
            ("a.rs", "use crate::oracle::f;"),
            ("oracle.rs", "use crate::a::A;"),
        ];
        assert_eq!(cycles(&oracle), [""; 0], "a module for tests");
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
