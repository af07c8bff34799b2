//! The report: one page that opens offline and shows what happened in one or several runs, side by
//! side.
//!
//! Everything is in the file: styles, pictures as SVG, a few lines of script for values under the
//! pointer, and the numbers behind every figure as tables, so that nothing is lost without scripts,
//! colours or sight. Long runs are thinned to the means and the envelopes of neighbouring steps, so
//! that the page of 300,000 steps stays below 2 MB.
//!
//! Invariant: whatever the directories hold, the page is well-formed, loads nothing, and says what
//! is missing; what stands in files is text in it and nothing else. Deliberately absent: drawing
//! libraries, and judgements (`study` compares with intervals).

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use figure::Figure;
use markup::Text;
use record::Record;
use sparse24_run::{Error, disk};

mod axis;
mod chart;
mod comparison;
mod curves;
mod figure;
mod frame;
mod heat;
mod markup;
mod masks;
mod record;
mod summary;
mod thin;

#[cfg(test)]
mod tests;

/// More runs are not told apart.
pub const MOST_RUNS: usize = 16;

/// The name of a run's own page.
pub const FILE: &str = "report.html";

/// Writes the page of these run directories; a folder of `lambda-search` or `study` stands for its
/// conclusions and for one run of each arm.
///
/// # Errors
/// [`Error::File`] for a path that is no run's, and for a file there that is no page;
/// [`Error::Setting`] for no or too many runs, [`Error::Io`] where the page cannot be written.
pub fn write(paths: &[PathBuf], out: &Path) -> Result<(), Error> {
    let page = page(paths)?;
    if out.exists() && !is_page(out) {
        return Err(Error::file(
            out,
            "is there and no page of a report; name another file with --out, or remove it",
        ));
    }
    disk::write_atomically(out, page.as_bytes())
}

/// Whether a file is a page that may be written anew: by its title.
fn is_page(file: &Path) -> bool {
    let mut beginning = Vec::new();
    let read = fs::File::open(file).and_then(|file| file.take(1 << 14).read_to_end(&mut beginning));
    read.is_ok()
        && beginning.starts_with(b"<!DOCTYPE html>")
        && String::from_utf8_lossy(&beginning).contains("sparse24 report</title>")
}

/// The page of these directories.
///
/// # Errors
/// As [`write()`].
pub fn page(paths: &[PathBuf]) -> Result<String, Error> {
    let (mut runs, mut figures, mut notes): (Vec<Record>, Vec<Figure>, Vec<String>) =
        Default::default();
    for path in paths {
        if !comparison::is_folder(path) {
            runs.push(Record::read(path)?);
            // Of the search that chose its lambda, if it made one.
            figures.extend(
                comparison::conclusions(&path.join("lambda-search"))
                    .figures
                    .into_iter()
                    .filter(|_| paths.len() == 1),
            );
            continue;
        }
        let concluded = comparison::conclusions(path);
        let (arms, left_out) = arms(path, &concluded.arms);
        for arm in arms {
            runs.push(Record { until: concluded.until, ..Record::read(&arm)? });
        }
        notes.extend(concluded.problems);
        if left_out > 0 {
            notes.push(format!(
                "Of each arm of {} one run is drawn; {left_out} more are in its conclusions.",
                path.display()
            ));
        }
        for figure in concluded.figures {
            // Names within the page are those of the figures.
            if figures.iter().any(|other| other.id == figure.id) {
                notes.push(format!(
                    "{}: one {} fits in a page; this one is left out.",
                    path.display(),
                    figure.id
                ));
            } else {
                figures.push(figure);
            }
        }
    }
    if runs.is_empty() && figures.is_empty() {
        return Err(Error::setting("report", "expected at least one run directory"));
    }
    if runs.len() > MOST_RUNS {
        return Err(Error::setting(
            "report",
            format!(
                "expected at most {MOST_RUNS} runs in one page, found {}; name fewer",
                runs.len()
            ),
        ));
    }
    record::name_all(&mut runs);
    if runs.iter().any(|run| !run.steps.is_empty()) {
        figures.push(curves::loss(&runs));
        figures.extend(curves::validation(&runs));
        figures.extend(curves::flips(&runs));
        figures.extend(masks::heat(&runs));
        figures.extend(masks::scatter(&runs));
        figures.extend(masks::instruments(&runs));
        figures.push(curves::optimizer(&runs));
    }
    let folder = paths
        .first()
        .filter(|path| paths.len() == 1 && comparison::is_folder(path))
        .and_then(|path| path.file_name());
    Ok(assemble(&runs, &figures, &notes, folder.map(|name| name.to_string_lossy().into_owned())))
}

/// The first run of each arm, in the order of the study or of lambda, and how many runs there are
/// besides.
fn arms(folder: &Path, order: &[String]) -> (Vec<PathBuf>, usize) {
    let inside = |folder: &Path| {
        let mut entries: Vec<PathBuf> = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect();
        entries.sort_by_cached_key(|path| record::natural(&path.to_string_lossy()));
        entries
    };
    let place = |arm: &PathBuf| {
        let name =
            arm.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let lambda = name
            .strip_prefix("lambda-")
            .and_then(|lambda| lambda.parse().ok())
            .unwrap_or(f64::NEG_INFINITY);
        (order.iter().position(|arm| *arm == name).unwrap_or(usize::MAX), lambda)
    };
    let mut arms = inside(folder);
    arms.sort_by(|a, b| {
        let ((a, lambda), (b, other)) = (place(a), place(b));
        a.cmp(&b).then(lambda.total_cmp(&other))
    });
    let (mut runs, mut left_out) = (Vec::new(), 0);
    for arm in arms {
        let mut seeds = inside(&arm).into_iter().filter(|run| run.join("config.toml").is_file());
        match seeds.next().filter(|_| runs.len() < MOST_RUNS) {
            Some(first) => {
                runs.push(first);
                left_out += seeds.count();
            }
            None => left_out += seeds.count(),
        }
    }
    (runs, left_out)
}

fn assemble(
    runs: &[Record],
    figures: &[Figure],
    notes: &[String],
    folder: Option<String>,
) -> String {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = match names.as_slice() {
        _ if folder.is_some() => folder.unwrap_or_default(),
        [] => "Conclusions".to_owned(),
        [name] => (*name).to_owned(),
        [first, .., last] if names.len() > 4 => format!("{} runs: {first} to {last}", names.len()),
        names => names.join(" · "),
    };
    let links = figures
        .iter()
        .map(|figure| (figure.id, figure.title))
        .chain((!runs.is_empty()).then_some(("configuration", "Configuration")));
    let links: String =
        links.map(|(id, title)| format!("<li><a href=\"#{id}\">{title}</a></li>")).collect();
    let results = if runs.is_empty() { String::new() } else { summary::results(runs) };
    let problems = summary::problems(runs, notes);
    let figures: String = figures.iter().map(|figure| figure.draw(runs)).collect();
    let configuration = if runs.is_empty() { String::new() } else { summary::configuration(runs) };
    let (style, script, symbols, version) = (
        include_str!("report/page.css"),
        include_str!("report/page.js"),
        SYMBOLS,
        env!("CARGO_PKG_VERSION"),
    );
    let title = Text(&title);
    format!(
        r##"<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"/>
<title>{title} · sparse24 report</title>
<style>
{style}</style>
</head>
<body>
{symbols}
<header>
<p class="brand"><svg class="glyph" width="30" height="30" viewBox="0 0 4 4" aria-hidden="true"><use href="#tile"/></svg>sparse24 <span>report</span></p>
<h1>{title}</h1>
</header>
<nav aria-label="Figures"><ul>{links}</ul></nav>
<main>
{results}{problems}{figures}{configuration}</main>
<footer><p>Made by sparse24 {version} from the files of the run directories; losses are in nats a token. Nothing was loaded from anywhere.</p></footer>
<script>
//<![CDATA[
{script}//]]>
</script>
</body>
</html>
"##
    )
}

/// The markers, by the number of the series, and the sign of the house: a 4x4 tile with two kept in
/// every row and column.
const SYMBOLS: &str = r##"<svg class="symbols" width="0" height="0" aria-hidden="true"><defs>
<circle id="m0" r="4"/>
<rect id="m1" x="-3.6" y="-3.6" width="7.2" height="7.2"/>
<path id="m2" d="M0 -5L4.6 3.4H-4.6Z"/>
<path id="m3" d="M0 -5.2L4.6 0L0 5.2L-4.6 0Z"/>
<path id="m4" d="M0 5L4.6 -3.4H-4.6Z"/>
<path id="m5" d="M-1.6 -5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5V-1.6H-1.6Z"/>
<path id="m6" d="M0 -5.2L1.4 -1.6L5.2 -1.5L2.2 0.9L3.3 4.6L0 2.4L-3.3 4.6L-2.2 0.9L-5.2 -1.5L-1.4 -1.6Z"/>
<path id="m7" d="M-2.2 -4.6H2.2L4.6 0L2.2 4.6H-2.2L-4.6 0Z"/>
<g id="tile"><path class="kept" d="M0 0h1v1h-1zM2 0h1v1h-1zM1 1h1v1h-1zM2 1h1v1h-1zM0 2h1v1h-1zM3 2h1v1h-1zM1 3h1v1h-1zM3 3h1v1h-1z"/><path class="lines" d="M0 0H4V4H0ZM1 0V4M2 0V4M3 0V4M0 1H4M0 2H4M0 3H4"/></g>
</defs></svg>"##;
