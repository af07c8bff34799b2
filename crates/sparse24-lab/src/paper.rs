//! The tables and figures of the paper (Hu et al., arXiv 2404.01847): the command that makes each,
//! the paper's numbers, and ours where they were measured.
//!
//! `paper/experiments.toml` holds them all; docs/paper.md is made of it.
//!
//! Invariant: a column whose title starts with "here" holds only numbers that the page of its run
//! gives as well.

use std::{fmt::Write as _, path::Path};

use serde::Deserialize;

use crate::{Error, report};

/// A table or a figure of the paper.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// `table9`, `figure7`.
    pub name: String,
    /// Its subject, as a headline.
    pub title: String,
    /// Its contents in the paper, in Markdown.
    pub shows: String,
    /// Commands that make it at the paper's scale, or what comes closest.
    pub commands: Vec<String>,
    /// Data, devices and time that the commands require.
    pub needs: String,
    /// A phrase: the part of it that is not measured here, and why; empty if nothing is missing.
    #[serde(default)]
    pub missing: String,
    /// Numbers of the paper and ours.
    #[serde(default, rename = "result")]
    pub results: Vec<ResultTable>,
    /// Differences from the paper, and quirks of its code, in Markdown.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// Numbers of the paper, of ours, or of both side by side.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResultTable {
    /// Titles of the columns.
    pub columns: Vec<String>,
    /// As many cells as there are columns.
    pub rows: Vec<Vec<String>>,
    /// The origin of the columns whose titles start with "here".
    pub run: Option<Measurement>,
}

/// The origin of numbers measured here.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Commands that print the numbers.
    pub commands: Vec<String>,
    /// The machine's processor or GPU.
    pub device: String,
    /// The commit that recorded the numbers.
    pub commit: String,
    /// Seeds or repetitions, and how far apart their results are.
    pub spread: String,
    /// The page with the details, and its section: `accuracy.md#translation`.
    pub page: String,
}

/// Returns all experiments, tables first, in the order of the paper.
///
/// # Panics
/// Never: a test reads the embedded file.
#[must_use]
pub fn experiments() -> Vec<Experiment> {
    #[derive(Deserialize)]
    struct File {
        experiment: Vec<Experiment>,
    }
    let file: File = toml::from_str(include_str!("paper/experiments.toml")).expect("a valid file");
    file.experiment
}

impl Experiment {
    /// Returns the heading, such as `Table 9: Transformer-base on WMT14`.
    #[must_use]
    pub fn heading(&self) -> String {
        let (kind, number) = self.name.split_at(self.name.find(char::is_numeric).unwrap_or(0));
        let kind = if kind == "figure" { "Figure" } else { "Table" };
        format!("{kind} {number}: {}", self.title)
    }

    /// Returns whether any of it ran here, on which machines, and what is missing.
    #[must_use]
    pub fn status(&self) -> String {
        let mut devices: Vec<&str> = Vec::new();
        for run in self.results.iter().filter_map(|result| result.run.as_ref()) {
            if !devices.contains(&run.device.as_str()) {
                devices.push(&run.device);
            }
        }
        let mut status = match &*devices {
            [] => "not run".to_owned(),
            devices => format!("ran on {}", devices.join(", ")),
        };
        if !self.missing.is_empty() {
            status = format!("{status}; missing: {}", self.missing);
        }
        status
    }

    /// Returns its section of the page, in Markdown.
    #[must_use]
    pub fn section(&self) -> String {
        let mut parts = vec![
            format!("## {}", self.heading()),
            filled("", "", &self.shows),
            shell(&self.commands),
            filled("- Needs: ", "  ", &format!("{}.", self.needs))
                + "\n"
                + &filled("- Status: ", "  ", &format!("{}.", self.status())),
        ];
        for ResultTable { columns, rows, run } in &self.results {
            let row = |cells: &Vec<String>| format!("| {} |", cells.join(" | "));
            let rule = format!("|{}", " --- |".repeat(columns.len()));
            let rows: Vec<String> = rows.iter().map(row).collect();
            parts.push(format!("{}\n{rule}\n{}", row(columns), rows.join("\n")));
            if let Some(Measurement { commands, device, commit, spread, page }) = run {
                parts.push(filled(
                    "",
                    "",
                    &format!(
                        "Measured on {device}, recorded in {commit}; {spread} ([details]({page})):"
                    ),
                ));
                parts.push(shell(commands));
            }
        }
        let notes: Vec<String> = self.notes.iter().map(|note| filled("- ", "  ", note)).collect();
        parts.push(notes.join("\n"));
        parts.retain(|part| !part.is_empty());
        parts.join("\n\n") + "\n"
    }
}

/// A block of commands.
fn shell(commands: &[String]) -> String {
    format!("```sh\n{}\n```", commands.join("\n"))
}

/// Breaks a paragraph into lines of at most 100 columns: the first after `start`, the others after
/// `indent`.
fn filled(start: &str, indent: &str, paragraph: &str) -> String {
    let mut lines = vec![start.to_owned()];
    let mut is_first = true;
    for word in paragraph.split_whitespace() {
        let line = lines.last_mut().expect("one line");
        if is_first {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() > 100 {
            lines.push(format!("{indent}{word}"));
        } else {
            *line += &format!(" {word}");
        }
        is_first = false;
    }
    lines.join("\n")
}

const TITLE: &str = "# The paper's tables and figures";

/// Returns docs/paper.md.
#[must_use]
pub fn page() -> String {
    let mut text = format!("{TITLE}\n\n{}\n", include_str!("paper/introduction.txt"));
    text.push_str("| | | status |\n| --- | --- | --- |\n");
    let all = experiments();
    for experiment in &all {
        let heading = experiment.heading();
        let (number, title) = heading.split_once(": ").expect("a number and a title");
        let anchor =
            heading.to_lowercase().replace([':', ',', '.', '(', ')'], "").replace(' ', "-");
        writeln!(text, "| [{number}](#{anchor}) | {title} | {} |", experiment.status())
            .expect("writing to a string");
    }
    for experiment in &all {
        text.push('\n');
        text.push_str(&experiment.section());
    }
    text
}

/// Writes docs/paper.md.
///
/// # Errors
/// [`Error::File`] if `out` exists and is another page; [`Error::Io`] if it cannot be written.
pub fn write(out: &Path) -> Result<(), Error> {
    report::replace(out, &page(), "page about the paper", |text| text.starts_with(TITLE))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const PAGES: [(&str, &str); 2] = [
        ("accuracy.md", include_str!("../../../docs/accuracy.md")),
        ("performance.md", include_str!("../../../docs/performance.md")),
    ];

    /// The numbers of a text, with their exponents and decimals, without signs.
    fn numbers(text: &str) -> HashSet<&str> {
        text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '.' || c == '-'))
            .map(|word| word.trim_matches(|c: char| c == '.' || c == '-'))
            .filter(|word| word.starts_with(|c: char| c.is_ascii_digit()))
            .collect()
    }

    #[test]
    fn the_page_in_the_repository_is_what_the_command_writes() {
        assert!(
            page() == include_str!("../../../docs/paper.md"),
            "docs/paper.md is out of date: write it with `sparse24 paper --write docs/paper.md`"
        );
    }

    #[test]
    fn our_numbers_are_those_of_the_page_that_each_run_names() {
        let mut checked = 0;
        for Experiment { name, results, .. } in experiments() {
            for ResultTable { columns, rows, run } in results {
                let ours = |column: usize| columns[column].starts_with("here");
                let Some(run) = run else {
                    assert!(!(0..columns.len()).any(ours), "{name}: numbers without a run");
                    continue;
                };
                let (page, section) = run.page.split_once('#').expect("a page and a section");
                let (_, text) = PAGES.iter().find(|(name, _)| *name == page).expect("a page");
                let slug = |line: &str| line.trim_start_matches('#').trim().to_lowercase();
                let is_heading = |line: &str| slug(line).replace(' ', "-") == section;
                assert!(
                    text.lines().any(|line| line.starts_with('#') && is_heading(line)),
                    "{name}: {page} has no section {section}"
                );
                let known = numbers(text);
                for row in rows {
                    assert_eq!(row.len(), columns.len(), "{name}: {row:?}");
                    for cell in (0..row.len()).filter(|column| ours(*column)).map(|i| &row[i]) {
                        for number in numbers(cell) {
                            assert!(known.contains(number), "{name}: {number} is not on {page}");
                            checked += 1;
                        }
                    }
                }
            }
        }
        assert!(checked > 100, "{checked} numbers");
    }

    #[test]
    fn names_are_unique_and_ordered_as_in_the_paper() {
        let key = |name: &str| {
            let number = name.trim_start_matches(char::is_alphabetic);
            (!name.starts_with("table"), number.parse::<u32>().expect("a number"))
        };
        assert!(experiments().is_sorted_by(|a, b| key(&a.name) < key(&b.name)));
    }
}
