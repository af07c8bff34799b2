//! The training loop of a run, with its metrics, log and checkpoints.
//!
//! Invariant: whatever happens, [`Run::resume`] continues from the last checkpoint that verifies
//! (or from the start) and ends with the bits of an uninterrupted run.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use super::{
    Log, MetricsLog, RunDirectory, StepMetrics,
    components::{RunData, Scores},
    flip_reference::FlipReference,
    instruments::FlipCounts,
    loss_spikes::{Spike, Spikes},
    metrics::Best,
    model::evaluated_at_once,
    observer::{Asked, Observer, Part, Shown},
    plans,
    ranks::{Ending, Order, order},
};
use crate::{
    Error, ErrorKind, Result,
    checkpoint::{self, Saver},
    config::{Config, OnNonFinite, RunConfig},
    data::ReadAhead,
    processor::on_configured,
    task::Judgement,
};
use sparse24_core::flip::flip_rate;
use sparse24_train::trainer::{FlipSampling, Flips, Trainer, overall_flip_rate};

/// A run that this process alone may continue.
pub struct Run {
    pub(super) config: Config,
    pub(super) data: RunData,
    /// For data on disk.
    pub(super) ahead: Option<ReadAhead>,
    pub(super) trainer: Trainer,
    pub(super) directory: RunDirectory,
    pub(super) metrics: MetricsLog,
    pub(super) log: Log,
    pub(super) notices: Vec<String>,
    /// Number of plans that this process has written.
    pub(super) plans_recorded: usize,
    pub(super) saver: Saver,
    /// Step of the last save, finished or in flight.
    pub(super) saved: Option<u32>,
    /// Last steps of sparse phases under former configurations of the run.
    pub(super) former_ends: Vec<u32>,
    /// Metrics of the last step, until it is evaluated.
    pub(super) pending: Option<StepMetrics>,
    /// Steps without an update so far.
    pub(super) skipped: u32,
    /// Training tokens so far, whatever the batch was.
    pub(super) tokens_seen: u64,
    pub(super) spikes: Spikes,
    pub(super) best: Best,
    pub(super) flip_counts: FlipCounts,
    pub(super) reference: Option<FlipReference>,
    /// Metrics of the last step, if a resume found the run finished and unchanged.
    pub(super) finished: Option<StepMetrics>,
    /// Number of steps before this start whose metrics are lost.
    pub(super) lost: u32,
    /// Whether training is going on, or a panic or an error ended it: what was to follow the last
    /// step may be missing.
    pub(super) must_resume: bool,
}

/// Result of [`Run::train`].
#[derive(Debug, Clone, PartialEq)]
pub enum Ended {
    /// The last step is done.
    Finished(Summary),
    /// The observer stopped the run; a resume continues from here.
    Stopped {
        /// The last step, which has a checkpoint.
        step: u32,
    },
}

/// Summary of a finished run.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Summary {
    /// The run directory.
    pub run: PathBuf,
    /// Optimizer steps done.
    pub steps: u32,
    /// Optimizer steps done by this call of [`Run::train`].
    pub trained: u32,
    /// Training loss of the last step in nats per token, unless its metrics are lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f32>,
    /// Validation loss at the end, in nats per token.
    pub val_loss: f64,
    /// Scores of a fine-tuned model at the end.
    #[serde(skip_serializing_if = "Scores::is_empty")]
    pub scores: Scores,
    /// Wall time of this call, in seconds.
    pub seconds: f64,
}

impl Run {
    /// Messages of a resume: problems that were skipped, and where it continues.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Number of steps before this start whose metrics are lost.
    #[must_use]
    pub fn lost_metrics(&self) -> u32 {
        self.lost
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

    /// Where the run directory is now, see [`Confined::place`](crate::disk::Confined::place).
    #[must_use]
    pub fn place(&self) -> Option<PathBuf> {
        self.directory.place()
    }

    /// The data.
    #[must_use]
    pub fn data(&self) -> &RunData {
        &self.data
    }

    /// Sets the flag that interrupts the current step or evaluation within a micro-batch, to ask
    /// the observer for its request. The observer clears the flag, see [`Observer::asked`]; if it
    /// leaves the flag set, training ends with [`Error::Interrupted`] and saves nothing: a resume
    /// repeats the steps since the last checkpoint. To cancel a run without a loss, the observer
    /// answers [`Asked::Stop`]:
    ///
    /// ```
    /// use std::sync::{Arc, atomic::{AtomicBool, Ordering}};
    ///
    /// use sparse24_run::{Error, run::{Asked, Ended, Observer, Run}};
    ///
    /// struct Cancel(Arc<AtomicBool>);
    ///
    /// impl Observer for Cancel {
    ///     fn asked(&mut self) -> Asked {
    ///         let is_set = self.0.swap(false, Ordering::Relaxed);
    ///         if is_set { Asked::Stop } else { Asked::Nothing }
    ///     }
    /// }
    ///
    /// /// Trains until another thread sets the flag: then it saves and stops.
    /// fn train(run: &mut Run, flag: Arc<AtomicBool>) -> Result<Ended, Error> {
    ///     run.interrupt_on(flag.clone());
    ///     run.train(&mut Cancel(flag))
    /// }
    /// ```
    pub fn interrupt_on(&mut self, flag: Arc<AtomicBool>) {
        self.trainer.interrupt_on(flag);
    }

    /// Trains to the last step, or until the observer asks to stop. A save in flight is always
    /// completed.
    ///
    /// After an error other than [`Error::Interrupted`], or a panic of the observer, the run must
    /// be dropped and [resumed](Run::resume).
    ///
    /// # Errors
    /// [`Error::NonFinite`] and [`Error::SkipLimit`] before the update, [`Error::Spike`] and
    /// [`Error::NonFiniteEvaluation`] after it. The last checkpoint is kept, but one of the step
    /// whose evaluation was not finite is set aside. Errors from the run directory, and from
    /// saving, after the current step. [`Error::File`] for a run that must be resumed.
    pub fn train(&mut self, observer: &mut dyn Observer) -> Result<Ended> {
        on_configured(self.config.backend.threads, || self.train_here(observer))
    }

    fn train_here(&mut self, observer: &mut dyn Observer) -> Result<Ended> {
        if std::mem::replace(&mut self.must_resume, true) {
            bail!(
                self.path(),
                "its training ended with an error or a panic; drop it and resume the run"
            );
        }
        let steps = self.steps(observer);
        // Before the others end: a launcher may then kill this rank. The first error counts, but
        // a failed save more than an interruption.
        let settled = self.settle();
        let steps = match (steps, settled) {
            (Ok(_) | Err(Error::Interrupted), Err(error)) => Err(error),
            (steps, _) => steps,
        };
        let ending = match &steps {
            Ok(Ended::Finished(_)) => Some(Ending::Finished),
            Ok(Ended::Stopped { .. }) => Some(Ending::Stopped),
            // The others know, or are gone.
            Err(error) if matches!(error.kind(), ErrorKind::Peer | ErrorKind::Disagreement) => None,
            Err(error) => Some(Ending::Failed { kind: error.kind(), problem: error.to_string() }),
        };
        let told = ending.map(|ending| {
            order(self.trainer.group(), &Order::End(ending))?;
            self.trainer.group().close();
            Ok(())
        });
        let ended = steps
            .and_then(|ended| told.transpose().map(|_| ended))
            .map_err(|error| self.with_newest_checkpoint(error));
        match &ended {
            Ok(Ended::Finished(_)) => {}
            Ok(Ended::Stopped { step }) => self.log.line(&format!("stopped after step {step}"))?,
            // The error itself matters more than a log that cannot be written.
            Err(error) => drop(self.log.line(&error.to_string())),
        }
        self.must_resume = !matches!(&ended, Ok(_) | Err(Error::Interrupted));
        ended
    }

    fn steps(&mut self, observer: &mut dyn Observer) -> Result<Ended> {
        let began = Instant::now();
        let first = self.trainer.step();
        let mut last = self.finished.take();
        while self.trainer.step() < self.config.steps || self.pending.is_some() {
            self.look_after_save()?;
            if self.is_stopped(observer)? {
                return Ok(Ended::Stopped { step: self.trainer.step() });
            }
            match self.advance(observer) {
                Ok(metrics) => {
                    observer.stepped(&metrics);
                    self.conclude(&metrics, observer)?;
                    last = Some(metrics);
                }
                Err(Error::Interrupted) => {
                    if self.is_interrupted(observer)? {
                        return Ok(Ended::Stopped { step: self.trainer.step() });
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let measured =
            last.as_ref().and_then(|metrics| Some((metrics.val_loss?, metrics.scores.clone())));
        let (val_loss, scores) = loop {
            match measured.clone().map_or_else(|| self.evaluate(observer), Ok) {
                Err(Error::Interrupted) => {
                    if self.is_interrupted(observer)? {
                        return Ok(Ended::Stopped { step: self.trainer.step() });
                    }
                }
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
        Ok(Ended::Finished(Summary {
            run: self.path().to_owned(),
            steps,
            trained: steps - first,
            loss: last.map(|metrics| metrics.loss),
            val_loss,
            scores,
            seconds: began.elapsed().as_secs_f64(),
        }))
    }

    /// Serves the observer's request; returns whether to stop.
    fn is_stopped(&mut self, observer: &mut dyn Observer) -> Result<bool> {
        let mut asked = observer.asked();
        if order(self.trainer.group(), &Order::Ask)? {
            asked = Asked::Stop;
        }
        if asked != Asked::Nothing {
            self.save()?;
        }
        Ok(asked == Asked::Stop)
    }

    /// Serves the request that interrupted a step or an evaluation; returns whether to stop.
    fn is_interrupted(&mut self, observer: &mut dyn Observer) -> Result<bool> {
        let is_stopped = self.is_stopped(observer)?;
        // Otherwise the next step would end at once too, and the one after it.
        if !is_stopped && self.trainer.is_interrupted() {
            return Err(Error::Interrupted);
        }
        Ok(is_stopped)
    }

    /// Does the next step with its metrics, or completes the metrics of the last one. If
    /// interrupted, the step or its evaluation remains to be done.
    fn advance(&mut self, observer: &mut dyn Observer) -> Result<StepMetrics> {
        let mut metrics = match self.pending.take() {
            Some(metrics) => metrics,
            None => self.checked_step(observer)?,
        };
        self.record_plans()?;
        if self.evaluates_after(metrics.step) && metrics.val_loss.is_none() {
            let step = metrics.step;
            self.pending = Some(metrics);
            // The evaluation may take long, and must not delay a checkpoint that is due. But one
            // that replaces the only other waits until the evaluation shows that it is sound.
            if self.saves_after(step) && self.config.run.keep_last > 1 {
                self.save()?;
            }
            let evaluated = self.evaluate(observer);
            if let Err(Error::NonFiniteEvaluation { .. }) = evaluated {
                self.set_aside_last()?;
            }
            let (loss, scores) = evaluated?;
            metrics = self.pending.take().expect("just inserted");
            (metrics.val_loss, metrics.scores) = (Some(loss), scores);
        }
        self.record_plans()?;
        self.metrics.append(&metrics)?;
        Ok(metrics)
    }

    /// Reports a step, and checks, saves or changes phase after it.
    fn conclude(&mut self, metrics: &StepMetrics, observer: &mut dyn Observer) -> Result {
        let &StepMetrics { step, val_loss, .. } = metrics;
        if let Some(loss) = val_loss {
            self.log.line(&format!("step {step}: validation loss {loss:.4}"))?;
        }
        let is_best = self.best.next(metrics);
        if let Some(what) = &metrics.skipped {
            self.report(format!("step {step}: skipped, because {what}"), observer)?;
        }
        if let Some(mu) = self.reference.as_mut().and_then(|reference| reference.next(metrics)) {
            let line = format!(
                "step {step}: flip-rate explosion: mu = {mu:.2} of {}; a larger method.lambda \
                    calms the masks",
                self.config.run.flip_reference
            );
            self.report(line, observer)?;
        }
        if let Some(share) = self.weak_decay(step) {
            let line = format!(
                "step {step}: masked decay is probably too weak to calm the masks: lambda {:e} \
                    alone moved a pruned weight by about {:.2} % so far; \
                    `sparse24 lambda-search` measures it",
                self.config.method.lambda,
                100.0 * share
            );
            self.report(line, observer)?;
        }
        if self.saves_after(step) || is_best && self.config.run.keep_best {
            self.save()?;
        }
        if self.trainer.ends_phase() {
            self.report(format!("step {step}: {}", self.trainer.transition()), observer)?;
        }
        Ok(())
    }

    fn report(&mut self, line: String, observer: &mut dyn Observer) -> Result {
        observer.said(&line);
        self.log.line(&line)
    }

    /// Mean loss over the validation split, or `run.eval_tokens` of it, in nats per target, and the
    /// scores of a fine-tuned model. After the last step of a model that translates, one of them is
    /// its BLEU.
    ///
    /// # Errors
    /// [`Error::NonFiniteEvaluation`]; errors from the backend.
    pub fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<(f64, Scores)> {
        on_configured(self.config.backend.threads, || self.evaluate_here(observer))
    }

    fn evaluate_here(&mut self, observer: &mut dyn Observer) -> Result<(f64, Scores)> {
        let recipe = self.trainer.recipe();
        let windows = self.data.evaluation(recipe, self.config.run.eval_tokens);
        let count = windows.sequences();
        let windows = Shown::new(windows, Part::Evaluation, count, observer);
        let size = evaluated_at_once(&self.config);
        order(self.trainer.group(), &Order::Evaluate)?;
        let (metrics, Judgement { mut scores, .. }) =
            self.data.judge(&mut self.trainer, &windows, size)?;
        let (loss, step) = (metrics.loss(), self.trainer.step());
        if !loss.is_finite() {
            return Err(Error::NonFiniteEvaluation { step, loss, kept: None });
        }
        drop(windows);
        let mut show = |done, of| observer.working(Part::Translation, done, of);
        if step == self.config.steps
            && let Some(bleu) = self.data.bleu(&mut self.trainer, &mut show)?
        {
            scores.insert("bleu".to_owned(), bleu);
        }
        Ok((loss, scores))
    }

    /// The next step, with its metrics; fails after one whose loss is a spike.
    fn checked_step(&mut self, observer: &mut dyn Observer) -> Result<StepMetrics> {
        let metrics = self.step(observer)?;
        let &StepMetrics { step, loss, .. } = &metrics;
        let Some(Spike { z, mean }) = self.spikes.next(loss) else { return Ok(metrics) };
        self.metrics.append(&metrics)?;
        observer.stepped(&metrics);
        let &RunConfig { spike_z: allowed, spike_window: window, .. } = &self.config.run;
        Err(Error::Spike { step, loss, z, allowed, mean, window, kept: None })
    }

    /// One optimizer step, taken or skipped.
    fn step(&mut self, observer: &mut dyn Observer) -> Result<StepMetrics> {
        let step = self.trainer.step() + 1;
        let every = self.config.run.flip_every;
        let reports_flips = every > 0 && (step == 1 || is_due(every, step));
        let is_measured = is_due(self.config.run.instrument_every, step);
        let sampling =
            if reports_flips || is_measured { FlipSampling::Sample } else { FlipSampling::Skip };
        let batches = self.data.batches(self.trainer.recipe(), self.ahead.as_ref());
        let noise = if is_measured { self.trainer.gradient_noise(&*batches)? } else { Vec::new() };
        let tokens = self.trainer.recipe().tokens_of(step);
        let began = Instant::now();
        let micro_steps = self.trainer.recipe().gradient_accumulation.of(step) as usize;
        let batches = Shown::new(batches, Part::Step, micro_steps, observer);
        let samples_flips = sampling == FlipSampling::Sample;
        order(self.trainer.group(), &Order::Step { samples_flips })?;
        let outcome = self.trainer.train_step(&batches, sampling).map_err(Error::from);
        let mut metrics = StepMetrics {
            step,
            phase: self.trainer.phase().kind(),
            loss: f32::NAN,
            lr: self.trainer.recipe().learning_rate(step),
            grad_norm: f32::NAN,
            tokens_per_s: tokens as f64 / began.elapsed().as_secs_f64(),
            tokens: Some(tokens),
            flip_rate: None,
            flip_rate_per_layer: None,
            val_loss: None,
            scores: Scores::new(),
            instruments: None,
            skipped: None,
        };
        match outcome {
            Ok(outcome) => {
                metrics.phase = outcome.phase;
                (metrics.loss, metrics.grad_norm) = (outcome.loss as f32, outcome.grad_norm);
                if is_measured {
                    let instruments = self.flip_counts.measure(&mut self.trainer, &noise)?;
                    metrics.instruments = Some(Box::new(instruments));
                }
                if let Some(flips) = outcome.flips.filter(|_| reports_flips) {
                    let rate = |of: Flips| (of.name, flip_rate(of.flips, of.weights));
                    metrics.flip_rate = Some(overall_flip_rate(&flips));
                    metrics.flip_rate_per_layer = Some(flips.into_iter().map(rate).collect());
                }
            }
            Err(Error::NonFinite { step, what, kept })
                if self.config.run.on_nonfinite == OnNonFinite::Skip =>
            {
                if self.skipped >= self.config.run.skip_limit {
                    return Err(Error::SkipLimit { step, what, skipped: self.skipped, kept });
                }
                order(self.trainer.group(), &Order::Skip)?;
                self.trainer.skip_step()?;
                self.skipped += 1;
                metrics.phase = self.trainer.phase().kind();
                metrics.skipped = Some(what);
            }
            Err(error) => return Err(error),
        }
        self.tokens_seen = self.tokens_seen.saturating_add(tokens);
        Ok(metrics)
    }

    pub(super) fn evaluates_after(&self, step: u32) -> bool {
        step == self.config.steps
            || is_due(self.config.run.eval_every, step)
            || self.trainer.ends_phase()
    }

    /// Writes `plans.json` if choices were timed since.
    fn record_plans(&mut self) -> Result {
        let backend = self.trainer.backend();
        if backend.plan_count() != self.plans_recorded {
            plans::write(&self.directory.plans(), &backend.plans())?;
            self.plans_recorded = backend.plan_count();
        }
        Ok(())
    }

    /// Adds the newest checkpoint to errors that report it, and to those of a device.
    fn with_newest_checkpoint(&self, mut error: Error) -> Error {
        let newest = || {
            let latest = checkpoint::latest(&self.directory.checkpoints()).ok()?;
            Some(latest.checkpoint.as_deref().and_then(checkpoint::step_of))
        };
        match &mut error {
            Error::NonFinite { kept, .. }
            | Error::SkipLimit { kept, .. }
            | Error::Spike { kept, .. }
            | Error::NonFiniteEvaluation { kept, .. }
            | Error::NonFiniteCheckpoint { kept, .. } => *kept = newest(),
            Error::Train(sparse24_train::Error::Device(problem)) => {
                if let Some(step) = newest().flatten() {
                    *problem += &format!("; a resume continues from the checkpoint of step {step}");
                }
            }
            _ => {}
        }
        error
    }
}

/// Whether something that happens every `every` steps (0 is never) happens after this one.
pub(super) fn is_due(every: u32, step: u32) -> bool {
    every > 0 && step.is_multiple_of(every)
}
