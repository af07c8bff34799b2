//! A run on disk: configuration, data, trainer and run directory together, to the last step;
//! [`super::opening`] makes it.
//!
//! Invariant: whatever happens, [`Run::resume`] continues from the last checkpoint that verifies
//! (or from the beginning, where that can be made again) and ends with the bits of an uninterrupted
//! run. Deliberately absent: terminals and arguments ([`Observer`] is what a command implements).

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use super::{
    Log, MetricsLog, RunDirectory, StepMetrics, measure::FlipCounts, model::evaluated_at_once,
    plans, reference::FlipReference, setup::SeededBatches, spikes::Spikes,
};
use crate::{
    Error,
    checkpoint::{self, Saver},
    config::{Config, OnNonFinite},
    data::Dataset,
};
use sparse24_train::trainer::{FlipSampling, Trainer, overall_flip_rate};

/// A run that this process alone may continue.
pub struct Run {
    pub(super) config: Config,
    pub(super) dataset: Dataset,
    pub(super) trainer: Trainer,
    pub(super) directory: RunDirectory,
    pub(super) metrics: MetricsLog,
    pub(super) log: Log,
    pub(super) notices: Vec<String>,
    /// How many plans the run directory has, as far as this process wrote them.
    pub(super) plans_recorded: usize,
    pub(super) saver: Saver,
    /// The step that was saved last, or is being saved.
    pub(super) saved: Option<u32>,
    /// The last steps of sparse phases that ended elsewhere before the run was configured anew.
    pub(super) former_ends: Vec<u32>,
    /// What the step done last measured, until it is evaluated.
    pub(super) pending: Option<StepMetrics>,
    /// Steps without an update.
    pub(super) skipped: u32,
    pub(super) spikes: Spikes,
    /// Over the steps whose instruments were read.
    pub(super) flip_counts: FlipCounts,
    pub(super) reference: Option<FlipReference>,
}

/// Who watches a run.
pub trait Observer {
    /// After every optimizer step.
    fn stepped(&mut self, metrics: &StepMetrics);
    /// Something worth a line.
    fn said(&mut self, line: &str);
    /// What is asked of the run. A save is asked for once; whoever asks also sets the flag of
    /// [`Run::interrupt_on`], which this clears.
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
    /// What is to be told of a resume: what was found amiss and passed over, and where it
    /// continues.
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

    /// While this is set, the step or evaluation under way ends within a micro-batch, and the
    /// observer is asked what for.
    pub fn interrupt_on(&mut self, flag: Arc<AtomicBool>) {
        self.trainer.interrupt_on(flag);
    }

    /// Trains to the last step, or until the observer asks to stop. However it ends, what was being
    /// saved is saved.
    ///
    /// # Errors
    /// [`Error::NonFinite`] and [`Error::SkipLimit`] before the update, [`Error::Spike`] and
    /// [`Error::NonFiniteEvaluation`] after it; the last checkpoint stays. Those of the run
    /// directory and of saving, which are told after the step under way.
    pub fn train(&mut self, observer: &mut dyn Observer) -> Result<Ended, Error> {
        let steps = self.steps(observer);
        // The first error counts.
        let settled = self.settle();
        let ended = steps
            .and_then(|ended| settled.map(|()| ended))
            .map_err(|error| self.with_newest_checkpoint(error));
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
                Err(Error::Interrupted) if self.is_stopped(observer)? => {
                    return Ok(Ended::Stopped { step: self.trainer.step() });
                }
                Err(Error::Interrupted) => {}
                ended => break ended?,
            }
        };
        let steps = self.trainer.step();
        if last.is_none() {
            last = MetricsLog::steps(&self.directory.metrics())?
                .last()
                .transpose()?
                .filter(|metrics| metrics.step == steps);
        }
        let loss = last.map(|metrics| metrics.loss);
        let run = self.path().to_owned();
        Ok(Ended::Finished(Summary {
            run,
            steps,
            trained: steps - first,
            loss,
            val_loss,
            seconds: began.elapsed().as_secs_f64(),
        }))
    }

    /// Does what is asked; whether that is to stop.
    fn is_stopped(&mut self, observer: &mut dyn Observer) -> Result<bool, Error> {
        let asked = observer.asked();
        if asked != Asked::Nothing {
            self.save()?;
        }
        Ok(asked == Asked::Stop)
    }

    /// The next step and all that is measured of it; or what was not measured yet of the last one.
    /// Interrupted, it leaves the step undone, or done and its evaluation undone.
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
    fn conclude(
        &mut self,
        metrics: &StepMetrics,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let &StepMetrics { step, loss, .. } = metrics;
        if let Some(what) = &metrics.skipped {
            let line = format!("step {step}: skipped, because {what}");
            observer.said(&line);
            self.log.line(&line)?;
        }
        if let Some(mu) = self.reference.as_mut().and_then(|reference| reference.next(metrics)) {
            let line = format!(
                "step {step}: flip-rate explosion: mu = {mu:.2} of {}; a larger method.lambda \
                    calms the masks",
                self.config.run.flip_reference
            );
            observer.said(&line);
            self.log.line(&line)?;
        }
        if let Some(spike) = self.spikes.next(loss) {
            let (allowed, window) = (self.config.run.spike_z, self.config.run.spike_window);
            return Err(Error::Spike {
                step,
                loss,
                z: spike.z,
                allowed,
                mean: spike.mean,
                window,
                kept: None,
            });
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
        let windows = self.dataset.evaluation_windows(self.config.model.sequence_length);
        let loss = self.trainer.evaluate_by(&windows, evaluated_at_once(&self.config))?;
        if loss.is_finite() {
            Ok(loss)
        } else {
            Err(Error::NonFiniteEvaluation { step: self.trainer.step(), loss, kept: None })
        }
    }

    /// One optimizer step, taken or skipped.
    fn step(&mut self) -> Result<StepMetrics, Error> {
        let step = self.trainer.step() + 1;
        let flips_are_told = step == 1 || is_due(self.config.run.flip_every, step);
        let is_measured = is_due(self.config.run.instrument_every, step);
        let sampling =
            if flips_are_told || is_measured { FlipSampling::Sample } else { FlipSampling::Skip };
        let (sequences, context) = (self.config.batch.size, self.config.model.sequence_length);
        let batches =
            SeededBatches { dataset: &self.dataset, seed: self.config.seed, sequences, context };
        let noise = if is_measured { self.trainer.gradient_noise(&batches)? } else { Vec::new() };
        let tokens = self.trainer.recipe().tokens_per_step() as f64;
        let began = Instant::now();
        let tokens_per_s = || tokens / began.elapsed().as_secs_f64();
        let outcome = match self.trainer.train_step(&batches, sampling).map_err(Error::from) {
            Ok(outcome) => outcome,
            Err(Error::NonFinite { step, what, kept })
                if self.config.run.on_nonfinite == OnNonFinite::Skip =>
            {
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
        let instruments =
            is_measured.then(|| self.flip_counts.measure(&mut self.trainer, &noise)).transpose()?;
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
                flips
                    .into_iter()
                    .map(|layer| {
                        (layer.name, sparse24_core::flip::flip_rate(layer.flips, layer.weights))
                    })
                    .collect()
            }),
            val_loss: None,
            instruments: instruments.map(Box::new),
            skipped: None,
        })
    }

    pub(super) fn evaluates_after(&self, step: u32) -> bool {
        step == self.config.steps
            || is_due(self.config.run.eval_every, step)
            || self.trainer.ends_phase()
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
            let newest = checkpoint::latest(&self.directory.checkpoints())
                .ok()
                .and_then(|latest| latest.checkpoint);
            *kept = newest.as_deref().and_then(checkpoint::step_of);
        }
        error
    }
}

/// Whether something that happens every so many steps (0 is never) happens after this one.
pub(super) fn is_due(every: u32, step: u32) -> bool {
    every > 0 && step.is_multiple_of(every)
}
