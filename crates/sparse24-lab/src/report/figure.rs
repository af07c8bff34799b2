//! A figure: plots of the same runs with their legend, an explanation, and the numbers as tables;
//! drawn into the page or as an SVG file of its own.

use std::fmt::Write;

use super::{
    SYMBOLS,
    plot::{Curve, Plot, ink, marker},
    record::Record,
    text::{Table, Text},
};

#[derive(Default)]
pub(super) struct Figure {
    /// Unique within the page.
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    /// Description of the figure and of the measurement.
    pub(super) lead: String,
    pub(super) layout: Layout,
    /// Plots with their heads, which may be empty.
    pub(super) plots: Vec<(String, Plot)>,
    pub(super) legend: Vec<Entry>,
    /// Sentences below the plots.
    pub(super) notes: Vec<String>,
    pub(super) tables: Vec<Table>,
    pub(super) numbers: Numbers,
}

#[derive(Default)]
pub(super) struct Entry {
    /// SVG of 26 by 14 pixels.
    pub(super) swatch: String,
    pub(super) name: String,
    pub(super) detail: String,
    /// The run that it names, if it does.
    pub(super) run: Option<usize>,
}

/// Whether the tables are visible from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Numbers {
    #[default]
    Folded,
    Open,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Layout {
    /// One plot below the other.
    #[default]
    Stacked,
    /// As many plots in a row as fit.
    Beside,
}

/// A swatch of a line; `INK` is replaced.
pub(super) const LINE: &str = "<line class=\"strong INK\" x1=\"0\" x2=\"26\" y1=\"7\" y2=\"7\"/>";

/// Entries for some runs; none for a single run.
pub(super) fn legend(runs: &[Record], curves: &[Curve]) -> Vec<Entry> {
    let mut drawn: Vec<usize> = curves.iter().map(|curve| curve.run).collect();
    drawn.dedup();
    let entry = |run: usize| {
        let (ink, marker) = (ink(run), marker(run));
        Entry {
            swatch: format!(
                "{}<use class=\"{ink}\" href=\"{marker}\" x=\"13\" y=\"7\"/>",
                LINE.replace("INK", &ink)
            ),
            name: runs[run].name.clone(),
            detail: runs[run].method(),
            run: Some(run),
        }
    };
    drawn.into_iter().filter(|_| runs.len() > 1).map(entry).collect()
}

/// An attribute for what the script hides with the run.
pub(super) fn data_run(run: Option<usize>) -> String {
    run.map(|run| format!(" data-run=\"{run}\"")).unwrap_or_default()
}

impl Figure {
    pub(super) fn html(&self) -> String {
        let Self { id, title, lead, layout, plots, legend, notes, tables, numbers } = self;
        let mut out = format!(
            "<figure id=\"{id}\" aria-labelledby=\"{id}-head\">\n\
             <h2 id=\"{id}-head\">{title}</h2>\n<p class=\"lead\">{}</p>\n",
            Text(lead)
        );
        if !legend.is_empty() {
            out += "<ul class=\"legend\">";
            for Entry { swatch, name, detail, run } in legend {
                let run = data_run(*run);
                let _ = write!(
                    out,
                    "<li{run}><svg class=\"swatch\" width=\"26\" height=\"14\" \
                     aria-hidden=\"true\">{swatch}</svg><b>{}</b> <span>{}</span></li>",
                    Text(name),
                    Text(detail)
                );
            }
            out += "</ul>\n";
        }
        out += match layout {
            Layout::Beside => "<div class=\"plots beside\">\n",
            Layout::Stacked => "<div class=\"plots\">\n",
        };
        for (head, plot) in plots {
            let head = match head.as_str() {
                "" => String::new(),
                head => format!("<h3>{}</h3>", Text(head)),
            };
            let _ = writeln!(
                out,
                "<div class=\"cell\"{}>{head}<div class=\"frame\">{}</div></div>",
                data_run(plot.run),
                plot.draw()
            );
        }
        out += "</div>\n";
        if !notes.is_empty() {
            let _ = writeln!(out, "<figcaption>{}</figcaption>", Text(&notes.join(" ")));
        }
        out += match numbers {
            Numbers::Open => "<details open=\"\">",
            Numbers::Folded => "<details>",
        };
        out += "<summary>Numbers</summary>\n";
        tables.iter().for_each(|table| out += &table.to_string());
        out + "</details>\n</figure>\n"
    }

    /// A standalone SVG document, without the tables.
    pub(super) fn svg(&self) -> String {
        const WIDTH: f64 = 860.0;
        let (mut out, mut y) = (String::new(), 34.0);
        for (head, plot) in &self.plots {
            let left = match plot.kind {
                "" => 66.0,
                _ => 150.0,
            };
            if !head.is_empty() {
                let _ =
                    writeln!(out, "<text class=\"head\" x=\"20\" y=\"{y}\">{}</text>", Text(head));
            }
            let width = WIDTH - left - 24.0;
            let _ = writeln!(
                out,
                "<svg class=\"outer\" x=\"{left}\" y=\"{}\" width=\"{width}\">{}</svg>",
                y + 36.0,
                plot.draw()
            );
            y += plot.height + 114.0;
        }
        // About the width of a character.
        let (mut x, advance) = (20.0, 7.3);
        for Entry { swatch, name, detail, .. } in &self.legend {
            let text = [name.as_str(), detail].join(" ");
            let width = 54.0 + advance * text.chars().count() as f64;
            if x > 20.0 && x + width > WIDTH {
                (x, y) = (20.0, y + 24.0);
            }
            let _ = writeln!(
                out,
                "<svg class=\"outer\" x=\"{x}\" y=\"{}\">{swatch}</svg>\
                 <text x=\"{}\" y=\"{y}\">{}</text>",
                y - 12.0,
                x + 34.0,
                Text(text.trim_end())
            );
            x += width;
        }
        y += if self.legend.is_empty() { 0.0 } else { 30.0 };
        let caption = format!("{} {}", self.lead, self.notes.join(" "));
        let mut line = String::new();
        for word in caption.split_whitespace().chain([""]) {
            let is_full = line.chars().count() + word.chars().count() > 120;
            if !line.is_empty() && (is_full || word.is_empty()) {
                let _ = writeln!(out, "<text x=\"20\" y=\"{y}\">{}</text>", Text(line.trim()));
                (line, y) = (String::new(), y + 19.0);
            }
            line = line + word + " ";
        }
        let (title, style, height) = (self.title, include_str!("plot.css"), y - 4.0);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"file\" role=\"img\" \
             width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\">\n\
             <title>{title}</title>\n<style>\n{style}</style>\n{SYMBOLS}\n\
             <rect class=\"card\" width=\"100%\" height=\"100%\"/>\n{out}</svg>\n"
        )
    }
}
