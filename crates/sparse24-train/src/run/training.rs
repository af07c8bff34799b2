//! A run on disk: configuration, data, trainer and run directory together, from start or resume to the last step.
//!
//! Invariant: whatever happens, [`Run::resume`] continues from the last checkpoint that verifies (or from the beginning, where that can be
//! made again) and ends with the bits of an uninterrupted run. Deliberately absent: terminals and arguments ([`Observer`] is what a command
//! implements).

use std::{
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::Instant,
};

use super::{
    Initial, Log, MetricsLog, Provenance, RunDirectory, StepMetrics,
    identity::{self, identity},
    plans,
    setup::{SeededBatches, new_trainer, open_dataset, run_config},
    snapshot::{restore, snapshot},
};
use crate::{
    Error,
    backend::Plans,
    checkpoint::{self, NamedTensor, Retention},
    config::Config,
    data::{Dataset, Tokenizer},
    trainer::{FlipSampling, Trainer, overall_flip_rate},
};

/// A run that this process alone may continue.
pub struct Run {
    config: Config,
    dataset: Dataset,
    trainer: Trainer,
    directory: RunDirectory,
    metrics: MetricsLog,
    log: Log,
    notices: Vec<String>,
    /// As the run directory has them.
    plans: Plans,
}

/// Who watches a run.
pub trait Observer {
    /// After every optimizer step; a break stops the run there, with a checkpoint.
    fn stepped(&mut self, metrics: &StepMetrics) -> ControlFlow<()>;
    /// Something worth a line.
    fn said(&mut self, line: &str);
}

/// What a run begins with besides its configuration and its data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given<'a> {
    /// Its first weights; random ones otherwise.
    pub weights: Option<&'a [NamedTensor]>,
    /// The plans of another run, to have its bits: its directory, or the file.
    pub plans: Option<&'a Path>,
}

/// What a resume does about a damaged newest checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damaged {
    /// It is an error: perhaps it can be restored.
    Refuse,
    /// It is passed over and removed; the steps after the one before it are done again.
    FallBack,
}

/// How [`Run::train`] ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Ended {
    /// The last step is done.
    Finished(Summary),
    /// The observer stopped it before; a resume continues from here.
    Stopped {
        /// The step done last, which has a checkpoint.
        step: u32,
    },
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Summary {
    /// The run directory.
    pub run: PathBuf,
    /// Optimizer steps done.
    pub steps: u32,
    /// Those that this process did: none where the run was finished before.
    pub trained: u32,
    /// Loss of the last step, nats a token; none if the metrics have lost it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f32>,
    /// Loss on the held-out split at the end, nats a token.
    pub val_loss: f64,
    /// Wall time of this process.
    pub seconds: f64,
}

impl Run {
    /// Begins a run on the configuration's dataset ([`open_dataset`]) in a new directory; nothing is written before everything has been
    /// checked.
    ///
    /// # Errors
    /// Those of the configuration, of what is given and of the directory, of which nothing is left then.
    pub fn start(mut config: Config, dataset: Dataset, Given { weights: initial, plans }: Given<'_>, path: &Path) -> Result<Self, Error> {
        let mut trainer = new_trainer(&config, dataset.vocabulary() as usize)?;
        if let Some(path) = plans {
            plans::use_file(&mut trainer, path)?;
        }
        if let Some(weights) = initial {
            let named: Vec<_> = weights.iter().map(|tensor| (tensor.name.as_str(), tensor.values.as_slice())).collect();
            trainer.start_from(&named)?;
        }
        if !config.data.path.is_empty() {
            // A resume may begin elsewhere.
            let absolute = std::path::absolute(&config.data.path).map_err(|e| Error::io("find", &config.data.path, e))?;
            config.data.path = absolute.into_os_string().into_string().unwrap_or(config.data.path);
        }
        let (directory, (metrics, log)) = RunDirectory::filled(path, |directory| {
            if let Some(tokenizer) = dataset.tokenizer() {
                tokenizer.save(&directory.tokenizer())?;
            }
            if initial.is_some() {
                // A resume cannot make these weights again.
                let state = identity(&config, &dataset, &trainer);
                checkpoint::save(&directory.checkpoints(), &snapshot(&mut trainer, state)?)?;
            }
            let initial = if initial.is_some() { Initial::Given } else { Initial::Random };
            Provenance::of_start(&trainer.backend().device(), initial).record(&directory.provenance())?;
            let metrics = MetricsLog::create(&directory.metrics())?;
            let mut log = Log::open(&directory.log())?;
            log.line("started")?;
            // Last: without it there is no run to resume, so none can be resumed without the weights it was to begin with.
            directory.write(&directory.config(), config.to_toml().as_bytes())?;
            Ok((metrics, log))
        })?;
        Ok(Self { config, dataset, trainer, directory, metrics, log, notices: Vec::new(), plans: Plans::new() })
    }

    /// Continues a run from its newest checkpoint, or, if it has none, from the beginning. A lost `tokenizer.json` is written again: the data
    /// have the same one, or are refused.
    ///
    /// # Errors
    /// [`Error::File`] for a directory that holds no run or is in use, for a damaged newest checkpoint unless it may be passed over and one
    /// before it verifies, for a run without any whose first weights came from elsewhere, and for data that are not the checkpoint's.
    pub fn resume(path: &Path, damaged: Damaged) -> Result<Self, Error> {
        let directory = RunDirectory::open(path)?;
        let config = run_config(directory.path())?;
        let dataset = open_dataset(&config)?;
        let mut trainer = new_trainer(&config, dataset.vocabulary() as usize)?;
        let latest = checkpoint::latest(&directory.checkpoints())?;
        if let Some((_, error)) = latest.refused.first().filter(|_| damaged == Damaged::Refuse) {
            let advice = "restore it, or continue from the one before it with `sparse24 resume --fall-back`";
            return Err(Error::file(path, format!("its newest checkpoint is damaged ({error}); {advice}")));
        }
        let mut plans = Plans::new();
        let mut notices: Vec<_> = latest.refused.iter().map(|(_, error)| format!("passed over a damaged checkpoint: {error}")).collect();
        let initial = match latest.checkpoint {
            Some(path) => {
                let checkpoint = checkpoint::load(&path)?;
                identity::check(&path, &checkpoint.state, &identity(&config, &dataset, &trainer))?;
                plans.clone_from(&checkpoint.state.plan);
                restore(&mut trainer, checkpoint)?;
                checkpoint::discard_after(&directory.checkpoints(), trainer.step())?;
                Initial::Checkpoint
            }
            None if !notices.is_empty() => {
                return Err(Error::file(path, "has no checkpoint that is whole; begin a new run"));
            }
            None if Provenance::read(&directory.provenance())?.first().is_none_or(|first| first.initial != Initial::Random) => {
                let problem = "has no checkpoint left, and its first weights, which came from elsewhere, cannot be made again";
                return Err(Error::file(path, format!("{problem}; begin a new run with `sparse24 train --init-from`")));
            }
            None => Initial::Random,
        };
        if let Some(tokenizer) = dataset.tokenizer().filter(|tokenizer| !is_saved(tokenizer, &directory.tokenizer())) {
            tokenizer.save(&directory.tokenizer())?;
            notices.push("tokenizer.json was missing or damaged, and was written again from the data".to_owned());
        }
        // It holds at least what the checkpoint does, unless it is lost.
        if directory.plans().exists() {
            plans = plans::read(&directory.plans())?;
        }
        notices.extend(plans::use_own(&mut trainer, &plans, &directory.plans())?);
        let step = trainer.step();
        let (metrics, cut) = MetricsLog::resume(&directory.metrics(), step)?;
        let last = cut.last.unwrap_or(0);
        if last < step {
            notices.push(format!("metrics.jsonl has lost the steps {} to {step}", last + 1));
        }
        notices.push(match config.steps {
            last if last == step => format!("the run is finished: step {step} was its last"),
            _ => format!("resumed after step {step}"),
        });
        Provenance::of_start(&trainer.backend().device(), initial).record(&directory.provenance())?;
        let mut log = Log::open(&directory.log())?;
        for notice in &notices {
            log.line(notice)?;
        }
        Ok(Self { config, dataset, trainer, directory, metrics, log, notices, plans })
    }

    /// What is to be told of a resume: what was found amiss and passed over, and where it continues.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The resolved configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The trainer at its last step.
    #[must_use]
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// The run directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The data.
    #[must_use]
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Trains to the last step, or until the observer stops it.
    ///
    /// # Errors
    /// [`Error::NonFinite`] before any update; the last checkpoint stays. Those of the run directory.
    pub fn train(&mut self, observer: &mut dyn Observer) -> Result<Ended, Error> {
        let began = Instant::now();
        let first = self.trainer.step();
        let mut last: Option<StepMetrics> = None;
        let mut tokens_since = Instant::now();
        while self.trainer.step() < self.config.steps {
            let metrics = self.step(&mut tokens_since).map_err(|error| {
                let error = self.with_newest_checkpoint(error);
                // The error itself matters more than a log that cannot be written.
                let _ = self.log.line(&error.to_string());
                error
            })?;
            let stops = observer.stepped(&metrics).is_break() && metrics.step < self.config.steps;
            if stops || self.saves_after(metrics.step) {
                let path = self.save()?;
                self.log.line(&format!("step {}: saved {}", metrics.step, path.display()))?;
                tokens_since = Instant::now();
            }
            if metrics.step == self.switch() && metrics.step < self.config.steps {
                let line = format!("step {}: sparse training ends, dense fine-tuning begins", metrics.step);
                observer.said(&line);
                self.log.line(&line)?;
            }
            if stops {
                self.log.line(&format!("stopped after step {}", metrics.step))?;
                return Ok(Ended::Stopped { step: metrics.step });
            }
            last = Some(metrics);
        }
        let val_loss = match last.as_ref().and_then(|metrics| metrics.val_loss) {
            Some(loss) => loss,
            None => self.evaluate()?,
        };
        let steps = self.trainer.step();
        if last.is_none() {
            last = MetricsLog::read(&self.directory.metrics())?.pop().filter(|metrics| metrics.step == steps);
        }
        let loss = last.map(|metrics| metrics.loss);
        let run = self.path().to_owned();
        Ok(Ended::Finished(Summary { run, steps, trained: steps - first, loss, val_loss, seconds: began.elapsed().as_secs_f64() }))
    }

    /// Mean loss over the whole held-out split, nats a token.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn evaluate(&mut self) -> Result<f64, Error> {
        self.trainer.evaluate(&self.dataset.evaluation_windows(self.config.model.context))
    }

    fn step(&mut self, since: &mut Instant) -> Result<StepMetrics, Error> {
        let step = self.trainer.step() + 1;
        let sampling = if step == 1 || is_due(self.config.run.flip_every, step) { FlipSampling::Sample } else { FlipSampling::Skip };
        let (sequences, context) = (self.config.batch.sequences, self.config.model.context);
        let batches = SeededBatches { dataset: &self.dataset, seed: self.config.seed, sequences, context };
        let outcome = self.trainer.train_step(&batches, sampling)?;
        let seconds = since.elapsed().as_secs_f64();
        let evaluates = step == self.config.steps || is_due(self.config.run.eval_every, step) || step == self.switch();
        let val_loss = if evaluates { Some(self.evaluate()?) } else { None };
        self.record_plans()?;
        *since = Instant::now();
        let metrics = StepMetrics {
            step,
            phase: outcome.phase,
            loss: outcome.loss as f32,
            lr: outcome.learning_rate,
            grad_norm: outcome.grad_norm,
            tokens_per_s: self.trainer.recipe().tokens_per_step() as f64 / seconds,
            flip_rate: outcome.flips.as_deref().map(overall_flip_rate),
            flip_rate_per_layer: outcome.flips.map(|flips| {
                flips.into_iter().map(|layer| (layer.name, sparse24_core::flip::flip_rate(layer.flips, layer.weights))).collect()
            }),
            val_loss,
        };
        self.metrics.append(&metrics)?;
        Ok(metrics)
    }

    /// Brings `plans.json` in line with what has been timed.
    fn record_plans(&mut self) -> Result<(), Error> {
        let plans = self.trainer.backend().plans();
        if plans != self.plans {
            plans::write(&self.directory.plans(), &plans)?;
            self.plans = plans;
        }
        Ok(())
    }

    /// An error that tells what it leaves, if it should.
    fn with_newest_checkpoint(&self, mut error: Error) -> Error {
        if let Error::NonFinite { kept, .. } = &mut error {
            let newest = checkpoint::latest(&self.directory.checkpoints()).ok().and_then(|latest| latest.checkpoint);
            *kept = newest.as_deref().and_then(checkpoint::step_of);
        }
        error
    }

    /// The last step of the first phase: the last 2:4 model of a sparse run.
    fn switch(&self) -> u32 {
        let recipe = self.trainer.recipe();
        recipe.method.phases[0].last_step(recipe.steps)
    }

    fn saves_after(&self, step: u32) -> bool {
        step == self.config.steps || step == self.switch() || is_due(self.config.run.checkpoint_every, step)
    }

    fn save(&mut self) -> Result<PathBuf, Error> {
        self.metrics.sync()?;
        let state = identity(&self.config, &self.dataset, &self.trainer);
        let checkpoint = snapshot(&mut self.trainer, state)?;
        let path = checkpoint::save(&self.directory.checkpoints(), &checkpoint)?;
        let last = NonZeroUsize::new(self.config.run.keep_last).unwrap_or(NonZeroUsize::MIN);
        checkpoint::retain(&self.directory.checkpoints(), &Retention { last, always: vec![self.switch()] })?;
        Ok(path)
    }
}

/// Whether a file holds this tokenizer.
fn is_saved(tokenizer: &Tokenizer, file: &Path) -> bool {
    Tokenizer::load(file).is_ok_and(|saved| saved == *tokenizer)
}

/// Whether something that happens every so many steps (0 is never) happens after this one.
fn is_due(every: u32, step: u32) -> bool {
    every > 0 && step.is_multiple_of(every)
}

#[cfg(test)]
mod tests;
