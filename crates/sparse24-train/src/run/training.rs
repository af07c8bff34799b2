//! A run on disk: configuration, data, trainer and run directory together, from start or resume to the last step.
//!
//! Invariant: whatever happens, [`Run::resume`] continues from the last checkpoint that verifies (or from the beginning, where that can be
//! made again) and ends with the bits of an uninterrupted run. Deliberately absent: terminals and arguments ([`Observer`] is what a command
//! implements).

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use super::{
    Initial, LambdaOrigin, Log, MetricsLog, Provenance, RunDirectory, StepMetrics,
    identity::{self, identity},
    measure::FlipCounts,
    model::evaluated_at_once,
    plans,
    reference::FlipReference,
    saving::{SKIPPED, check_room},
    setup::{SeededBatches, new_trainer, open_dataset, run_config},
    snapshot::{restore, snapshot},
    spikes::Spikes,
};
use crate::{
    Error,
    backend::Plans,
    checkpoint::{self, NamedTensor, Saver},
    config::{Config, OnNonFinite},
    data::{Dataset, Tokenizer},
    trainer::{FlipSampling, Trainer, overall_flip_rate},
};

/// A run that this process alone may continue.
pub struct Run {
    pub(super) config: Config,
    pub(super) dataset: Dataset,
    pub(super) trainer: Trainer,
    directory: RunDirectory,
    pub(super) metrics: MetricsLog,
    pub(super) log: Log,
    notices: Vec<String>,
    /// How many plans the run directory has, as far as this process wrote them.
    plans_recorded: usize,
    pub(super) saver: Saver,
    /// The step that was saved last, or is being saved.
    pub(super) saved: Option<u32>,
    /// What the step done last measured, until it is evaluated.
    pub(super) pending: Option<StepMetrics>,
    /// Steps without an update.
    pub(super) skipped: u32,
    spikes: Spikes,
    /// Over the steps whose instruments were read.
    pub(super) flip_counts: FlipCounts,
    reference: Option<FlipReference>,
}

/// Who watches a run.
pub trait Observer {
    /// After every optimizer step.
    fn stepped(&mut self, metrics: &StepMetrics);
    /// Something worth a line.
    fn said(&mut self, line: &str);
    /// What is asked of the run. A save is asked for once; whoever asks also sets the flag of [`Run::interrupt_on`], which this clears.
    fn asked(&mut self) -> Asked;
}

/// What an [`Observer`] asks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// To go on.
    Nothing,
    /// To save the state of the last optimizer-step boundary, and go on.
    Save,
    /// To save it, and stop.
    Stop,
}

/// How a run is resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resume {
    /// What is done about a damaged newest checkpoint.
    pub damaged: Damaged,
    /// Keys and sections of the configuration that may differ from the checkpoint's; `data` allows other data.
    pub allow: Vec<String>,
}

/// What a run begins with besides its configuration and its data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given<'a> {
    /// Its first weights; random ones otherwise.
    pub weights: Option<&'a [NamedTensor]>,
    /// The plans of another run, to have its bits: its directory, or the file.
    pub plans: Option<&'a Path>,
    /// Where its lambda was found, to be told in its provenance.
    pub lambda: Option<&'a LambdaOrigin>,
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
    pub fn start(
        mut config: Config,
        dataset: Dataset,
        Given { weights: initial, plans, lambda }: Given<'_>,
        path: &Path,
    ) -> Result<Self, Error> {
        let mut trainer = new_trainer(&config, dataset.vocabulary() as usize)?;
        if let Some(path) = plans {
            plans::use_file(&mut trainer, path)?;
        }
        if let Some(weights) = initial {
            let named: Vec<_> = weights.iter().map(|tensor| (tensor.name.as_str(), tensor.values.as_slice())).collect();
            trainer.start_from(&named)?;
        }
        // A resume may begin elsewhere.
        for path in [&mut config.data.path, &mut config.run.flip_reference].into_iter().filter(|path| !path.is_empty()) {
            let absolute = std::path::absolute(&*path).map_err(|e| Error::io("find", &*path, e))?;
            *path = absolute.into_os_string().into_string().unwrap_or_else(|_| path.clone());
        }
        let reference = FlipReference::open(&config, std::iter::empty())?;
        let (directory, (metrics, log)) = RunDirectory::filled(path, |directory| {
            check_room(&config, trainer.recipe(), directory.path())?;
            if let Some(tokenizer) = dataset.tokenizer() {
                tokenizer.save(&directory.tokenizer())?;
            }
            if initial.is_some() {
                // A resume cannot make these weights again.
                let state = identity(&config, &dataset, &trainer);
                checkpoint::save(&directory.checkpoints(), &snapshot(&mut trainer, state, Vec::new(), None)?()?)?;
            }
            let initial = if initial.is_some() { Initial::Given } else { Initial::Random };
            let start = Provenance { lambda: lambda.cloned(), ..Provenance::of_start(&trainer.backend().device(), initial) };
            start.record(&directory.provenance())?;
            let metrics = MetricsLog::create(&directory.metrics())?;
            let mut log = Log::open(&directory.log())?;
            log.line("started")?;
            // Last: without it there is no run to resume, so none can be resumed without the weights it was to begin with.
            directory.write(&directory.config(), config.to_toml().as_bytes())?;
            Ok((metrics, log))
        })?;
        let saver = Saver::new(directory.checkpoints());
        let spikes = Spikes::new(config.run.spike_z, config.run.spike_window, std::iter::empty());
        let (saved, pending, skipped, notices, plans_recorded) = (initial.map(|_| 0), None, 0, Vec::new(), 0);
        Ok(Self {
            config,
            dataset,
            trainer,
            directory,
            metrics,
            log,
            notices,
            plans_recorded,
            saver,
            saved,
            pending,
            skipped,
            spikes,
            flip_counts: FlipCounts::default(),
            reference,
        })
    }

    /// Continues a run from its newest checkpoint, or, if it has none, from the beginning. A lost `tokenizer.json` is written again: the data
    /// have the same one, or are refused.
    ///
    /// # Errors
    /// [`Error::File`] for a directory that holds no run or is in use, for a damaged newest checkpoint unless it may be passed over and one
    /// before it verifies, for a run without any whose first weights came from elsewhere, and for data or settings that are neither the
    /// checkpoint's nor allowed to differ; [`Error::Room`].
    pub fn resume(path: &Path, how: &Resume) -> Result<Self, Error> {
        let directory = RunDirectory::open(path)?;
        let config = run_config(directory.path())?;
        let dataset = open_dataset(&config)?;
        let mut trainer = new_trainer(&config, dataset.vocabulary() as usize)?;
        let latest = checkpoint::latest(&directory.checkpoints())?;
        if let Some((_, error)) = latest.refused.first().filter(|_| how.damaged == Damaged::Refuse) {
            let advice = "restore it, or continue from the one before it with `sparse24 resume --fall-back`";
            return Err(Error::file(path, format!("its newest checkpoint is damaged ({error}); {advice}")));
        }
        let mut plans = Plans::new();
        let mut notices: Vec<_> = latest.refused.iter().map(|(_, error)| format!("passed over a damaged checkpoint: {error}")).collect();
        let (mut saved, mut skipped, mut flip_counts) = (None, 0, FlipCounts::default());
        let initial = match latest.checkpoint {
            Some(path) => {
                let checkpoint = checkpoint::load(&path)?;
                plans.clone_from(&checkpoint.state.plan);
                let now = identity(&config, &dataset, &trainer);
                notices.extend(identity::check(&path, &checkpoint.state, &now, &how.allow)?);
                skipped = checkpoint.state.method.get(SKIPPED).map_or(0, |&steps| u32::try_from(steps).unwrap_or(u32::MAX));
                flip_counts = FlipCounts::of_checkpoint(&checkpoint.auxiliary);
                restore(&mut trainer, checkpoint)?;
                checkpoint::discard_after(&directory.checkpoints(), trainer.step())?;
                saved = Some(trainer.step());
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
        check_room(&config, trainer.recipe(), directory.path())?;
        let step = trainer.step();
        let (metrics, cut) = MetricsLog::resume(&directory.metrics(), step)?;
        let last = cut.last.as_ref().map_or(0, |metrics| metrics.step);
        if last < step {
            notices.push(format!("metrics.jsonl has lost the steps {} to {step}", last + 1));
        }
        notices.push(match config.steps {
            last if last == step => format!("the run is finished: step {step} was its last"),
            _ => format!("resumed after step {step}"),
        });
        Provenance::of_start(&trainer.backend().device(), initial).record(&directory.provenance())?;
        let watches = config.run.spike_z > 0.0 || !config.run.flip_reference.is_empty();
        let before = if watches { MetricsLog::read(&directory.metrics())? } else { Vec::new() };
        // It decides nothing, so a reference that has moved is no reason not to go on.
        let reference = FlipReference::open(&config, before.iter()).unwrap_or_else(|error| {
            notices.push(format!("{error}; flip rates are not compared"));
            None
        });
        let mut log = Log::open(&directory.log())?;
        for notice in &notices {
            log.line(notice)?;
        }
        let spikes = Spikes::new(config.run.spike_z, config.run.spike_window, before.iter().map(|metrics| metrics.loss));
        let saver = Saver::new(directory.checkpoints());
        let mut run = Self {
            config,
            dataset,
            trainer,
            directory,
            metrics,
            log,
            notices,
            plans_recorded: 0,
            saver,
            saved,
            pending: None,
            skipped,
            spikes,
            flip_counts,
            reference,
        };
        // A signal came between the step and its evaluation.
        run.pending = cut.last.filter(|metrics| metrics.step == step && metrics.val_loss.is_none() && run.evaluates_after(step));
        Ok(run)
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

    /// While this is set, the step or evaluation under way ends within a micro-batch, and the observer is asked what for.
    pub fn interrupt_on(&mut self, flag: Arc<AtomicBool>) {
        self.trainer.interrupt_on(flag);
    }

    /// Trains to the last step, or until the observer asks to stop. However it ends, what was being saved is saved.
    ///
    /// # Errors
    /// [`Error::NonFinite`] and [`Error::SkipLimit`] before the update, [`Error::Spike`] and [`Error::NonFiniteEvaluation`] after it; the last checkpoint
    /// stays. Those of the run directory and of saving, which are told after the step under way.
    pub fn train(&mut self, observer: &mut dyn Observer) -> Result<Ended, Error> {
        let steps = self.steps(observer);
        // The first error counts.
        let settled = self.settle();
        let ended = steps.and_then(|ended| settled.map(|()| ended)).map_err(|error| self.with_newest_checkpoint(error));
        match &ended {
            Ok(Ended::Finished(_)) => {}
            Ok(Ended::Stopped { step }) => self.log.line(&format!("stopped after step {step}"))?,
            // The error itself matters more than a log that cannot be written.
            Err(error) => drop(self.log.line(&error.to_string())),
        }
        ended
    }

    fn steps(&mut self, observer: &mut dyn Observer) -> Result<Ended, Error> {
        let began = Instant::now();
        let first = self.trainer.step();
        let mut last = None;
        while self.trainer.step() < self.config.steps || self.pending.is_some() {
            self.look_after_save()?;
            if self.is_stopped(observer)? {
                return Ok(Ended::Stopped { step: self.trainer.step() });
            }
            match self.advance() {
                Ok(metrics) => {
                    observer.stepped(&metrics);
                    self.conclude(&metrics, observer)?;
                    last = Some(metrics);
                }
                Err(Error::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
        let told = last.as_ref().and_then(|metrics| metrics.val_loss);
        let val_loss = loop {
            match told.map_or_else(|| self.evaluate(), Ok) {
                Err(Error::Interrupted) if self.is_stopped(observer)? => return Ok(Ended::Stopped { step: self.trainer.step() }),
                Err(Error::Interrupted) => {}
                ended => break ended?,
            }
        };
        let steps = self.trainer.step();
        if last.is_none() {
            last = MetricsLog::steps(&self.directory.metrics())?.last().transpose()?.filter(|metrics| metrics.step == steps);
        }
        let loss = last.map(|metrics| metrics.loss);
        let run = self.path().to_owned();
        Ok(Ended::Finished(Summary { run, steps, trained: steps - first, loss, val_loss, seconds: began.elapsed().as_secs_f64() }))
    }

    /// Does what is asked; whether that is to stop.
    fn is_stopped(&mut self, observer: &mut dyn Observer) -> Result<bool, Error> {
        let asked = observer.asked();
        if asked != Asked::Nothing {
            self.save()?;
        }
        Ok(asked == Asked::Stop)
    }

    /// The next step and all that is measured of it; or what was not measured yet of the last one. Interrupted, it leaves the step undone,
    /// or done and its evaluation undone.
    fn advance(&mut self) -> Result<StepMetrics, Error> {
        let mut metrics = match self.pending.take() {
            Some(metrics) => metrics,
            None => self.step()?,
        };
        self.record_plans()?;
        if self.evaluates_after(metrics.step) && metrics.val_loss.is_none() {
            match self.evaluate() {
                Ok(loss) => metrics.val_loss = Some(loss),
                Err(error) => {
                    self.pending = Some(metrics);
                    return Err(error);
                }
            }
        }
        self.record_plans()?;
        self.metrics.append(&metrics)?;
        Ok(metrics)
    }

    /// What follows a step that is told.
    fn conclude(&mut self, metrics: &StepMetrics, observer: &mut dyn Observer) -> Result<(), Error> {
        let &StepMetrics { step, loss, .. } = metrics;
        if let Some(what) = &metrics.skipped {
            let line = format!("step {step}: skipped, because {what}");
            observer.said(&line);
            self.log.line(&line)?;
        }
        if let Some(mu) = self.reference.as_mut().and_then(|reference| reference.next(metrics)) {
            let line = format!(
                "step {step}: flip-rate explosion: mu = {mu:.2} of {}; a larger method.lambda calms the masks",
                self.config.run.flip_reference
            );
            observer.said(&line);
            self.log.line(&line)?;
        }
        if let Some(spike) = self.spikes.next(loss) {
            let (allowed, window) = (self.config.run.spike_z, self.config.run.spike_window);
            return Err(Error::Spike { step, loss, z: spike.z, allowed, mean: spike.mean, window, kept: None });
        }
        if self.saves_after(step) {
            self.save()?;
        }
        if self.trainer.ends_phase() {
            let line = format!("step {step}: {}", self.trainer.transition());
            observer.said(&line);
            self.log.line(&line)?;
        }
        Ok(())
    }

    /// Mean loss over the whole held-out split, nats a token.
    ///
    /// # Errors
    /// [`Error::NonFiniteEvaluation`]; those of the backend.
    pub fn evaluate(&mut self) -> Result<f64, Error> {
        let windows = self.dataset.evaluation_windows(self.config.model.context);
        let loss = self.trainer.evaluate_by(&windows, evaluated_at_once(&self.config))?;
        if loss.is_finite() { Ok(loss) } else { Err(Error::NonFiniteEvaluation { step: self.trainer.step(), loss, kept: None }) }
    }

    /// One optimizer step, taken or skipped.
    fn step(&mut self) -> Result<StepMetrics, Error> {
        let step = self.trainer.step() + 1;
        let flips_are_told = step == 1 || is_due(self.config.run.flip_every, step);
        let is_measured = is_due(self.config.run.instrument_every, step);
        let sampling = if flips_are_told || is_measured { FlipSampling::Sample } else { FlipSampling::Skip };
        let (sequences, context) = (self.config.batch.sequences, self.config.model.context);
        let batches = SeededBatches { dataset: &self.dataset, seed: self.config.seed, sequences, context };
        let noise = if is_measured { self.trainer.gradient_noise(&batches)? } else { Vec::new() };
        let tokens = self.trainer.recipe().tokens_per_step() as f64;
        let began = Instant::now();
        let tokens_per_s = || tokens / began.elapsed().as_secs_f64();
        let outcome = match self.trainer.train_step(&batches, sampling) {
            Ok(outcome) => outcome,
            Err(Error::NonFinite { step, what, kept }) if self.config.run.on_nonfinite == OnNonFinite::Skip => {
                if self.skipped >= self.config.run.skip_limit {
                    return Err(Error::SkipLimit { step, what, skipped: self.skipped, kept });
                }
                self.trainer.pass_over()?;
                self.skipped += 1;
                return Ok(StepMetrics {
                    step,
                    phase: self.trainer.phase().kind(),
                    loss: f32::NAN,
                    lr: self.trainer.recipe().schedule.learning_rate(step),
                    grad_norm: f32::NAN,
                    tokens_per_s: tokens_per_s(),
                    flip_rate: None,
                    flip_rate_per_layer: None,
                    val_loss: None,
                    instruments: None,
                    skipped: Some(what),
                });
            }
            Err(error) => return Err(error),
        };
        let tokens_per_s = tokens_per_s();
        let instruments = is_measured.then(|| self.flip_counts.measure(&mut self.trainer, &noise)).transpose()?;
        let flips = outcome.flips.filter(|_| flips_are_told);
        Ok(StepMetrics {
            step,
            phase: outcome.phase,
            loss: outcome.loss as f32,
            lr: outcome.learning_rate,
            grad_norm: outcome.grad_norm,
            tokens_per_s,
            flip_rate: flips.as_deref().map(overall_flip_rate),
            flip_rate_per_layer: flips.map(|flips| {
                flips.into_iter().map(|layer| (layer.name, sparse24_core::flip::flip_rate(layer.flips, layer.weights))).collect()
            }),
            val_loss: None,
            instruments: instruments.map(Box::new),
            skipped: None,
        })
    }

    fn evaluates_after(&self, step: u32) -> bool {
        step == self.config.steps || is_due(self.config.run.eval_every, step) || self.trainer.ends_phase()
    }

    /// Brings `plans.json` in line with what has been timed.
    fn record_plans(&mut self) -> Result<(), Error> {
        let backend = self.trainer.backend();
        if backend.plans_made() != self.plans_recorded {
            plans::write(&self.directory.plans(), &backend.plans())?;
            self.plans_recorded = backend.plans_made();
        }
        Ok(())
    }

    /// An error that tells what it leaves, if it should.
    fn with_newest_checkpoint(&self, mut error: Error) -> Error {
        if let Error::NonFinite { kept, .. }
        | Error::SkipLimit { kept, .. }
        | Error::Spike { kept, .. }
        | Error::NonFiniteEvaluation { kept, .. } = &mut error
        {
            let newest = checkpoint::latest(&self.directory.checkpoints()).ok().and_then(|latest| latest.checkpoint);
            *kept = newest.as_deref().and_then(checkpoint::step_of);
        }
        error
    }
}

/// Whether a file holds this tokenizer.
fn is_saved(tokenizer: &Tokenizer, file: &Path) -> bool {
    Tokenizer::load(file).is_ok_and(|saved| saved == *tokenizer)
}

/// Whether something that happens every so many steps (0 is never) happens after this one.
pub(super) fn is_due(every: u32, step: u32) -> bool {
    every > 0 && step.is_multiple_of(every)
}

#[cfg(test)]
mod tests;
