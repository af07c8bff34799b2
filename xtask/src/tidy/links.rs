//! Finds relative links in Markdown files whose target is missing. URLs and anchors are not
//! checked.

use std::path::Path;

use super::{Finding, SourceFile};

/// Every relative link in `files` of the folder `root` to nothing that exists.
pub(super) fn check(root: &Path, files: &[SourceFile]) -> Vec<Finding> {
    let check_page = |page: &SourceFile| {
        let file = root.join(&page.path);
        let is_dead = |(_, link): &(usize, &str)| !file.with_file_name("").join(link).exists();
        let finding = |(line, link)| {
            let why = "which is not a file of this repository";
            Finding::new(&page.path, line, format!("links to {link}"), why)
        };
        targets(&page.text).filter(is_dead).map(finding).collect::<Vec<_>>()
    };
    files.iter().filter(|file| file.path.ends_with(".md")).flat_map(check_page).collect()
}

/// The lines and targets of inline links, without anchors. URLs are left out.
fn targets(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).flat_map(|(number, line)| {
        let links = line.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next());
        links.filter(|link| !link.is_empty() && !link.contains(':')).map(move |link| (number, link))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::check;
    use crate::tidy::SourceFile;

    #[test]
    fn dead_links_are_found() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("docs")).unwrap();
        for file in ["README.md", "docs/a.md", "docs/b.svg"] {
            fs::write(root.path().join(file), "").unwrap();
        }
        for (path, text, dead) in [
            ("README.md", "[a](docs/a.md#z) ![b](./docs/b.svg \"b\") [d](docs/)", &[][..]),
            ("README.md", "[x](https://x.org/y) [y](#z)", &[]),
            ("docs/a.md", "[up](../README.md) [b](b.svg)", &[]),
            ("a.rs", "[x](gone.md)", &[]),
            ("README.md", "\n[x](gone.md) [d](doc)", &["2: links to gone.md", "2: links to doc"]),
            ("docs/a.md", "[x](docs/b.svg)", &["1: links to docs/b.svg"]),
        ] {
            let found = check(root.path(), &[SourceFile { path: path.into(), text: text.into() }]);
            let why = "which is not a file of this repository";
            assert_eq!(
                found.iter().map(ToString::to_string).collect::<Vec<_>>(),
                dead.iter().map(|dead| format!("{path}:{dead}, {why}")).collect::<Vec<_>>()
            );
        }
    }
}
