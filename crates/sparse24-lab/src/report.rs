//! The report: one page that opens offline and shows one or several runs side by side, or follows
//! them in `watch`.
//!
//! The file contains everything: styles, plots as SVG, and the numbers of every figure as tables,
//! so that nothing depends on scripts, colours or sight. Long curves are drawn as means and ranges
//! of neighbouring steps, so the page of 300,000 steps stays below 2 MB. Each plot also carries the
//! values of its curves; a script shows them under the pointer, and moves the drawn curves when the
//! reader hides runs, zooms, smooths or changes the scale.
//!
//! Invariant: whatever the directories hold, the page is well-formed, loads nothing and names what
//! is missing; contents of files are text in it, never markup.

use crate::Result;
use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

use figure::Figure;
use record::Record;
pub use record::missing;
pub use sparse24_run::run::REPORT as FILE;
use sparse24_run::{Error, disk};
use text::Text;

mod axis;
mod bucket;
mod conclusions;
mod curves;
mod figure;
mod masks;
mod plot;
mod record;
mod summary;
mod text;

#[cfg(test)]
mod tests;

/// Most runs in a page; the curves of more could not be distinguished.
const MOST_RUNS: usize = 16;

/// Name of the figure of loss and flip rate, which is drawn for [`write_figure`] alone.
const QUICKSTART: &str = "quickstart";

/// Writes the page of these run directories. A folder of `lambda-search` or `study` contributes its
/// results and one run of each arm. Returns the page's sentences about what is missing or damaged.
///
/// # Errors
/// [`Error::File`] if a path is not a run or `out` exists and is not a report; [`Error::Setting`]
/// for no or too many runs; [`Error::Io`] if the page cannot be written.
pub fn write(paths: &[PathBuf], out: &Path) -> Result<Vec<String>> {
    let contents = Contents::read(paths, Unreadable::Refused)?;
    // The only curves of lost metrics may be in the page that is there.
    let has_steps = contents.has_steps();
    let kind = if has_steps { "report" } else { "report without curves, like the new one" };
    replace(out, &document(&contents.title(), &contents.html(), None), kind, |text| {
        let is_ours = text.starts_with("<!DOCTYPE html>");
        is_ours
            && text.contains("sparse24 report</title>")
            && (has_steps || !text.contains("href=\"#loss\""))
    })?;
    let Contents { runs, mut problems, .. } = contents;
    for run in runs {
        let name = run.name.replace(char::is_control, "\u{fffd}");
        problems.extend(run.problems.iter().map(|problem| format!("{name}: {problem}")));
    }
    Ok(problems)
}

/// Writes one figure of the page of these run directories as an SVG file; `quickstart` is the loss
/// and the flip rate.
///
/// # Errors
/// Like [`write()`]; [`Error::Setting`] if the page has no figure of that name.
pub fn write_figure(paths: &[PathBuf], name: &str, out: &Path) -> Result {
    let svg = figure(paths, name)?;
    replace(out, &svg, "report", |text| text.starts_with(&svg[..svg.find(" width").unwrap_or(0)]))
}

/// Writes a file of a kind, unless it holds something that `is_ours` does not recognize by its
/// start.
pub(crate) fn replace(
    out: &Path,
    text: &str,
    kind: &str,
    is_ours: impl Fn(&str) -> bool,
) -> Result {
    if disk::exists(out)? {
        let mut start = Vec::new();
        let read = disk::open(out)?.0.take(1 << 16).read_to_end(&mut start);
        read.map_err(|e| Error::io("read", out, e))?;
        if !is_ours(&String::from_utf8_lossy(&start)) {
            let problem =
                format!("exists and is not a {kind}; remove it, or name another with --out");
            return Err(Error::file(out, problem));
        }
    }
    disk::write_atomically(out, text.as_bytes())
}

/// The page of runs that may be under way, for a browser that follows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    title: String,
    contents: String,
}

impl View {
    /// Reads the runs. A path that cannot be read is shown as a run with that problem.
    ///
    /// # Errors
    /// [`Error::Setting`] for no or too many runs.
    pub fn read(paths: &[PathBuf]) -> Result<Self> {
        let contents = Contents::read(paths, Unreadable::Shown)?;
        Ok(Self { title: contents.title(), contents: contents.html() })
    }

    /// The part of the page that changes while the runs train, as HTML.
    #[must_use]
    pub fn contents(&self) -> &str {
        &self.contents
    }

    /// The whole page. Its script may run where a header allows the word `nonce`; it takes later
    /// contents, as JSON strings, from the events of the address `events` beside the page's.
    #[must_use]
    pub fn page(&self, nonce: &str) -> String {
        document(&self.title, &self.contents, Some(nonce))
    }
}

/// Draws one figure as an SVG document.
fn figure(paths: &[PathBuf], name: &str) -> Result<String> {
    let contents = Contents::read(paths, Unreadable::Refused)?;
    if name == QUICKSTART && contents.has_steps() {
        return Ok(curves::quickstart(&contents.runs).svg());
    }
    let has_steps = contents.has_steps();
    let mut figures = contents.figures();
    figures.extend(contents.concluded);
    if let Some(figure) = figures.iter().find(|figure| figure.id == name) {
        return Ok(figure.svg());
    }
    let known = figures.iter().map(|figure| figure.id).chain(has_steps.then_some(QUICKSTART));
    let known = known.collect::<Vec<_>>().join(", ");
    let it_has = match known.as_str() {
        "" => "none, since metrics.jsonl has no step",
        known => known,
    };
    let problem = format!("the report has no figure {name:?}; it has: {it_has}");
    Err(Error::setting("figure", problem))
}

/// How a path that holds no run, or cannot be opened, is treated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unreadable {
    Refused,
    Shown,
}

#[derive(Default)]
struct Contents {
    runs: Vec<Record>,
    /// Figures of searches and studies.
    concluded: Vec<Figure>,
    /// Sentences about files that are damaged.
    problems: Vec<String>,
    /// Sentences about what the page leaves out.
    notes: Vec<String>,
    /// The name of the folder, if the page is of a single search or study.
    folder: Option<String>,
}

impl Contents {
    fn read(paths: &[PathBuf], unreadable: Unreadable) -> Result<Self> {
        let mut contents = Self::default();
        for path in paths {
            match contents.add(path, paths.len() == 1) {
                Err(error) if unreadable == Unreadable::Shown => {
                    contents.runs.push(Record::absent(path, &error));
                }
                added => added?,
            }
        }
        let Self { runs, concluded, folder, .. } = &mut contents;
        if runs.is_empty() && concluded.is_empty() {
            return Err(Error::setting("report", "expected at least one run directory"));
        }
        if runs.len() > MOST_RUNS {
            let found = runs.len();
            let problem = format!("expected at most {MOST_RUNS} runs, found {found}; name fewer");
            return Err(Error::setting("report", problem));
        }
        record::name_all(runs);
        if let [path] = paths
            && conclusions::is_folder(path)
        {
            *folder = path.file_name().map(|name| name.to_string_lossy().into_owned());
        }
        Ok(contents)
    }

    /// Adds a run, or the folder of a search or study.
    fn add(&mut self, path: &Path, is_alone: bool) -> Result {
        // Runs may come from others, and so may folders of them.
        let _confined = path.is_dir().then(|| disk::confine(path)).transpose()?;
        if conclusions::is_folder(path) {
            return self.add_folder(path);
        }
        self.runs.push(Record::read(path)?);
        if is_alone {
            // The search that chose the run's lambda.
            self.concluded = conclusions::conclusions(&path.join("lambda-search")).figures;
        }
        Ok(())
    }

    /// Adds the results of a search or study, and the first run of each arm.
    fn add_folder(&mut self, path: &Path) -> Result {
        let concluded = conclusions::conclusions(path);
        let (arms, left_out) = first_runs(path, &concluded.arms);
        for arm in arms {
            self.runs.push(Record { until: concluded.until, ..Record::read(&arm)? });
        }
        self.problems.extend(concluded.problems);
        if left_out > 0 {
            let path = path.display();
            self.notes.push(format!(
                "One run of each arm of {path} is drawn; the results include {left_out} more."
            ));
        }
        for figure in concluded.figures {
            // Figures are identified by name.
            if self.concluded.iter().any(|other| other.id == figure.id) {
                let (path, id) = (path.display(), figure.id);
                self.notes.push(format!("{path}: left out, since a page has one {id}."));
            } else {
                self.concluded.push(figure);
            }
        }
        Ok(())
    }

    fn has_steps(&self) -> bool {
        self.runs.iter().any(|run| !run.steps.is_empty())
    }

    fn figures(&self) -> Vec<Figure> {
        let runs = &self.runs;
        if !self.has_steps() {
            return Vec::new();
        }
        let mut figures = vec![curves::loss(runs)];
        figures.extend(curves::validation(runs));
        figures.extend(curves::score(runs));
        figures.extend(curves::flips(runs));
        figures.extend(masks::heat(runs));
        figures.extend(masks::scatter(runs));
        figures.extend(curves::instruments(runs));
        figures.push(curves::optimizer(runs));
        figures
    }

    fn title(&self) -> String {
        let names: Vec<&str> = self.runs.iter().map(|run| run.name.as_str()).collect();
        match (&self.folder, names.as_slice()) {
            (Some(folder), _) => folder.clone(),
            (_, []) => "Results".to_owned(),
            (_, [first, .., last]) if names.len() > 4 => {
                format!("{} runs: {first} to {last}", names.len())
            }
            (_, names) => names.join(" · "),
        }
    }

    /// The links to the figures, and everything that they lead to.
    fn html(&self) -> String {
        let Self { runs, concluded, problems, notes, .. } = self;
        let figures = self.figures();
        let figures = concluded.iter().chain(&figures);
        let drawn: String = figures.clone().map(Figure::html).collect();
        let mut links: Vec<_> = figures.map(|figure| (figure.id, figure.title)).collect();
        let (mut results, mut configuration) = (String::new(), String::new());
        if !runs.is_empty() {
            links.push(("configuration", "Configuration"));
            results = summary::results(runs);
            configuration = summary::configuration(runs);
        }
        let link = |(id, title)| format!("<li><a href=\"#{id}\">{title}</a></li>");
        let links: String = links.into_iter().map(link).collect();
        let remarks = summary::remarks(runs, problems, notes);
        format!(
            "<nav aria-label=\"Figures\"><ul>{links}</ul></nav>\n\
             <main>\n{results}{remarks}{drawn}{configuration}</main>"
        )
    }
}

/// A page with these contents; one for `watch` has a nonce.
fn document(title: &str, contents: &str, nonce: Option<&str>) -> String {
    let title = Text(title);
    let style = include_str!("report/page.css");
    let plot_style = include_str!("report/plot.css");
    let script = include_str!("report/page.js");
    let version = env!("CARGO_PKG_VERSION");
    let (attribute, live, connect, end) = match nonce {
        Some(nonce) => (
            format!(" nonce=\"{nonce}\""),
            "<p class=\"live\" role=\"status\">connecting</p>\n",
            "; connect-src 'self'",
            "Shown by sparse24 watch",
        ),
        None => (String::new(), "", "", "This page loads nothing"),
    };
    format!(
        r##"<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'{connect}"/>
<title>{title} · sparse24 report</title>
<style>
{style}{plot_style}</style>
</head>
<body>
<svg class="symbols" width="0" height="0" aria-hidden="true">{SYMBOLS}</svg>
<header>
<p class="brand"><svg class="glyph" width="30" height="30" viewBox="0 0 4 4" aria-hidden="true"
><use href="#tile"/></svg>sparse24 <span>report</span></p>
<h1>{title}</h1>
{live}</header>
<div id="contents">{contents}</div>
<footer>
<p>Written by sparse24 {version}; losses are means in nats over tokens, or over the
examples of a task (mean squared errors where it predicts numbers). {end}.</p>
</footer>
<script{attribute}>
//<![CDATA[
{script}//]]>
</script>
</body>
</html>
"##
    )
}

/// The first run of each arm, in the order of the study or of lambda, and the number of the others.
fn first_runs(folder: &Path, order: &[String]) -> (Vec<PathBuf>, usize) {
    let inside = |folder: &Path| {
        // Neither a file nor a link has names.
        let names = disk::names(folder).unwrap_or_default().into_iter();
        let mut paths: Vec<PathBuf> = names.map(|name| folder.join(name)).collect();
        paths.sort_by_cached_key(|path| record::natural(&path.to_string_lossy()));
        paths
    };
    let mut arms = inside(folder);
    arms.sort_by_cached_key(|arm| {
        let name = arm.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let lambda = name.strip_prefix("lambda-").and_then(|lambda| lambda.parse::<f64>().ok());
        let at = order.iter().position(|arm| *arm == name);
        // The bits of numbers of at least 0 have their order.
        (at.unwrap_or(usize::MAX), lambda.map(f64::to_bits))
    });
    let (mut runs, mut left_out) = (Vec::new(), 0);
    for arm in arms {
        let mut seeds = inside(&arm)
            .into_iter()
            .filter(|run| !matches!(disk::exists(&run.join("config.toml")), Ok(false)));
        if runs.len() < MOST_RUNS {
            runs.extend(seeds.next());
        }
        left_out += seeds.count();
    }
    (runs, left_out)
}

/// Definitions of the markers, by number, and of the logo: a 4x4 tile with two weights kept in
/// every row and column.
const SYMBOLS: &str = r##"<defs>
<circle id="m0" r="4"/>
<rect id="m1" x="-3.6" y="-3.6" width="7.2" height="7.2"/>
<path id="m2" d="M0 -5L4.6 3.4H-4.6Z"/>
<path id="m3" d="M0 -5.2L4.6 0L0 5.2L-4.6 0Z"/>
<path id="m4" d="M0 5L4.6 -3.4H-4.6Z"/>
<path id="m5" d="M-1.6 -5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5V-1.6H-1.6Z"/>
<path id="m6" d="M0 -5.2L1.4 -1.6L5.2 -1.5L2.2 0.9L3.3 4.6L0 2.4L-3.3 4.6L-2.2 0.9L-5.2 -1.5L-1.4
 -1.6Z"/>
<path id="m7" d="M-2.2 -4.6H2.2L4.6 0L2.2 4.6H-2.2L-4.6 0Z"/>
<g id="tile"><path class="kept" d="M0 0h1v1h-1zM2 0h1v1h-1zM1 1h1v1h-1zM2 1h1v1h-1zM0 2h1v1h-1z
M3 2h1v1h-1zM1 3h1v1h-1zM3 3h1v1h-1z"/>
<path class="lines" d="M0 0H4V4H0ZM1 0V4M2 0V4M3 0V4M0 1H4M0 2H4M0 3H4"/></g>
</defs>"##;
