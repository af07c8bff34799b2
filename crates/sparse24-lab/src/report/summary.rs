//! The runs in short, and how they were made: results, configuration, provenance.

use std::{collections::BTreeSet, fmt::Write};

use serde_json::Value;

use super::{
    frame::{ink, marker},
    markup::{Table, Text, counted, duration, grouped, number},
    record::Record,
};

/// One line for each run: a name and what it came to.
struct Result {
    name: &'static str,
    of: fn(&Record) -> String,
}

const RESULTS: [Result; 8] = [
    Result {
        name: "held-out loss",
        of: |run| run.validation.last().map_or("–".into(), |(_, loss)| format!("{loss:.4}")),
    },
    Result { name: "method", of: Record::method },
    Result { name: "steps", of: steps },
    Result {
        name: "switch",
        of: |run| {
            run.switches.last().map_or("none".into(), |(step, kind)| {
                format!("{kind} from {}", grouped((*step).into()))
            })
        },
    },
    Result { name: "training loss", of: |run| number(last_loss(run), 4) },
    Result {
        name: "flip rate",
        of: |run| run.flips.last().map_or("–".into(), |(_, rate)| number(*rate, 3)),
    },
    Result {
        name: "time in steps",
        of: |run| run.steps.last().map_or("–".into(), |step| duration(step.seconds)),
    },
    Result { name: "tokens a second", of: |run| grouped(median_speed(run).round() as u64) },
];

/// The mean over the last steps: one step's batches say little.
fn last_loss(run: &Record) -> f64 {
    const STEPS: usize = 20;
    let last = &run.steps[run.steps.len().saturating_sub(STEPS)..];
    let finite: Vec<f64> =
        last.iter().map(|step| f64::from(step.loss)).filter(|loss| loss.is_finite()).collect();
    finite.iter().sum::<f64>() / finite.len() as f64
}

fn median_speed(run: &Record) -> f64 {
    let mut speeds: Vec<f32> =
        run.steps.iter().map(|step| step.tokens_per_s).filter(|speed| speed.is_finite()).collect();
    speeds.sort_by(f32::total_cmp);
    speeds.get(speeds.len() / 2).map_or(f64::NAN, |speed| f64::from(*speed))
}

fn steps(run: &Record) -> String {
    let done = grouped(run.last_step().into());
    match run.steps_asked() {
        Some(asked) if is_finished(run) && run.last_step() < asked => {
            format!("{done} of {}", grouped(asked.into()))
        }
        Some(_) if is_finished(run) => format!("{done}, finished"),
        Some(asked) => format!("{done} of {}, unfinished", grouped(asked.into())),
        None => done,
    }
}

fn is_finished(run: &Record) -> bool {
    run.until.or(run.steps_asked()).is_some_and(|asked| run.last_step() >= asked)
}

/// Tiles for one run, a table for several; then what is missing or damaged.
pub(super) fn results(runs: &[Record]) -> String {
    let mut out = String::new();
    if let [run] = runs {
        out += "<dl class=\"tiles\">";
        for Result { name, of } in &RESULTS {
            let _ = write!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", Text(&of(run)));
        }
        out += "</dl>\n";
    } else {
        out += "<div class=\"scroll results\" tabindex=\"0\" role=\"group\" aria-label=\"Results\"><table><caption>Results</caption><thead><tr><th scope=\"col\">run</th>";
        out.extend(
            RESULTS.iter().map(|Result { name, .. }| format!("<th scope=\"col\">{name}</th>")),
        );
        out += "</tr></thead><tbody>\n";
        for (series, run) in runs.iter().enumerate() {
            let symbol = format!(
                "<svg class=\"swatch\" width=\"14\" height=\"14\" aria-hidden=\"true\"><use class=\"{}\" href=\"{}\" x=\"7\" y=\"7\"/></svg>",
                ink(series),
                marker(series)
            );
            let _ = write!(out, "<tr><th scope=\"row\">{symbol} {}</th>", Text(&run.name));
            out.extend(
                RESULTS.iter().map(|Result { of, .. }| format!("<td>{}</td>", Text(&of(run)))),
            );
            out += "</tr>\n";
        }
        out += "</tbody></table></div>\n";
    }
    out
}

/// What is missing or damaged, and how unfinished runs ended.
pub(super) fn problems(runs: &[Record], of_the_page: &[String]) -> String {
    let mut told: Vec<String> = of_the_page.to_vec();
    for run in runs {
        told.extend(run.problems.iter().map(|problem| format!("{}: {problem}.", run.name)));
        if let Some(line) = run.log.last().filter(|_| !is_finished(run)) {
            told.push(format!("{} is unfinished; its log ends with “{line}”.", run.name));
        }
    }
    if told.is_empty() {
        return String::new();
    }
    let items: String = told.iter().map(|line| format!("<li>{}</li>", Text(line))).collect();
    format!(
        "<section class=\"problems\" aria-label=\"What is not here\"><h2>What is not here</h2><ul>{items}</ul></section>\n"
    )
}

/// Settings, with those that differ first, and starts.
pub(super) fn configuration(runs: &[Record]) -> String {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.config.keys()).collect();
    let of = |run: &Record, key: &str| run.setting(key).unwrap_or("–").to_owned();
    let differs = |key: &&&String| runs.iter().any(|run| of(run, key) != of(&runs[0], key));
    let (differing, common): (Vec<&String>, Vec<&String>) =
        keys.iter().partition(|key| differs(key));
    let named = |keys: &[&String]| {
        keys.iter()
            .map(|key| {
                std::iter::once((*key).clone()).chain(runs.iter().map(|run| of(run, key))).collect()
            })
            .collect()
    };
    let mut out =
        String::from("<section id=\"configuration\"><h2>Configuration and provenance</h2>\n");
    if runs.len() > 1 {
        let columns = std::iter::once("setting".to_owned())
            .chain(runs.iter().map(|run| run.name.clone()))
            .collect();
        out += &Table {
            caption: "Settings that differ".into(),
            columns,
            rows: named(&differing),
            series: None,
        }
        .to_string();
    }
    let rows = common.iter().map(|key| vec![(*key).clone(), of(&runs[0], key)]).collect::<Vec<_>>();
    let caption = if runs.len() > 1 { "Settings that all runs share" } else { "Settings" };
    let columns = vec!["setting".into(), "value".into()];
    let table = Table { caption: caption.into(), columns, rows, series: None };
    let _ = writeln!(
        out,
        "<details><summary>{caption} ({})</summary>{table}</details>",
        counted(common.len() as u64, "key")
    );
    for run in runs {
        let _ = writeln!(
            out,
            "<details><summary>Provenance of {} ({})</summary>{}{}</details>",
            Text(&run.name),
            counted(run.starts.len() as u64, "start"),
            starts(run),
            log(run)
        );
    }
    out + "</section>\n"
}

/// The first start and the last ones, a column each.
fn starts(run: &Record) -> Table {
    const LAST: usize = 5;
    let shown: Vec<usize> =
        (0..run.starts.len()).filter(|&at| at == 0 || at + LAST >= run.starts.len()).collect();
    let keys: BTreeSet<&String> = shown
        .iter()
        .filter_map(|&at| run.starts[at].as_object())
        .flat_map(|start| start.keys())
        .collect();
    let of = |key: &str| {
        shown.iter().map(|&at| run.starts[at].get(key).map_or("–".into(), told)).collect::<Vec<_>>()
    };
    let rows = keys.into_iter().map(|key| [vec![key.clone()], of(key)].concat()).collect();
    let columns = std::iter::once("start".to_owned())
        .chain(shown.iter().map(|at| (at + 1).to_string()))
        .collect();
    Table { caption: format!("Starts of {}", run.path.display()), columns, rows, series: None }
}

/// A value in words.
fn told(value: &Value) -> String {
    match value {
        Value::Null => "–".into(),
        Value::String(text) => text.clone(),
        Value::Array(words) => words.iter().map(told).collect::<Vec<_>>().join(" "),
        Value::Object(pairs) => pairs
            .iter()
            .map(|(key, value)| format!("{key} {}", told(value)))
            .collect::<Vec<_>>()
            .join(", "),
        other => other.to_string(),
    }
}

fn log(run: &Record) -> String {
    if run.log.is_empty() {
        return String::new();
    }
    format!("<h3>The end of log.txt</h3><pre>{}</pre>", Text(&run.log.join("\n")))
}
