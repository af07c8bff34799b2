//! A figure of the page: pictures of the same runs, their legend, what they show in words, and the
//! numbers behind them.

use std::fmt::Write;

use super::{
    frame::{ink, marker},
    markup::{Table, Text, number},
    record::Record,
    thin::{Bucket, ranges},
};

/// Pictures with their numbers.
pub(super) struct Figure {
    /// Of the page alone.
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    /// What is drawn and how it was measured.
    pub(super) lead: String,
    /// How the pictures stand.
    pub(super) layout: Layout,
    /// Each with what stands above it.
    pub(super) pictures: Vec<(String, String)>,
    /// Whether markers need a legend.
    pub(super) legend: Legend,
    /// Sentences under the pictures.
    pub(super) notes: Vec<String>,
    pub(super) tables: Vec<Table>,
    pub(super) numbers: Numbers,
}

/// How the tables stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Numbers {
    /// Behind a line that unfolds them.
    Folded,
    /// In sight: they are what the figure is for.
    Open,
}

/// How pictures stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// One below the other.
    Stacked,
    /// As many beside each other as there is room for.
    Beside,
}

/// What explains the inks.
pub(super) enum Legend {
    /// Nothing has to.
    None,
    /// The names of these series.
    Series(Vec<usize>),
    /// Markup of its own.
    Own(String),
}

impl Figure {
    /// One picture by its name on the page and its title, its numbers folded.
    pub(super) fn of(
        [id, title]: [&'static str; 2],
        lead: impl Into<String>,
        picture: String,
        tables: Vec<Table>,
    ) -> Self {
        let pictures = vec![(String::new(), picture)];
        let (layout, legend, numbers) = (Layout::Stacked, Legend::None, Numbers::Folded);
        Self {
            id,
            title,
            lead: lead.into(),
            layout,
            pictures,
            legend,
            notes: Vec::new(),
            tables,
            numbers,
        }
    }

    /// The `figure` element.
    pub(super) fn draw(&self, runs: &[Record]) -> String {
        let Self { id, title, lead, layout, pictures, legend, notes, tables, numbers } = self;
        let lead = Text(lead);
        let mut out = format!(
            "<figure id=\"{id}\" aria-labelledby=\"{id}-head\">\n<h2 id=\"{id}-head\">{title}</h2>\n<p class=\"lead\">{lead}</p>\n"
        );
        match legend {
            Legend::None => {}
            Legend::Own(markup) => out += markup,
            Legend::Series(series) => {
                out += "<ul class=\"legend\">";
                for &series in series {
                    let symbol = format!(
                        "<line class=\"strong {0}\" x1=\"0\" x2=\"26\" y1=\"7\" y2=\"7\"/><use class=\"{0}\" href=\"{1}\" x=\"13\" y=\"7\"/>",
                        ink(series),
                        marker(series)
                    );
                    let _ = write!(
                        out,
                        "<li><svg class=\"swatch\" width=\"26\" height=\"14\" aria-hidden=\"true\">{symbol}</svg>{}</li>",
                        label(&runs[series])
                    );
                }
                out += "</ul>\n";
            }
        }
        out += if *layout == Layout::Beside {
            "<div class=\"pictures beside\">\n"
        } else {
            "<div class=\"pictures\">\n"
        };
        for (head, picture) in pictures {
            let head =
                if head.is_empty() { String::new() } else { format!("<h3>{}</h3>", Text(head)) };
            let _ = writeln!(
                out,
                "<div class=\"picture\">{head}<div class=\"room\">{picture}</div></div>"
            );
        }
        out += "</div>\n";
        if !notes.is_empty() {
            let _ = writeln!(out, "<figcaption>{}</figcaption>", Text(&notes.join(" ")));
        }
        out += if *numbers == Numbers::Open { "<details open=\"\">" } else { "<details>" };
        out += "<summary>The numbers</summary>\n";
        tables.iter().for_each(|table| out += &table.to_string());
        out + "</details>\n</figure>\n"
    }
}

/// A run's name, and what it is.
fn label(run: &Record) -> String {
    format!("<b>{}</b> <span>{}</span>", Text(&run.name), Text(&run.method()))
}

/// How finely long curves are drawn where so many runs share the page.
pub(super) fn finely(runs: usize) -> usize {
    (1600 / runs.max(1)).clamp(80, 320)
}

/// Buckets of points.
pub(super) fn buckets(points: &[[f64; 2]], most: usize) -> Vec<Bucket> {
    ranges(points.len(), most)
        .map(|range| Bucket::of(points[range].iter().map(|&[x, y]| (x, y))))
        .collect()
}

/// The steps of a bucket.
pub(super) fn span(bucket: &Bucket) -> String {
    let [first, last] = bucket.x;
    if first == last { format!("{first}") } else { format!("{first}–{last}") }
}

/// A number as tables have it.
pub(super) fn cell(value: f64) -> String {
    number(value, 5)
}

/// That curves are thinner than the measurements.
pub(super) fn thinned(most_in_one: usize, banded: bool) -> Option<String> {
    let band = if banded { "; the band reaches from the least to the largest of them" } else { "" };
    (most_in_one > 1)
        .then(|| format!("Each point is the mean of up to {most_in_one} measurements{band}."))
}
