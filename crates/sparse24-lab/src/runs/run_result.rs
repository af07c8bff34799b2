//! The result of a finished run, read from its metrics, provenance and failure files.
//!
//! Invariant: no checkpoint is needed, and only the speed and the duration depend on a clock.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use sparse24_run::{
    Error, ErrorKind,
    config::Config,
    disk,
    run::{MetricsLog, Provenance},
};
use sparse24_train::method::PhaseKind;

use super::Member;
use crate::{Result, statistics::quantile};

/// The result of a finished run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunResult {
    /// Optimizer steps done.
    pub steps: u32,
    /// Training loss of the last step, nats per token.
    pub loss: Option<f32>,
    /// Loss on the whole validation set after the last step; none of a run that ended before the
    /// end of its schedule.
    pub val_loss: Option<f64>,
    /// Samples of the flip rate.
    pub samples: Vec<Sample>,
    /// Median over the steps whose speed is known.
    pub tokens_per_s: f64,
    /// Time of all steps whose speed is known, without evaluation.
    pub seconds: f64,
    /// Why the run ended early.
    pub failure: Option<Failure>,
    /// The build of each start, unless their file is damaged.
    pub builds: Vec<Build>,
}

/// A sample of the flip rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Optimizer step.
    pub step: u32,
    /// Kind of the step's phase.
    pub phase: PhaseKind,
    /// Flip rate of all sparsifiable weights.
    pub rate: f64,
    /// Flip rate of each sparsifiable weight, by name.
    pub layers: BTreeMap<String, f64>,
}

/// A loss or gradient that was not finite, or a loss spike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// Optimizer step.
    pub step: u32,
    /// A clause that describes the failure.
    pub what: String,
}

/// A run that ended early.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// Seed of the run.
    pub seed: u64,
    /// Step and reason.
    #[serde(flatten)]
    pub failure: Failure,
}

/// The build and the machine of a start, which can change the last bits of a result.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Build {
    /// Version of this crate.
    pub version: String,
    /// Commit, if the build knew it.
    pub git: Option<String>,
    /// Operating system and architecture.
    pub system: String,
    /// SIMD level.
    pub simd: String,
    /// The device, unless it is the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

const FAILURE: &str = "failure.json";

/// Reads the result of a run; none if it is not finished.
pub(super) fn read(path: &Path, member: &Member) -> Result<Option<RunResult>> {
    let metrics = path.join("metrics.jsonl");
    let Member { config, until, .. } = member;
    let tokens = tokens_of(config);
    let (mut last, mut samples, mut rates, mut seconds) = (None, Vec::new(), Vec::new(), 0.0);
    let steps = disk::exists(&metrics)?.then(|| MetricsLog::steps(&metrics)).transpose()?;
    for (step, number) in steps.into_iter().flatten().zip(1..) {
        let mut step = step.map_err(again)?;
        if step.step > member.until {
            break;
        }
        if step.step != number {
            let problem = format!("lacks step {number} before step {}", step.step);
            return Err(again(Error::file(&metrics, problem)));
        }
        if let Some(speed) = step.speed() {
            rates.push(speed);
            seconds += tokens(step.step) / speed;
        }
        if let (Some(rate), Some(layers)) = (step.flip_rate, step.flip_rate_per_layer.take()) {
            samples.push(Sample { step: step.step, phase: step.phase, rate, layers });
        }
        last = Some(step);
    }
    let is_done = last.as_ref().is_some_and(|step| {
        step.step == *until && (step.val_loss.is_some() || *until < config.steps)
    });
    let failure = if is_done { None } else { read_failure(&path.join(FAILURE))? };
    if !is_done && failure.is_none() {
        return Ok(None);
    }
    let is_cpu = config.backend.name == "cpu";
    let build = |Provenance { version, git, system, simd, device, .. }| Build {
        version,
        git,
        system,
        simd,
        device: (!is_cpu).then_some(device),
    };
    let starts = Provenance::readable(&path.join("provenance.json"))?;
    let builds = starts.into_iter().map(build).collect();
    Ok(Some(RunResult {
        steps: last.as_ref().map_or(0, |step| step.step),
        loss: last.as_ref().map(|step| step.loss),
        val_loss: last.filter(|_| is_done).and_then(|step| step.val_loss),
        samples,
        tokens_per_s: quantile(&rates, 0.5).unwrap_or(0.0),
        seconds,
        failure,
        builds,
    }))
}

/// Adds the remedy to an error in the metrics of a run.
fn again(error: Error) -> Error {
    match error {
        Error::File { path, problem } => {
            Error::file(path, format!("{problem}; remove the run's folder to train it again"))
        }
        other => other,
    }
}

/// The tokens of each optimizer step.
pub(crate) fn tokens_of(config: &Config) -> impl Fn(u32) -> f64 + use<> {
    let accumulation = config.gradient_accumulation();
    let tokens = (config.batch.size * config.model.sequence_length) as f64;
    move |step| tokens * f64::from(accumulation.of(step))
}

/// The distinct builds of all runs, sorted.
pub(crate) fn builds(results: &[Option<RunResult>]) -> Vec<Build> {
    let mut builds: Vec<_> = results.iter().flatten().flat_map(|run| run.builds.clone()).collect();
    builds.sort();
    builds.dedup();
    builds
}

fn read_failure(path: &Path) -> Result<Option<Failure>> {
    if !disk::exists(path)? {
        return Ok(None);
    }
    let text = disk::read_small(path, 1 << 16)?;
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| Error::file(path, format!("is not the failure of a run: {error}")))
}

/// Writes a failure that is a result, and returns any other error. The text does not depend on
/// which checkpoints exist.
pub(super) fn record_failure(path: &Path, error: Error) -> Result {
    let (step, what) = match error {
        Error::NonFinite { step, what, .. } | Error::SkipLimit { step, what, .. } => (step, what),
        Error::Spike { step, loss, z, .. } => {
            (step, format!("the loss {loss} is a spike, {z:.1} standard deviations high"))
        }
        Error::NonFiniteEvaluation { step, loss, .. } => {
            (step, format!("the validation loss is {loss}"))
        }
        Error::NonFiniteCheckpoint { step, tensor, .. } => {
            (step, format!("{tensor} is not finite"))
        }
        other => {
            debug_assert!(other.kind() != ErrorKind::NonFinite, "{other}");
            return Err(other);
        }
    };
    let mut text =
        serde_json::to_vec(&Failure { step, what }).expect("strings and integers are JSON");
    text.push(b'\n');
    disk::write_atomically(&path.join(FAILURE), &text)
}
