//! What `lambda-search` and `study` concluded, from their `search.json` and `study.json`.
//!
//! Read as far as it goes: what is absent or of another type is a dash.

use std::path::Path;

use serde_json::Value;

use super::{
    axis::{Axis, range},
    chart::{Chart, Series},
    figure::{Figure, Numbers, cell},
    frame::{Frame, Mark, across},
    markup::{Table, number, signed},
};
use sparse24_run::disk;

const LARGEST: u64 = 16 << 20;

/// The feasible ratios of flip rates.
const FEASIBLE: [f64; 2] =
    [*sparse24_core::lambda::FEASIBLE.start(), *sparse24_core::lambda::FEASIBLE.end()];

/// What a file of conclusions says; none if it says something else.
type Conclude = fn(&Value) -> Option<Figure>;

const KINDS: [(&str, Conclude); 2] = [("search.json", search), ("study.json", study)];

/// What the files of a search or a study say.
#[derive(Default)]
pub(super) struct Conclusions {
    pub(super) figures: Vec<Figure>,
    /// What is wrong with them.
    pub(super) problems: Vec<String>,
    /// The arms, in the order of the study.
    pub(super) arms: Vec<String>,
    /// The step after which a search stops its runs.
    pub(super) until: Option<u32>,
}

/// Those of a folder.
pub(super) fn conclusions(folder: &Path) -> Conclusions {
    let mut out = Conclusions::default();
    for (name, draw) in KINDS {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let value = disk::read_small(&path, LARGEST)
            .ok()
            .and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        match value.as_ref().and_then(draw) {
            Some(figure) => out.figures.push(figure),
            None => out.problems.push(format!("{}: {name} is damaged.", folder.display())),
        }
        if let Some(value) = value {
            out.arms.extend(
                value["arms"].as_array().into_iter().flatten().map(|arm| text(&arm["name"])),
            );
            out.until = out.until.or(value["until"].as_u64().and_then(|step| step.try_into().ok()));
        }
    }
    out
}

/// Whether a folder is one of them.
pub(super) fn is_folder(folder: &Path) -> bool {
    ["search.json", "search.toml", "study.json", "study.toml"]
        .iter()
        .any(|name| folder.join(name).is_file())
}

fn real(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "–".into(),
        Value::String(text) => text.clone(),
        other => signed(&other.to_string()),
    }
}

fn interval(low: f64, high: f64) -> String {
    if (low + high).is_finite() {
        format!("{} to {}", number(low, 3), number(high, 3))
    } else {
        "–".into()
    }
}

/// Mu over lambda, with the feasible band.
fn search(value: &Value) -> Option<Figure> {
    let candidates = value["candidates"].as_array()?;
    let recommended = value["recommended"].as_f64();
    let of = |candidate: &Value| {
        (
            real(&candidate["lambda"]),
            real(&candidate["mu"]),
            real(&candidate["interval"][0]),
            real(&candidate["interval"][1]),
        )
    };
    let (low, high) =
        range(candidates.iter().map(|candidate| of(candidate).0).filter(|lambda| *lambda > 0.0))
            .unwrap_or((1e-6, 1e-3));
    let x = Axis::log("decay factor λ", low / 1.5, high * 1.5);
    let values = candidates.iter().map(of).flat_map(|(_, mu, low, high)| [mu, low, high]);
    let y = Axis::around("μ, flip rate over that of dense training", values.chain([0.0, 1.0]));
    let points = candidates.iter().map(of).map(|(lambda, mu, ..)| [lambda, mu]).collect();
    let bars = candidates
        .iter()
        .map(of)
        .flat_map(|(lambda, _, low, high)| [[lambda, low], [lambda, high], [f64::NAN; 2]])
        .collect();
    let [from, to] = FEASIBLE;
    let feasible = Series {
        number: 2,
        band: vec![[x.low, from, to], [x.high, from, to]],
        ..Series::default()
    };
    let marks = recommended.map(|lambda| Mark {
        x: lambda,
        label: format!("recommended: {}", number(lambda, 3)),
        series: None,
    });
    let advice = value["advice"].as_str().map(str::to_owned);
    let conclusion = match recommended {
        Some(lambda) => format!("Recommended: λ = {}.", number(lambda, 3)),
        None => "No candidate is feasible.".into(),
    };
    let (seeds, until) = (value["seeds"].as_array().map_or(0, Vec::len), text(&value["until"]));
    let chart = Chart {
        id: "search-mu".into(),
        title: "Ratio of flip rates by decay factor".into(),
        description: format!("{} candidates. {conclusion}", candidates.len()),
        x,
        y,
        height: 280.0,
        series: vec![
            feasible,
            Series { number: 0, strong: points, faint: bars, ..Series::default() },
        ],
        marks: marks.into_iter().collect(),
        column: 0,
    };
    let rows = candidates.iter().map(|candidate| {
        let (lambda, mu, low, high) = of(candidate);
        vec![
            number(lambda, 3),
            number(mu, 3),
            interval(low, high),
            text(&candidate["verdict"]).replace('-', " "),
            number(real(&candidate["flip_rate"]), 3),
        ]
    });
    let table = Table {
        caption: "Candidates".into(),
        columns: ["λ", "μ", "95 % interval over layers", "verdict", "flip rate"]
            .map(str::to_owned)
            .into(),
        rows: rows.collect(),
        series: None,
    };
    let lead = format!(
        "μ is the flip rate of sparse training over that of dense training with the same weights and data, in a window of the first {until} steps, over {} {}. \
         Feasible is the band from {from} to {to}. {conclusion}",
        seeds,
        if seeds == 1 { "seed" } else { "seeds" }
    );
    Some(Figure {
        notes: advice.into_iter().collect(),
        numbers: Numbers::Open,
        ..Figure::of(["search", "Search of the decay factor"], lead, chart.draw(), vec![table])
    })
}

/// The difference of each arm to the reference, with its interval.
fn study(value: &Value) -> Option<Figure> {
    const ROW: f64 = 30.0;
    let arms = value["arms"].as_array()?;
    let reference = text(&value["reference"]);
    let of = |arm: &Value| ["mean", "low", "high"].map(|key| real(&arm["difference"][key]));
    let x = Axis::around(
        format!("held-out loss above that of {reference}, nats a token"),
        arms.iter().flat_map(of).chain([0.0]),
    );
    let height = ROW * arms.len() as f64;
    let mut inside = String::new();
    let mut levels = Vec::new();
    for (row, arm) in (0..).zip(arms) {
        let y = ROW * (f64::from(row) + 0.5);
        levels.push((y, text(&arm["name"])));
        let [mean, low, high] = of(arm);
        if (low + high).is_finite() {
            inside += &format!(
                "<path class=\"strong s0\" d=\"M{} {y}H{}\"/>\n",
                across(&x, low),
                across(&x, high)
            );
        }
        if mean.is_finite() {
            inside +=
                &format!("<path class=\"dots whole s0\" d=\"M{} {y}h0\"/>\n", across(&x, mean));
        }
    }
    let frame = Frame {
        id: "study-arms".into(),
        title: "Difference in held-out loss by arm".into(),
        description: format!(
            "{} arms against {reference}; the table below has the numbers.",
            arms.len()
        ),
        class: "arms",
        height,
        x,
        y_label: String::new(),
        levels,
        marks: vec![Mark { x: 0.0, label: String::new(), series: None }],
        column: 0,
    };
    let rows = arms.iter().map(|arm| {
        let [mean, low, high] = of(arm);
        let difference = if mean.is_finite() {
            format!("{}{}", if mean > 0.0 { "+" } else { "" }, number(mean, 3))
        } else {
            "–".into()
        };
        let failures = arm["failures"].as_array().map_or(0, Vec::len).to_string();
        vec![
            text(&arm["name"]),
            cell(real(&arm["val_loss"]["mean"])),
            difference,
            interval(low, high),
            text(&arm["difference"]["pairs"]),
            number(real(&arm["flip_rate"]), 3),
            number(real(&arm["mu"]), 3),
            failures,
        ]
    });
    let head = [
        "arm",
        "held-out loss",
        "difference",
        "95 % interval",
        "pairs",
        "flip rate",
        "μ",
        "failed runs",
    ];
    let table = Table {
        caption: format!("Arms; differences to {reference}"),
        columns: head.map(str::to_owned).into(),
        rows: rows.collect(),
        series: None,
    };
    let seeds = value["seeds"].as_array().map_or(0, Vec::len);
    let mut notes = vec!["Left of the line is better than the reference. Intervals stand by themselves: of twenty, one misses.".to_owned()];
    notes.extend(best(&value["best"], &reference, arms.len()));
    notes.extend(value["trends"].as_array().into_iter().flatten().map(trend));
    let lead = format!(
        "Held-out loss of each arm minus that of {reference} at the same seed, the mean over seeds with its 95 % interval (Student's t). {} of {} runs are done, {seeds} seeds.",
        text(&value["done"]),
        text(&value["of"])
    );
    Some(Figure {
        notes,
        numbers: Numbers::Open,
        ..Figure::of(["study", "Study"], lead, frame.draw(&inside, ""), vec![table])
    })
}

/// The arm of the lowest mean, and the reference against it, chosen on other seeds.
fn best(best: &Value, reference: &str, arms: usize) -> Option<String> {
    let among = match best["among"].as_array()? {
        all if all.len() == arms => "all arms".to_owned(),
        some => some.iter().map(text).collect::<Vec<_>>().join(", "),
    };
    let left_out = &best["left_out"];
    let by_seed: Vec<String> = left_out["by_seed"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|value| number(real(value), 3))
        .collect();
    let against = match by_seed.as_slice() {
        [] => String::new(),
        by_seed => format!(
            " Minus the best of the other seeds, {reference} has {} on average, {} by seed. The choices share seeds, so that these have no interval.",
            number(real(&left_out["mean"]), 3),
            by_seed.join(", ")
        ),
    };
    Some(format!("Lowest mean loss: {}, of {among}.{against}", text(&best["arm"])))
}

/// How arms go with lambda.
fn trend(trend: &Value) -> String {
    let arms =
        trend["arms"].as_array().into_iter().flatten().map(text).collect::<Vec<_>>().join(", ");
    let [flip_rate, val_loss] = ["flip_rate", "val_loss"].map(|key| number(real(&trend[key]), 2));
    format!(
        "With λ, over {arms}: Spearman's rank correlation is {flip_rate} of the mean flip rate and {val_loss} of the mean held-out loss."
    )
}
