//! The contents of a run directory, as far as they can be read.
//!
//! Invariant: nothing in a directory makes this fail; missing or damaged files are sentences in
//! [`Record::problems`]. Nothing is written and no lock is taken, so a run in progress can be read.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use serde_json::Value;
use sparse24_run::{
    Error,
    config::{Config, ModelKind, dotted, table_of},
    disk, json,
    run::{Instruments, MetricsLog, RunDirectory, StepMetrics, has_config},
};
use sparse24_train::{method::PhaseKind, optim::MaskedDecay};

use super::text::number;
use crate::{
    count::{counted, grouped},
    runs::tokens_of,
};

/// Start of a report's message that the metrics of this many steps are missing.
#[must_use]
pub fn missing(steps: usize) -> String {
    format!("metrics.jsonl: {} before step", counted(steps, "step"))
}

#[derive(Default)]
pub(super) struct Record {
    pub(super) path: PathBuf,
    /// Unique within the page.
    pub(super) name: String,
    /// None if `config.toml` is missing or damaged.
    pub(super) config: Option<Config>,
    /// Dotted keys and TOML values; also of a configuration that does not resolve.
    pub(super) settings: BTreeMap<String, String>,
    /// `provenance.json`: an object for each start, oldest first.
    pub(super) starts: Vec<Value>,
    pub(super) steps: Vec<Step>,
    /// First steps of the phases whose kind differs from the one before.
    pub(super) switches: Vec<(u32, PhaseKind)>,
    pub(super) validation: Vec<[f64; 2]>,
    /// The score that the task of a fine-tuning is judged by.
    pub(super) scores: Vec<[f64; 2]>,
    pub(super) flips: Vec<[f64; 2]>,
    /// Names of the sparsifiable weights, in the order of the model.
    pub(super) layers: Vec<String>,
    /// Step and flip rate of each layer.
    pub(super) layer_flips: Vec<(u32, Vec<f32>)>,
    pub(super) samples: Vec<Sample>,
    /// Step, and gap and flips of some tiles, of the last sample of the instruments.
    pub(super) tiles: (u32, Vec<(f32, u32)>),
    /// The last lines of `log.txt`.
    pub(super) log: Vec<String>,
    pub(super) problems: Vec<String>,
    /// Where a search stopped the run, if before its last step.
    pub(super) until: Option<u32>,
}

/// The values that every step has; NaN for a value that is not known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    pub(super) step: u32,
    pub(super) loss: f32,
    pub(super) lr: f32,
    pub(super) grad_norm: f32,
    pub(super) tokens_per_s: f64,
    /// Sum over the steps up to this one.
    pub(super) seconds: f64,
}

/// The instruments' values that are drawn against the step.
pub(super) struct Sample {
    step: u32,
    pub(super) gap: [f32; 5],
    pub(super) kept: f64,
    pub(super) mvue_variance: Option<f64>,
}

const LARGEST_FILE: u64 = 16 << 20;
/// Bytes of the log that are read, and lines that are shown.
const LOG_BYTES: u64 = 1 << 16;
const LOG_LINES: usize = 12;
/// More than any method has.
const SWITCHES: usize = 16;

/// A directory with any of these is a run.
const FILES: [&str; 5] =
    ["config.toml", "provenance.json", "metrics.jsonl", "log.txt", "lambda-search"];

impl Record {
    /// Reads a run directory.
    ///
    /// # Errors
    /// [`Error::File`] if `path` is not a directory or holds no file of a run; [`Error::Io`] if the
    /// system does not show it.
    pub(super) fn read(path: &Path) -> Result<Self, Error> {
        has_config(path)?;
        if !disk::is_folder(path)? {
            return Err(RunDirectory::missing(path));
        }
        if !FILES.iter().any(|name| path.join(name).exists()) {
            let problem = format!(
                "is not a run directory: it holds none of {}; name each run separately",
                FILES.join(", ")
            );
            return Err(Error::file(path, problem));
        }
        let mut record = Self { path: path.to_owned(), ..Self::default() };
        record.read_config();
        if let Some(text) = record.text("provenance.json") {
            match json::parse(text.as_bytes(), json::VALUES) {
                Ok(starts) => record.starts = starts,
                Err(problem) => record.problem(format!("provenance.json is damaged: {problem}")),
            }
        }
        record.read_metrics();
        record.read_log();
        Ok(record)
    }

    /// A run that cannot be read, or not yet.
    pub(super) fn absent(path: &Path, error: &Error) -> Self {
        Self { path: path.to_owned(), problems: vec![error.to_string()], ..Self::default() }
    }

    fn problem(&mut self, problem: impl Into<String>) {
        self.problems.push(problem.into());
    }

    pub(super) fn steps_asked(&self) -> Option<u32> {
        self.config.as_ref().map(|config| config.steps)
    }

    /// The last step with metrics; 0 if there is none.
    pub(super) fn last_step(&self) -> u32 {
        self.steps.last().map_or(0, |step| step.step)
    }

    /// Seconds of all steps; NaN if the tokens of a step are not known.
    pub(super) fn seconds(&self) -> f64 {
        self.steps.last().map_or(0.0, |step| step.seconds)
    }

    /// Seconds of all steps up to this one.
    pub(super) fn seconds_at(&self, step: u32) -> f64 {
        let after = self.steps.partition_point(|measured| measured.step <= step);
        after.checked_sub(1).map_or(0.0, |at| self.steps[at].seconds)
    }

    pub(super) fn points(&self, value: impl Fn(&Step) -> f64) -> Vec<[f64; 2]> {
        self.steps.iter().map(|step| [step.step.into(), value(step)]).collect()
    }

    /// Step and value of each sample of the instruments that has it.
    pub(super) fn instrument(&self, value: impl Fn(&Sample) -> Option<f64>) -> Vec<[f64; 2]> {
        let samples = self.samples.iter();
        samples.filter_map(|sample| Some([sample.step.into(), value(sample)?])).collect()
    }

    /// A setting, without the quotes of a string.
    pub(super) fn setting(&self, key: &str) -> Option<&str> {
        self.settings.get(key).map(|value| value.trim_matches('"'))
    }

    /// The method and the factor of its masked decay, and since when if a resume changed them.
    pub(super) fn method(&self) -> String {
        let changes = |start: &Value| {
            let changed = start["changed"].as_object();
            changed.is_some_and(|changed| changed.keys().any(|key| key.starts_with("method.")))
        };
        let Some(at) = self.starts.iter().rposition(changes) else { return self.last_method() };
        // A later resume may have gone back.
        match self.starts[at..].iter().filter_map(|start| start["after"].as_u64()).min() {
            Some(0) => self.last_method(),
            Some(after) => {
                format!("{}, from step {}", self.last_method(), grouped(after.saturating_add(1)))
            }
            None => format!("{}, since a resume", self.last_method()),
        }
    }

    fn last_method(&self) -> String {
        let name = self.setting("method.name").unwrap_or("unknown method");
        let method = self.config.as_ref().and_then(|config| config.method_value().ok());
        let (lambda, target) = match method.map(|method| method.decay) {
            Some(MaskedDecay::OnGradients(lambda)) => (lambda, "gradients"),
            Some(MaskedDecay::OnWeights(lambda)) => (lambda, "weights"),
            _ => return name.to_owned(),
        };
        format!("{name}, λ = {} on {target}", number(lambda.into(), 3))
    }

    fn text(&mut self, name: &str) -> Option<String> {
        let path = self.path.join(name);
        match disk::read_small(&path, LARGEST_FILE) {
            Ok(bytes) => return Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(_) if matches!(disk::exists(&path), Ok(false)) => {
                self.problem(format!("{name} is missing"))
            }
            Err(error) => self.problem(format!("{name} cannot be read: {error}")),
        }
        None
    }

    fn read_config(&mut self) {
        let Some(text) = self.text("config.toml") else { return };
        match Config::read(&self.path.join("config.toml")) {
            Ok(config) => {
                self.settings = dotted(table_of(&config));
                self.config = Some(config);
            }
            Err(error) => {
                self.settings = text.parse().map(dotted).unwrap_or_default();
                self.problem(format!("config.toml is damaged: {error}"));
            }
        }
    }

    fn read_log(&mut self) {
        let read = || {
            let (mut file, length) = disk::open(&self.path.join("log.txt")).ok()?;
            file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES))).ok()?;
            let mut bytes = Vec::new();
            file.take(LOG_BYTES).read_to_end(&mut bytes).ok()?;
            Some(String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect::<Vec<_>>())
        };
        match read() {
            Some(mut lines) => self.log = lines.split_off(lines.len().saturating_sub(LOG_LINES)),
            None => self.problem("log.txt is missing"),
        }
    }

    fn read_metrics(&mut self) {
        let path = self.path.join("metrics.jsonl");
        let tokens = self.config.as_ref().map(tokens_of);
        let (mut phase, mut lost) = (None, 0);
        let salvaged = MetricsLog::salvage(&path, |metrics| {
            lost += metrics.step.saturating_sub(self.last_step() + 1) as usize;
            if phase.is_some_and(|phase| phase != metrics.phase) && self.switches.len() < SWITCHES {
                self.switches.push((metrics.step, metrics.phase));
            }
            phase = Some(metrics.phase);
            let of_step = || tokens.as_ref().map_or(f64::NAN, |of| of(metrics.step));
            let tokens = metrics.tokens.map_or_else(of_step, |tokens| tokens as f64);
            self.take(metrics, tokens);
        });
        match salvaged {
            Ok(salvaged) if salvaged.damaged > 0 => self.problem(format!(
                "metrics.jsonl: {} of {} cannot be read and {} left out; the first is line {}",
                counted(salvaged.damaged, "line"),
                salvaged.lines,
                is(salvaged.damaged),
                salvaged.first
            )),
            Ok(_) => {}
            Err(_) if matches!(disk::exists(&path), Ok(false)) => {
                return self.problem("metrics.jsonl is missing, so there are no curves");
            }
            Err(error) => self.problem(error.to_string()),
        }
        if lost > 0 {
            let (lost, last, are) = (missing(lost), self.last_step(), is(lost));
            self.problem(format!("{lost} {last} {are} missing"));
        }
        if self.steps.is_empty() {
            self.problem("metrics.jsonl has no step, so there are no curves");
        }
    }

    /// The name of the score that its task is judged by, or its kind of model.
    pub(super) fn score_name(&self) -> Option<&'static str> {
        let config = self.config.as_ref()?;
        match config.model.kind {
            ModelKind::Deit => Some("acc@1"),
            ModelKind::Transformer => Some("bleu"),
            _ => Some(config.task().ok()??.scores.first()?.name()),
        }
    }

    fn take(&mut self, metrics: StepMetrics, tokens: f64) {
        let speed = metrics.speed();
        let StepMetrics { step, loss, lr, grad_norm, .. } = metrics;
        let finite = |value: f32| if value.is_finite() { value } else { f32::NAN };
        let seconds = self.seconds() + speed.map_or(0.0 * tokens, |speed| tokens / speed);
        self.steps.push(Step {
            step,
            loss: finite(loss),
            lr: finite(lr),
            grad_norm: finite(grad_norm),
            tokens_per_s: speed.unwrap_or(f64::NAN),
            seconds,
        });
        self.validation.extend(metrics.val_loss.map(|loss| [step.into(), loss]));
        let score = self.score_name().and_then(|name| metrics.scores.get(name));
        self.scores.extend(score.map(|&score| [step.into(), score]));
        self.flips.extend(metrics.flip_rate.map(|rate| [step.into(), rate]));
        if let Some(rates) = metrics.flip_rate_per_layer.filter(|rates| !rates.is_empty()) {
            if self.layers.is_empty() {
                self.layers = rates.keys().cloned().collect();
                self.layers.sort_by_cached_key(|name| natural(name));
            }
            let rate = |layer| rates.get(layer).map_or(f32::NAN, |rate| *rate as f32);
            // A row of NaNs for a short line would take more memory than the line.
            if rates.len() == self.layers.len() {
                self.layer_flips.push((step, self.layers.iter().map(rate).collect()));
            }
        }
        if let Some(instruments) = metrics.instruments {
            let Instruments { kept, gap, mvue_variance, tiles, .. } = *instruments;
            self.samples.push(Sample { step, gap, kept, mvue_variance });
            // They include the flips before this sample.
            self.tiles = (step, tiles);
        }
    }
}

fn is(count: usize) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

/// A sort key by which `h.2` comes before `h.10`: texts and numbers.
pub(super) fn natural(name: &str) -> Vec<(u64, String)> {
    let characters: Vec<char> = name.chars().collect();
    let parts = characters.chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit());
    let key = |part: String| part.parse().map_or((0, part), |number| (number, String::new()));
    parts.map(|part| key(part.iter().collect())).collect()
}

/// Names runs by the ends of their paths: the same number of parts for all, the fewest by which
/// they differ.
pub(super) fn name_all(records: &mut [Record]) {
    let parts: Vec<Vec<String>> = records
        .iter()
        .map(|record| {
            let whole = fs::canonicalize(&record.path).unwrap_or_else(|_| record.path.clone());
            whole.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
        })
        .collect();
    let end = |path: &[String], length: usize| path[path.len().saturating_sub(length)..].join("/");
    let longest = parts.iter().map(Vec::len).max().unwrap_or(0);
    let differ = |&length: &usize| {
        let is_other =
            |a: &Vec<String>, b: &Vec<String>| a == b || end(a, length) != end(b, length);
        parts.iter().enumerate().all(|(at, a)| parts[..at].iter().all(|b| is_other(a, b)))
    };
    let length = (1..=longest).find(differ).unwrap_or(longest);
    for (record, path) in records.iter_mut().zip(&parts) {
        record.name = end(path, length);
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
