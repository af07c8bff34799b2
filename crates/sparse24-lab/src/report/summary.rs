//! Results, problems, configuration and provenance of the runs.

use std::{collections::BTreeSet, fmt::Write};

use serde_json::Value;

use super::{
    plot::{ink, marker},
    record::Record,
    text::{Table, Text, digits, duration},
};
use crate::{
    count::{counted, grouped},
    statistics::{mean, quantile},
};

/// A result's name and its value for a run.
type Result = (&'static str, fn(&Record) -> String);

const RESULTS: [Result; 8] = [
    ("validation loss", |run| {
        let score = run.score_name().zip(run.scores.last());
        let score = score.map(|(name, [_, score])| format!(", {name} {score:.4}"));
        run.validation
            .last()
            .map_or("–".into(), |[_, loss]| format!("{loss:.4}{}", score.unwrap_or_default()))
    }),
    ("method", Record::method),
    ("steps", steps),
    ("switch", |run| {
        let text = |(step, kind): &(u32, _)| format!("{kind} from {}", grouped((*step).into()));
        run.switches.last().map_or("none".into(), text)
    }),
    ("training loss, mean of the last 20 steps", |run| match last_loss(run) {
        loss if loss.is_finite() => format!("{loss:.4}"),
        _ => "–".into(),
    }),
    ("flip rate", |run| run.flips.last().map_or("–".into(), |[_, rate]| digits(*rate, 3))),
    ("time in steps", |run| match run.steps.last() {
        Some(step) => duration(step.seconds),
        None => "–".into(),
    }),
    ("tokens per second", |run| match median_speed(run) {
        Some(speed) => grouped(speed.round() as u64),
        None => "–".into(),
    }),
];

/// Mean over the last steps; a single step is too noisy.
fn last_loss(run: &Record) -> f64 {
    let last = run.steps.iter().rev().take(20).map(|step| f64::from(step.loss));
    mean(&last.filter(|loss| loss.is_finite()).collect::<Vec<_>>()).unwrap_or(f64::NAN)
}

fn median_speed(run: &Record) -> Option<f64> {
    let speeds = run.steps.iter().map(|step| step.tokens_per_s);
    quantile(&speeds.filter(|speed| speed.is_finite()).collect::<Vec<_>>(), 0.5)
}

fn steps(run: &Record) -> String {
    let done = grouped(run.last_step().into());
    match run.steps_asked().map(|asked| (asked, grouped(asked.into()))) {
        Some((asked, of)) if is_finished(run) && run.last_step() < asked => {
            format!("{done} of {of}")
        }
        Some(_) if is_finished(run) => format!("{done}, finished"),
        Some((_, of)) => format!("{done} of {of}, unfinished"),
        None => done,
    }
}

/// Whether a run has done all its steps, and was evaluated after the last one unless it ends early
/// on purpose.
fn is_finished(run: &Record) -> bool {
    let last = f64::from(run.last_step());
    let is_evaluated = || run.validation.last().is_some_and(|&[step, _]| step >= last);
    run.until.or(run.steps_asked()).is_some_and(|asked| run.last_step() >= asked)
        && (run.until.is_some() || is_evaluated())
}

/// Tiles for one run, a table for several.
pub(super) fn results(runs: &[Record]) -> String {
    if let [run] = runs {
        let tile = |(name, value): &Result| {
            format!("<div><dt>{name}</dt><dd>{}</dd></div>", Text(&value(run)))
        };
        return format!(
            "<dl class=\"tiles\">{}</dl>\n",
            RESULTS.iter().map(tile).collect::<String>()
        );
    }
    let heads: String =
        RESULTS.iter().map(|(name, _)| format!("<th scope=\"col\">{name}</th>")).collect();
    let mut out = format!(
        "<div class=\"scroll results\" tabindex=\"0\" role=\"group\" aria-label=\"Results\">\
         <table class=\"n2 n6 n7 n8 n9\"><caption>Results</caption><thead><tr>\
         <th scope=\"col\">run</th>{heads}</tr></thead><tbody>\n"
    );
    for (at, run) in runs.iter().enumerate() {
        let cells: String =
            RESULTS.iter().map(|(_, value)| format!("<td>{}</td>", Text(&value(run)))).collect();
        let _ = writeln!(
            out,
            "<tr><th scope=\"row\"><svg class=\"swatch\" width=\"14\" height=\"14\" \
             aria-hidden=\"true\"><use class=\"{}\" href=\"{}\" x=\"7\" y=\"7\"/></svg> \
             {}</th>{cells}</tr>",
            ink(at),
            marker(at),
            Text(&run.name)
        );
    }
    out + "</tbody></table></div>\n"
}

/// Missing and damaged files, and then what is as it should be: `notes` and the unfinished runs.
pub(super) fn remarks(runs: &[Record], problems: &[String], notes: &[String]) -> String {
    let of_run = |run: &Record| {
        let sentence = |problem: &String| format!("{}: {problem}.", run.name);
        run.problems.iter().map(sentence).collect::<Vec<_>>()
    };
    let unfinished = |run: &Record| {
        let line = run.log.last().filter(|_| !is_finished(run))?;
        Some(format!("{} is unfinished; its log ends with “{line}”.", run.name))
    };
    let problems = problems.iter().cloned().chain(runs.iter().flat_map(of_run));
    let notes = notes.iter().cloned().chain(runs.iter().filter_map(unfinished));
    let section = |class: &str, head: &str, items: &mut dyn Iterator<Item = String>| {
        let items: String = items.map(|line| format!("<li>{}</li>", Text(&line))).collect();
        if items.is_empty() {
            return items;
        }
        format!("<section class=\"{class}\"><h2>{head}</h2><ul>{items}</ul></section>\n")
    };
    section("remarks problems", "Missing data", &mut problems.into_iter())
        + &section("remarks", "Notes", &mut notes.into_iter())
}

/// Settings, those that differ first, and starts.
pub(super) fn configuration(runs: &[Record]) -> String {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let value = |run: &Record, key: &str| run.setting(key).unwrap_or("–").to_owned();
    let differs = |key: &&&String| runs.iter().any(|run| value(run, key) != value(&runs[0], key));
    let (differing, common): (Vec<&String>, Vec<&String>) =
        keys.iter().partition(|key| differs(key));
    let mut out =
        String::from("<section id=\"configuration\"><h2>Configuration and provenance</h2>\n");
    let mut caption = "Settings";
    if runs.len() > 1 {
        let rows = differing.iter().map(|key| {
            [(*key).clone()].into_iter().chain(runs.iter().map(|run| value(run, key))).collect()
        });
        let names = runs.iter().map(|run| run.name.as_str());
        let columns: Vec<_> = ["setting"].into_iter().chain(names).collect();
        out += &Table::new("Settings that differ", &columns, rows).to_string();
        caption = "Settings common to all runs";
    }
    let rows = common.iter().map(|key| vec![(*key).clone(), value(&runs[0], key)]);
    let table = Table::new(caption, &["setting", "value"], rows);
    let _ = writeln!(
        out,
        "<details><summary>{caption} ({})</summary>{table}</details>",
        counted(common.len(), "key")
    );
    for run in runs {
        let log = match run.log.join("\n") {
            log if log.is_empty() => log,
            log => format!("<h3>End of log.txt</h3><pre>{}</pre>", Text(&log)),
        };
        let _ = writeln!(
            out,
            "<details><summary>Provenance of {} ({})</summary>{}{log}</details>",
            Text(&run.name),
            counted(run.starts.len(), "start"),
            starts(run)
        );
    }
    out + "</section>\n"
}

/// A column for each start; of very many, for the first one and the last ones.
fn starts(run: &Record) -> Table {
    const LAST: usize = 99;
    // More than any start has; each key is a row of the table.
    const KEYS: usize = 99;
    let starts: Vec<(usize, &Value)> = run
        .starts
        .iter()
        .enumerate()
        .filter(|(at, _)| *at == 0 || at + LAST >= run.starts.len())
        .collect();
    let keys: BTreeSet<&String> = starts
        .iter()
        .filter_map(|(_, start)| start.as_object())
        .flat_map(|start| start.keys())
        .collect();
    let rows = keys.into_iter().take(KEYS).map(|key| {
        let values = starts.iter().map(|(_, start)| start.get(key).map_or("–".into(), words));
        [key.clone()].into_iter().chain(values).collect()
    });
    let columns = ["start".to_owned()].into_iter();
    let columns = columns.chain(starts.iter().map(|(at, _)| (at + 1).to_string())).collect();
    Table { columns, ..Table::new(format!("Starts of {}", run.path.display()), &[], rows) }
}

/// A JSON value without its punctuation.
fn words(value: &Value) -> String {
    let join = |parts: Vec<String>, by: &str| parts.join(by);
    match value {
        Value::Null => "–".into(),
        Value::String(text) => text.clone(),
        Value::Array(values) => join(values.iter().map(words).collect(), " "),
        Value::Object(pairs) => {
            join(pairs.iter().map(|(key, value)| format!("{key} {}", words(value))).collect(), ", ")
        }
        other => other.to_string(),
    }
}
