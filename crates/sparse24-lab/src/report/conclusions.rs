//! Figures of the results of `lambda-search` and `study`, from `search.json` and `study.json`.
//!
//! A value that is absent or of another type is shown as a dash.

use std::path::Path;

use serde_json::Value;
use sparse24_core::lambda::FEASIBLE;
use sparse24_run::{disk, json};

use super::{
    axis::{Axis, range},
    figure::{Figure, Numbers},
    plot::{Curve, Mark, Plot, Style, across},
    text::{Table, cell, minus, number},
};
use crate::count::counted;

const LARGEST: u64 = 16 << 20;
/// Each arm takes more memory drawn than read.
const MOST_VALUES: usize = json::VALUES / 8;

/// Draws a file; none if it is damaged.
type Draw = fn(&Value) -> Option<Figure>;

const KINDS: [(&str, Draw); 2] = [("search.json", search), ("study.json", study)];

#[derive(Default)]
pub(super) struct Conclusions {
    pub(super) figures: Vec<Figure>,
    pub(super) problems: Vec<String>,
    /// Names of the arms, in the order of the study.
    pub(super) arms: Vec<String>,
    /// The last step of a search's runs.
    pub(super) until: Option<u32>,
}

pub(super) fn conclusions(folder: &Path) -> Conclusions {
    let mut out = Conclusions::default();
    for (name, draw) in KINDS {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let text = disk::read_small(&path, LARGEST).unwrap_or_default();
        let value: Value = json::parse(&text, MOST_VALUES).unwrap_or_default();
        match draw(&value) {
            Some(figure) => out.figures.push(figure),
            None => out.problems.push(format!("{}: {name} is damaged.", folder.display())),
        }
        out.arms.extend(array(&value["arms"]).map(|arm| text_of(&arm["name"])));
        out.until = out.until.or(value["until"].as_u64().and_then(|step| step.try_into().ok()));
    }
    out
}

pub(super) fn is_folder(folder: &Path) -> bool {
    ["search.json", "search.toml", "study.json", "study.toml"]
        .iter()
        .any(|name| folder.join(name).is_file())
}

fn array(value: &Value) -> impl ExactSizeIterator<Item = &Value> + Clone {
    value.as_array().map_or(&[][..], Vec::as_slice).iter()
}

fn real(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

fn text_of(value: &Value) -> String {
    match value {
        Value::Null => "–".into(),
        Value::String(text) => text.clone(),
        other => minus(&other.to_string()),
    }
}

fn list(value: &Value, item: impl Fn(&Value) -> String) -> String {
    array(value).map(item).collect::<Vec<_>>().join(", ")
}

fn interval(low: f64, high: f64) -> String {
    match (low + high).is_finite() {
        true => format!("{} to {}", number(low, 3), number(high, 3)),
        false => "–".into(),
    }
}

/// μ over λ, with the feasible band.
fn search(value: &Value) -> Option<Figure> {
    let candidates = value["candidates"].as_array()?;
    let values: Vec<[f64; 4]> = candidates
        .iter()
        .map(|one| [&one["lambda"], &one["mu"], &one["interval"][0], &one["interval"][1]].map(real))
        .collect();
    let lambdas = values.iter().map(|[lambda, ..]| *lambda).filter(|lambda| *lambda > 0.0);
    let (low, high) = range(lambdas).unwrap_or((1e-6, 1e-3));
    let x = Axis::log("decay factor λ", low / 1.5, high * 1.5);
    let shown = values.iter().flat_map(|[_, shown @ ..]| *shown).chain([0.0, 1.0]);
    let y = Axis::around("μ, flip rate relative to dense training", shown);
    let bars = |&[lambda, _, low, high]: &[f64; 4]| [[lambda, low], [lambda, high], [f64::NAN; 2]];
    let [from, to] = [*FEASIBLE.start(), *FEASIBLE.end()];
    let mut band = Curve::new(2, [x.low, x.high].map(|at| [at, f64::NAN]));
    band.points.iter_mut().for_each(|point| (point.low, point.high) = (from, to));
    let curves = [
        Curve { has_band: true, ..band },
        Curve { style: Style::Faint, ..Curve::new(0, values.iter().flat_map(bars)) },
        Curve::new(0, values.iter().map(|&[lambda, mu, ..]| [lambda, mu])),
    ];
    let mark = |x: f64| Mark { x, label: format!("recommended: {}", number(x, 3)), run: None };
    let recommended = value["recommended"].as_f64();
    let conclusion = match recommended {
        Some(lambda) => format!("Recommended: λ = {}.", number(lambda, 3)),
        None => "No candidate is feasible.".into(),
    };
    let plot = Plot {
        id: "search-mu".into(),
        title: "Ratio of flip rates by decay factor".into(),
        description: format!("{}. {conclusion}", counted(candidates.len(), "candidate")),
        x,
        height: 280.0,
        marks: recommended.map(mark).into_iter().collect(),
        ..Plot::default()
    };
    let rows = candidates.iter().zip(&values).map(|(one, &[lambda, mu, low, high])| {
        vec![
            number(lambda, 3),
            number(mu, 3),
            interval(low, high),
            text_of(&one["verdict"]).replace('-', " "),
            number(real(&one["flip_rate"]), 3),
        ]
    });
    let columns = ["λ", "μ", "95 % interval over layers", "verdict", "flip rate"];
    Some(Figure {
        id: "search",
        title: "Search for the decay factor",
        lead: format!(
            "μ is the flip rate of sparse training over that of dense training with the same \
             weights and data, in a window of the first {} steps, over {}. μ is feasible between \
             {from} and {to}. {conclusion}",
            text_of(&value["until"]),
            counted(array(&value["seeds"]).len(), "seed")
        ),
        notes: value["advice"].as_str().map(str::to_owned).into_iter().collect(),
        numbers: Numbers::Open,
        tables: vec![Table::new("Candidates", &columns, rows)],
        plots: vec![(String::new(), plot.with_curves(y, &curves))],
        ..Figure::default()
    })
}

/// The difference of each arm to the reference, with its interval.
fn study(value: &Value) -> Option<Figure> {
    const ROW: f64 = 30.0;
    let arms = value["arms"].as_array()?;
    let reference = text_of(&value["reference"]);
    let difference = |arm: &Value| ["mean", "low", "high"].map(|key| real(&arm["difference"][key]));
    let x = Axis::around(
        format!("validation loss minus that of {reference}, nats"),
        arms.iter().flat_map(difference).chain([0.0]),
    );
    let (mut inside, mut levels) = (String::new(), Vec::new());
    for (row, arm) in arms.iter().enumerate() {
        let y = ROW * (row as f64 + 0.5);
        levels.push((y, text_of(&arm["name"])));
        let [mean, low, high] = difference(arm);
        let at = |value: f64| across(&x, value);
        if (low + high).is_finite() {
            inside += &format!("<path class=\"strong s0\" d=\"M{} {y}H{}\"/>\n", at(low), at(high));
        }
        if mean.is_finite() {
            inside += &format!("<path class=\"dots whole s0\" d=\"M{} {y}h0\"/>\n", at(mean));
        }
    }
    let plot = Plot {
        id: "study-arms".into(),
        title: "Difference in validation loss by arm".into(),
        description: format!(
            "{} compared with {reference}; the table below has the numbers.",
            counted(arms.len(), "arm")
        ),
        kind: "arms",
        height: ROW * arms.len() as f64,
        x,
        levels,
        marks: vec![Mark { x: 0.0, label: String::new(), run: None }],
        inside,
        ..Plot::default()
    };
    let rows = arms.iter().map(|arm| {
        let [mean, low, high] = difference(arm);
        vec![
            text_of(&arm["name"]),
            cell(real(&arm["val_loss"]["mean"])),
            format!("{}{}", if mean > 0.0 { "+" } else { "" }, number(mean, 3)),
            interval(low, high),
            text_of(&arm["difference"]["pairs"]),
            number(real(&arm["flip_rate"]), 3),
            number(real(&arm["mu"]), 3),
            array(&arm["failures"]).len().to_string(),
        ]
    });
    let columns = [
        "arm",
        "validation loss",
        "difference",
        "95 % interval",
        "pairs",
        "mean flip rate",
        "μ",
        "failed runs",
    ];
    let mut notes = vec![
        "Negative differences are better than the reference. The intervals are not corrected for \
         multiple comparisons: one in twenty misses."
            .to_owned(),
    ];
    notes.extend(best(&value["best"], &reference, arms.len()));
    notes.extend(array(&value["trends"]).map(trend));
    Some(Figure {
        id: "study",
        title: "Study",
        lead: format!(
            "Validation loss of each arm minus that of {reference} with the same seed: mean over \
             seeds and its 95 % interval (Student's t). {} of {} runs are done, {}.",
            text_of(&value["done"]),
            text_of(&value["of"]),
            counted(array(&value["seeds"]).len(), "seed")
        ),
        notes,
        numbers: Numbers::Open,
        tables: vec![Table::new(format!("Arms, compared with {reference}"), &columns, rows)],
        plots: vec![(String::new(), plot)],
        ..Figure::default()
    })
}

/// The arm with the lowest mean, and the reference against the arm chosen on the other seeds.
fn best(best: &Value, reference: &str, arms: usize) -> Option<String> {
    best.as_object()?;
    let among = match array(&best["among"]).len() {
        all if all == arms => "all arms".to_owned(),
        _ => list(&best["among"], text_of),
    };
    let left_out = &best["left_out"];
    let against = match list(&left_out["by_seed"], |value| number(real(value), 3)) {
        none if none.is_empty() => none,
        by_seed => format!(
            " The loss of {reference} minus that of the arm chosen on the other seeds is {} on \
             average; by seed: {by_seed}. The choices share seeds, so there is no interval.",
            number(real(&left_out["mean"]), 3)
        ),
    };
    Some(format!("Lowest mean loss among {among}: {}.{against}", text_of(&best["arm"])))
}

fn trend(trend: &Value) -> String {
    let [flip_rate, val_loss] = ["flip_rate", "val_loss"].map(|key| number(real(&trend[key]), 2));
    format!(
        "Spearman's rank correlation of λ over {}: {flip_rate} with the mean flip rate and \
         {val_loss} with the mean validation loss.",
        list(&trend["arms"], text_of)
    )
}
