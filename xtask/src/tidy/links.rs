//! Finds relative links in Markdown files whose target is missing. URLs and anchors are not
//! checked.

use super::{Finding, SourceFile};

/// Every relative link to a path that is neither in `paths` nor a folder of one of them.
pub(super) fn check(files: &[SourceFile], paths: &[String]) -> Vec<Finding> {
    let there = |target: &str| {
        paths.iter().any(|path| {
            path.strip_prefix(target).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    };
    let pages = files.iter().filter(|file| file.path.ends_with(".md"));
    let links =
        pages.flat_map(|page| targets(&page.text).map(move |(line, link)| (page, line, link)));
    let dead = links
        .filter(|(page, _, link)| !resolve(&page.path, link).is_some_and(|target| there(&target)));
    let finding = |(page, line, link): (&SourceFile, usize, &str)| {
        let why = "which is not a file of this repository";
        Finding::new("links", &page.path, line, format!("links to {link}"), why)
    };
    dead.map(finding).collect()
}

/// The lines and targets of inline links, without anchors. URLs are left out.
fn targets(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).flat_map(|(number, line)| {
        let links = line.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next());
        links.filter(|link| !link.is_empty() && !link.contains(':')).map(move |link| (number, link))
    })
}

/// The path from the repository's root of a `link` in `page`; `None` if it leaves the repository.
fn resolve(page: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tidy::SourceFile;

    #[test]
    fn dead_links_are_found() {
        let paths = ["README.md", "docs/a.md", "docs/b.svg"].map(str::to_owned);
        let links = |path: &str, text: &str| {
            let files = [SourceFile { path: path.into(), text: text.into() }];
            check(&files, &paths).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        for text in [
            "[a](docs/a.md)",
            "![b](./docs/b.svg \"b\")",
            "[d](docs/)",
            "[x](https://x.org/y) [y](#z)",
            "[a](docs/a.md#z)",
        ] {
            assert_eq!(links("README.md", text), [""; 0], "{text}");
        }
        assert_eq!(links("docs/a.md", "[up](../README.md) [b](b.svg)"), [""; 0]);
        assert_eq!(links("a.rs", "[x](gone.md)"), [""; 0]);
        let dead = |path: &str, line: usize, link: &str| {
            format!("{path}:{line}: links to {link}, which is not a file of this repository")
        };
        assert_eq!(
            links("README.md", "\n[x](gone.md) [d](doc)"),
            [dead("README.md", 2, "gone.md"), dead("README.md", 2, "doc")]
        );
        assert_eq!(
            links("docs/a.md", "[x](docs/b.svg) [y](../../x)"),
            [dead("docs/a.md", 1, "docs/b.svg"), dead("docs/a.md", 1, "../../x")]
        );
    }
}
