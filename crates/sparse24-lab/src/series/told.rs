//! What a finished run of a series told, read from the small files of its directory: its metrics,
//! its provenance and how it failed.
//!
//! Invariant: no checkpoint is needed, and nothing but the two rates depends on a clock.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::Member;
use crate::statistics::quantile;
use sparse24_run::{
    Error, ErrorKind, disk,
    run::{MetricsLog, Provenance},
};
use sparse24_train::method::PhaseKind;

/// The results of a run that is done.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Optimizer steps done.
    pub steps: u32,
    /// Loss of the last step, nats a token.
    pub loss: Option<f32>,
    /// After the last step, on the whole held-out split; none of a run that ended before the end of
    /// its schedule.
    pub val_loss: Option<f64>,
    /// The flip rate, where it was sampled.
    pub samples: Vec<Sample>,
    /// The median over the steps.
    pub tokens_per_s: f64,
    /// What all steps took, without evaluations.
    pub seconds: f64,
    /// Why it ended early.
    pub failure: Option<Failure>,
    /// What it ran with, one a start.
    pub builds: Vec<Build>,
}

/// A sample of the flip rate.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Its step.
    pub step: u32,
    /// The kind of its phase.
    pub phase: PhaseKind,
    /// Of all sparsifiable weights.
    pub rate: f64,
    /// Of each, by its name.
    pub layers: BTreeMap<String, f64>,
}

/// A loss, or a gradient, that was not finite or stood out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// The step.
    pub step: u32,
    /// What was wrong with it.
    pub what: String,
}

/// What decides the last bits of a result, besides its configuration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Build {
    /// Of this crate.
    pub version: String,
    /// Its commit, where the build knew.
    pub git: Option<String>,
    /// Operating system and architecture.
    pub system: String,
    /// The SIMD level.
    pub simd: String,
    /// The device, where it is not the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

const FAILURE: &str = "failure.json";

/// What a run told; none if it is not done.
pub(super) fn read(path: &Path, member: &Member) -> Result<Option<Told>, Error> {
    let metrics = path.join("metrics.jsonl");
    let (mut last, mut samples, mut rates) = (None, Vec::new(), Vec::new());
    for step in
        metrics.exists().then(|| MetricsLog::steps(&metrics)).transpose()?.into_iter().flatten()
    {
        let step = step?;
        if step.step > member.until {
            break;
        }
        rates.push(step.tokens_per_s);
        if let (Some(rate), Some(layers)) = (step.flip_rate, step.flip_rate_per_layer.clone()) {
            samples.push(Sample { step: step.step, phase: step.phase, rate, layers });
        }
        last = Some(step);
    }
    let is_whole = |step: &sparse24_run::run::StepMetrics| {
        step.step == member.until && (step.val_loss.is_some() || member.until < member.config.steps)
    };
    let is_done = last.as_ref().is_some_and(is_whole);
    let failure = if is_done { None } else { read_failure(&path.join(FAILURE))? };
    if !is_done && failure.is_none() {
        return Ok(None);
    }
    let batch = &member.config.batch;
    let tokens = batch.size as f64
        * f64::from(batch.gradient_accumulation_steps)
        * member.config.model.sequence_length as f64;
    let is_cpu = member.config.backend.name == "cpu";
    let builds = Provenance::read(&path.join("provenance.json"))?;
    Ok(Some(Told {
        steps: last.as_ref().map_or(0, |step| step.step),
        loss: last.as_ref().map(|step| step.loss),
        val_loss: last.filter(|_| is_done).and_then(|step| step.val_loss),
        samples,
        tokens_per_s: quantile(&rates, 0.5).unwrap_or(0.0),
        seconds: rates.iter().map(|rate| tokens / rate).sum(),
        failure,
        builds: builds
            .into_iter()
            .map(|Provenance { version, git, system, simd, device, .. }| Build {
                version,
                git,
                system,
                simd,
                device: (!is_cpu).then_some(device),
            })
            .collect(),
    }))
}

fn read_failure(path: &Path) -> Result<Option<Failure>, Error> {
    if !path.exists() {
        return Ok(None);
    }
    let text = disk::read_small(path, 1 << 16)?;
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| Error::file(path, format!("does not tell how a run failed: {error}")))
}

/// Writes down a failure that is a result; gives back one that is not. What it says does not depend
/// on which checkpoints there were.
pub(super) fn record_failure(path: &Path, error: Error) -> Result<(), Error> {
    let failure = match error {
        Error::NonFinite { step, what, .. } | Error::SkipLimit { step, what, .. } => {
            Failure { step, what }
        }
        Error::Spike { step, loss, z, .. } => Failure {
            step,
            what: format!("the loss {loss} is a spike, {z:.1} standard deviations high"),
        },
        Error::NonFiniteEvaluation { step, loss, .. } => {
            Failure { step, what: format!("the validation loss is {loss}") }
        }
        Error::NonFiniteCheckpoint { step, tensor, .. } => {
            Failure { step, what: format!("{tensor} is not finite") }
        }
        other => {
            debug_assert!(other.kind() != ErrorKind::NonFinite, "{other}");
            return Err(other);
        }
    };
    let mut text = serde_json::to_vec(&failure).expect("strings and integers are JSON");
    text.push(b'\n');
    disk::write_atomically(&path.join(FAILURE), &text)
}
