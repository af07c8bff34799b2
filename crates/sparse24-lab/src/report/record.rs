//! What a run directory tells of its run, as much of it as can be read.
//!
//! Invariant: nothing in a directory makes this fail; what is missing or damaged is a sentence in
//! [`Record::problems`]. Nothing is written, and no lock is taken: a run under way is read as far
//! as it is. Deliberately absent: what the numbers look like.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

use super::markup::{counted, number};
use sparse24_run::{Error, config::renamed, disk, run::Instruments};
use sparse24_train::{
    method::{Method, PhaseKind},
    optim::MaskedDecay,
};

/// A run as it was left.
pub(super) struct Record {
    /// Its directory.
    pub(super) path: PathBuf,
    /// What tells it from the others.
    pub(super) name: String,
    /// Dotted keys and TOML values; empty if they cannot be read.
    pub(super) config: BTreeMap<String, String>,
    /// Its starts, oldest first.
    pub(super) starts: Vec<Value>,
    /// In order.
    pub(super) steps: Vec<Step>,
    /// The steps at which a phase of another kind begins, and that kind; the first step is none.
    pub(super) switches: Vec<(u32, PhaseKind)>,
    /// Step and loss on the held-out split.
    pub(super) validation: Vec<(u32, f64)>,
    /// Step and flip rate.
    pub(super) flips: Vec<(u32, f64)>,
    /// Names of the sparsifiable weights, in the order of the model.
    pub(super) layers: Vec<String>,
    /// Step and flip rate of each of them.
    pub(super) layer_flips: Vec<(u32, Vec<f32>)>,
    /// Step and what was measured there besides.
    pub(super) instruments: Vec<(u32, Instruments)>,
    /// The last lines of `log.txt`.
    pub(super) log: Vec<String>,
    /// What is missing or damaged, each a sentence.
    pub(super) problems: Vec<String>,
    /// The step after which it was to stop, where that is before its last.
    pub(super) until: Option<u32>,
}

/// What every step measures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    pub(super) step: u32,
    pub(super) loss: f32,
    pub(super) lr: f32,
    pub(super) grad_norm: f32,
    pub(super) tokens_per_s: f32,
    /// All steps up to this one; NaN where the tokens of a step are not known.
    pub(super) seconds: f64,
}

/// A line of `metrics.jsonl`, of this or another version.
#[derive(Deserialize)]
struct Line {
    step: u32,
    phase: PhaseKind,
    // Whatever fits f64 is a number, be it out of f32's range.
    loss: Option<f64>,
    lr: Option<f64>,
    grad_norm: Option<f64>,
    tokens_per_s: Option<f64>,
    flip_rate: Option<f64>,
    flip_rate_per_layer: Option<BTreeMap<String, f64>>,
    val_loss: Option<f64>,
    instruments: Option<Instruments>,
}

/// Longest line of metrics, and largest small file.
const LONGEST_LINE: u64 = 1 << 20;
const LARGEST_FILE: u64 = 16 << 20;
const LOG_LINES: usize = 12;
/// More than any method has.
const SWITCHES: usize = 16;

/// What tells a run, however little of it is left.
const FILES: [&str; 5] =
    ["config.toml", "provenance.json", "metrics.jsonl", "log.txt", "lambda-search"];

impl Record {
    /// Reads what is there.
    ///
    /// # Errors
    /// [`Error::File`] for a path that is no directory, or none of a run.
    pub(super) fn read(path: &Path) -> Result<Self, Error> {
        if !path.is_dir() {
            return Err(Error::file(path, "is no run directory: there is no such directory"));
        }
        if !FILES.iter().any(|name| path.join(name).exists()) {
            let problem = format!(
                "is no run directory: it holds none of {}; several runs are named one by one",
                FILES.join(", ")
            );
            return Err(Error::file(path, problem));
        }
        let mut record = Self {
            path: path.to_owned(),
            name: String::new(),
            config: BTreeMap::new(),
            starts: Vec::new(),
            steps: Vec::new(),
            switches: Vec::new(),
            validation: Vec::new(),
            flips: Vec::new(),
            layers: Vec::new(),
            layer_flips: Vec::new(),
            instruments: Vec::new(),
            log: Vec::new(),
            problems: Vec::new(),
            until: None,
        };
        record.read_config();
        record.read_provenance();
        record.read_metrics();
        record.read_log();
        Ok(record)
    }

    /// The steps that the configuration asks for.
    pub(super) fn steps_asked(&self) -> Option<u32> {
        self.config.get("steps")?.parse().ok()
    }

    /// The step measured last; 0 if none is.
    pub(super) fn last_step(&self) -> u32 {
        self.steps.last().map_or(0, |step| step.step)
    }

    /// Tokens of one optimizer step.
    pub(super) fn tokens_per_step(&self) -> Option<f64> {
        let number = |key: &str| self.config.get(key)?.parse::<f64>().ok();
        Some(
            number("batch.size")?
                * number("batch.gradient_accumulation_steps")?
                * number("model.sequence_length")?,
        )
    }

    /// The value of a key, without the quotes of a string.
    pub(super) fn setting(&self, key: &str) -> Option<&str> {
        self.config.get(key).map(|value| value.trim_matches('"'))
    }

    /// The method in words, with the factor of its decay where it has one.
    pub(super) fn method(&self) -> String {
        let Some(name) = self.setting("method.name") else { return "method unknown".into() };
        let lambda = self
            .setting("method.lambda")
            .and_then(|lambda| lambda.parse::<f32>().ok())
            .unwrap_or(f32::NAN);
        let own = match Method::preset(name, lambda).map(|method| method.decay) {
            Some(MaskedDecay::OnGradients(_)) => "on-gradients",
            Some(MaskedDecay::OnWeights(_)) => "on-weights",
            _ => "",
        };
        let decay = self.setting("method.decay").filter(|decay| !decay.is_empty()).unwrap_or(own);
        match decay {
            "" | "none" => name.to_owned(),
            decay => {
                format!("{name}, λ = {} {}", number(f64::from(lambda), 3), decay.replace('-', " "))
            }
        }
    }

    /// Seconds of all steps up to this one, by the nearest step measured before it.
    pub(super) fn seconds_at(&self, step: u32) -> f64 {
        let after = self.steps.partition_point(|measured| measured.step <= step);
        after.checked_sub(1).map_or(0.0, |at| self.steps[at].seconds)
    }

    fn text(&mut self, name: &str) -> Option<String> {
        let path = self.path.join(name);
        match disk::read_small(&path, LARGEST_FILE) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(_) if !path.exists() => {
                self.problems.push(format!("{name} is missing"));
                None
            }
            Err(error) => {
                self.problems.push(format!("{name} cannot be read: {error}"));
                None
            }
        }
    }

    fn read_config(&mut self) {
        let Some(text) = self.text("config.toml") else { return };
        match text.parse::<toml::Table>() {
            Ok(mut table) => {
                renamed::update(&mut table);
                flatten(table, "", &mut self.config);
            }
            Err(_) => self.problems.push("config.toml is damaged: it is no TOML".into()),
        }
    }

    fn read_provenance(&mut self) {
        let Some(text) = self.text("provenance.json") else { return };
        match serde_json::from_str(&text) {
            Ok(Value::Array(starts)) => self.starts = starts,
            _ => self.problems.push("provenance.json is damaged: it is no list of starts".into()),
        }
    }

    fn read_log(&mut self) {
        let path = self.path.join("log.txt");
        // The end of a long one is enough.
        let Ok((file, length)) = disk::open(&path) else {
            return self.problems.push("log.txt is missing".into());
        };
        let mut lines = Vec::new();
        let mut reader = BufReader::new(file);
        let skipped = length.saturating_sub(1 << 16);
        let mut bytes = Vec::new();
        if std::io::copy(&mut (&mut reader).take(skipped), &mut std::io::sink()).is_ok()
            && reader.take(1 << 16).read_to_end(&mut bytes).is_ok()
        {
            lines.extend(String::from_utf8_lossy(&bytes).lines().map(str::to_owned));
        }
        self.log = lines.split_off(lines.len().saturating_sub(LOG_LINES));
    }

    fn read_metrics(&mut self) {
        let Ok((file, _)) = disk::open(&self.path.join("metrics.jsonl")) else {
            let missing = !fs::exists(self.path.join("metrics.jsonl")).unwrap_or(true);
            return self.problems.push(format!(
                "metrics.jsonl {}: there are no curves",
                if missing { "is missing" } else { "cannot be read" }
            ));
        };
        let tokens = self.tokens_per_step().unwrap_or(f64::NAN);
        let mut reader = BufReader::with_capacity(1 << 16, file);
        let mut bytes = Vec::new();
        let (mut number, mut unread, mut phase, mut lost) = (0_u64, Vec::new(), None, 0_u64);
        loop {
            bytes.clear();
            match (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut bytes) {
                Ok(0) => break,
                Ok(_) => number += 1,
                Err(error) => {
                    self.problems.push(format!(
                        "metrics.jsonl cannot be read beyond line {number}: {error}"
                    ));
                    break;
                }
            }
            let last = self.steps.last().map(|step| step.step);
            let line = serde_json::from_slice::<Line>(&bytes)
                .ok()
                .filter(|line| last.unwrap_or(0) < line.step);
            let Some(line) = line else {
                unread.push(number);
                // The rest of a line that is too long is no line.
                while bytes.last().is_some_and(|&byte| byte != b'\n') {
                    bytes.clear();
                    let _ = (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut bytes);
                }
                continue;
            };
            lost += u64::from(line.step - last.unwrap_or(0) - 1);
            if phase.is_some_and(|phase| phase != line.phase) && self.switches.len() < SWITCHES {
                self.switches.push((line.step, line.phase));
            }
            phase = Some(line.phase);
            self.take(line, tokens);
        }
        // The line being written when the power failed is expected, and no step.
        if let Some(first) = unread.first() {
            let count = counted(unread.len() as u64, "line");
            self.problems.push(format!(
                "metrics.jsonl: {count} of {number} cannot be read and {} left out, the first is line {first}",
                if unread.len() == 1 { "is" } else { "are" }
            ));
        }
        if lost > 0 {
            self.problems.push(format!(
                "metrics.jsonl: {} before step {} {} missing",
                counted(lost, "step"),
                self.last_step(),
                if lost == 1 { "is" } else { "are" }
            ));
        }
        if self.steps.is_empty() {
            self.problems.push("metrics.jsonl has no step: there are no curves".into());
        }
    }

    fn take(&mut self, line: Line, tokens: f64) {
        let Line {
            step,
            phase: _,
            loss,
            lr,
            grad_norm,
            tokens_per_s,
            flip_rate,
            flip_rate_per_layer,
            val_loss,
            instruments,
        } = line;
        let rate = tokens_per_s.filter(|rate| *rate > 0.0).unwrap_or(f64::NAN);
        let before = self.steps.last().map_or(0.0, |step| step.seconds);
        let or_nan = |value: Option<f64>| {
            value.map(|value| value as f32).filter(|value| value.is_finite()).unwrap_or(f32::NAN)
        };
        let seconds = before + if rate.is_nan() { 0.0 * tokens } else { tokens / rate };
        self.steps.push(Step {
            step,
            loss: or_nan(loss),
            lr: or_nan(lr),
            grad_norm: or_nan(grad_norm),
            tokens_per_s: rate as f32,
            seconds,
        });
        self.validation.extend(val_loss.map(|loss| (step, loss)));
        self.flips.extend(flip_rate.map(|rate| (step, rate)));
        if let Some(rates) = flip_rate_per_layer {
            if self.layers.is_empty() {
                self.layers = rates.keys().cloned().collect();
                self.layers.sort_by_cached_key(|name| natural(name));
            }
            let rates = self
                .layers
                .iter()
                .map(|layer| rates.get(layer).map_or(f32::NAN, |rate| *rate as f32));
            self.layer_flips.push((step, rates.collect()));
        }
        if let Some(instruments) = instruments {
            // Of the tiles the last sample is drawn, which counts those before it.
            if let Some((_, before)) = self.instruments.last_mut() {
                before.tiles = Vec::new();
            }
            self.instruments.push((step, instruments));
        }
    }
}

/// Dotted keys and values of a table.
fn flatten(table: toml::Table, prefix: &str, into: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        match value {
            toml::Value::Table(section) => flatten(section, &format!("{prefix}{key}."), into),
            value => drop(into.insert(format!("{prefix}{key}"), value.to_string())),
        }
    }
}

/// Orders names as a person counts: `h.2` before `h.10`.
pub(super) fn natural(name: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let end =
            rest[text..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |at| text + at);
        // Text before its number: what has the same text is ordered by number.
        parts.push((0, rest[..text].to_owned()));
        parts.push((rest[text..end].parse().unwrap_or(u64::MAX), String::new()));
        rest = &rest[end..];
    }
    parts
}

/// The shortest ends of the paths that differ, of one length for all.
pub(super) fn name_all(records: &mut [Record]) {
    let parts: Vec<Vec<String>> = records
        .iter()
        .map(|record| {
            let whole = fs::canonicalize(&record.path).unwrap_or_else(|_| record.path.clone());
            whole.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
        })
        .collect();
    let end =
        |at: usize, length: usize| parts[at][parts[at].len().saturating_sub(length)..].join("/");
    let longest = parts.iter().map(Vec::len).max().unwrap_or(0);
    let differ = |length: &usize| {
        (0..parts.len()).all(|at| {
            (0..at)
                .all(|other| parts[other] == parts[at] || end(other, *length) != end(at, *length))
        })
    };
    let length = (1..=longest).find(differ).unwrap_or(longest);
    for (at, record) in records.iter_mut().enumerate() {
        record.name = end(at, length);
    }
}

#[cfg(test)]
mod tests {
    use super::natural;

    #[test]
    fn layers_are_in_the_order_of_the_model() {
        let mut names = ["h.10.mlp.c_fc", "h.2.mlp.c_proj", "h.2.mlp.c_fc"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["h.2.mlp.c_fc", "h.2.mlp.c_proj", "h.10.mlp.c_fc"]);
    }
}
