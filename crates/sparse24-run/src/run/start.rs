//! Starts a run in a new directory, or resumes one from its newest checkpoint.
//!
//! Invariant: everything is checked before anything is written, and a new directory is a run only
//! when it is complete.

use std::{collections::BTreeMap, fs, num::NonZeroU32, path::Path};

use super::{
    Initial, LambdaOrigin, Log, MetricsLog, Provenance, Run, RunDirectory, StepMetrics,
    components::{RunData, data_of, record_scan, run_config, trainer_in, vocabulary},
    flip_reference::FlipReference,
    identity::{self, DATA, TOKENIZER, covers, identity},
    instruments::FlipCounts,
    loss_spikes::Spikes,
    metrics::Best,
    plans,
    provenance::fingerprint,
    ranks::set_up,
    rescheduling::{kept_ends, moved_switch, raised_rate},
    saving::{check_space, former_ends},
    snapshot::{check_weights, phase_ends, position, restore, snapshot},
    tokenizer::{check_rebuilt, save_tokenizer},
};
use crate::{
    Error, Result,
    checkpoint::{self, NamedTensor, Saver, State},
    config::{Config, dotted, key_of, table_of},
    data::Tokenizer,
    disk,
    processor::on_configured,
    word::word,
};
use sparse24_train::{
    backend::Plans,
    group::{Group, Solo},
    method::Method,
    trainer::Trainer,
};

/// Inputs of a new run besides its configuration and data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given<'a> {
    /// Initial weights, of the parameters' shapes (`[out, in]`, where Hugging Face's GPT-2 has
    /// `[in, out]`); random ones otherwise.
    pub weights: Option<&'a [NamedTensor]>,
    /// Plans of another run, to reproduce its bits: its directory, or the file.
    pub plans: Option<&'a Path>,
    /// Origin of lambda, for the provenance.
    pub lambda: Option<&'a LambdaOrigin>,
}

/// Options of a resume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resume {
    /// Treatment of a damaged newest checkpoint.
    pub damaged: Damaged,
    /// Keys and sections of the configuration that may differ from the checkpoint's; `data` accepts
    /// other data, but another tokenizer only by its key.
    pub allow: Vec<String>,
    /// Settings that change from here on, each `key=value`; they are allowed.
    pub settings: Vec<String>,
    /// Whether other data are refused even if `settings` name a new `data.path`.
    pub keeps_data: bool,
    /// Whether the run belongs to a set, so that errors do not advise other settings or data.
    pub is_member: bool,
}

impl Resume {
    /// That of a run of a set, which falls back by itself.
    #[must_use]
    pub fn of_member() -> Self {
        Self { damaged: Damaged::FallBack, is_member: true, ..Self::default() }
    }

    /// The command that resumes a run with these options, and `more`.
    pub(super) fn command(&self, path: &Path, more: &str) -> String {
        let mut command = format!("sparse24 resume {}", word(path));
        if self.damaged == Damaged::FallBack {
            command += " --fall-back";
        }
        for (option, values) in [("--set", &self.settings), ("--allow", &self.allow)] {
            values.iter().for_each(|value| command += &format!(" {option} {}", word(value)));
        }
        format!("{command} {more}")
    }
}

/// Treatment of a damaged newest checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Damaged {
    /// An error; the user may be able to restore it.
    #[default]
    Refuse,
    /// Rename it to `damaged-...` and resume from the one before it.
    FallBack,
}

impl Run {
    /// Starts a run on the configuration's data in a new directory, after checking everything. The
    /// data are those of [`open_data`](super::open_data) or
    /// [`Examples::open`](crate::task::Examples::open).
    ///
    /// `provenance.json` records the command line of this process, which may hold secrets.
    ///
    /// # Errors
    /// Errors from the configuration, the inputs and the directory; [`Error::Setting`] for a
    /// dataset that was opened for another configuration. Nothing is left behind.
    pub fn start(
        config: Config,
        data: impl Into<RunData>,
        given: Given<'_>,
        path: &Path,
    ) -> Result<Self> {
        Self::start_in(Box::new(Solo), config, data, given, path)
    }

    /// Like [`Self::start`], as rank 0 of a group whose other ranks [join](super::Follower::join).
    /// The run has at least as many replicas as there are ranks, unless `batch.replicas` is set to
    /// another number than 1.
    ///
    /// # Errors
    /// Like [`Self::start`]; errors of the group.
    pub fn start_in(
        group: Box<dyn Group>,
        config: Config,
        data: impl Into<RunData>,
        given: Given<'_>,
        path: &Path,
    ) -> Result<Self> {
        let data = data.into();
        on_configured(config.backend.threads, || Self::begin(group, config, data, given, path))
    }

    fn begin(
        group: Box<dyn Group>,
        mut config: Config,
        data: RunData,
        Given { weights: initial, plans, lambda }: Given<'_>,
        path: &Path,
    ) -> Result<Self> {
        if config.batch.replicas == NonZeroU32::MIN {
            config.batch.replicas =
                NonZeroU32::new(group.world() as u32).expect("a group has a rank");
        }
        config.check()?;
        if let RunData::Task(examples) = &data
            && examples.outputs() != config.task.outputs
        {
            let found = config.task.outputs;
            bail!(
                setting = "task.outputs",
                "expected {}, as in the data, found {found}",
                examples.outputs()
            );
        }
        if !data.is_of(&config) {
            bail!(
                setting = DATA,
                "the data was opened for another configuration, so a resume would \
                not find it; open it with open_data"
            );
        }
        let table = |tensor: &&NamedTensor| tensor.name == config.model.token_table();
        let table = initial.and_then(|weights| weights.iter().find(table));
        let rows = table.and_then(|table| table.shape.first().copied()).unwrap_or(0);
        let vocabulary = vocabulary(&config, &data, rows);
        let is_new = match data {
            RunData::Text(_) | RunData::Pairs(_) => |_: &str| false,
            RunData::Task(_) => is_of_head,
            RunData::Images(_) => |name: &str| name.starts_with("head."),
        };
        if let Some(weights) = initial {
            check_weights(&config.recipe(vocabulary)?.model, weights, is_new)?;
        }
        let mut trainer = trainer_in(group, &config, vocabulary)?;
        data.check_evaluation(trainer.recipe(), config.run.eval_tokens)?;
        if let Some(path) = plans {
            plans::use_file(&mut trainer, path)?;
        }
        if let Some(weights) = initial {
            let named: Vec<_> = weights
                .iter()
                .map(|tensor| (tensor.name.as_str(), tensor.values.as_slice()))
                .collect();
            match data {
                RunData::Text(_) | RunData::Pairs(_) => trainer.start_from(&named)?,
                RunData::Task(_) | RunData::Images(_) => {
                    trainer.start_partly_from(&named, is_new)?;
                }
            }
        }
        make_absolute(&mut config)?;
        let reference = FlipReference::open(&config)?;
        let exchange = set_up(&config, &data, &mut trainer, vocabulary, initial.is_some())?;
        let (directory, (metrics, log)) = RunDirectory::filled(path, |directory| {
            check_space(&config, trainer.recipe(), 0, directory.path())?;
            if let Some(tokenizer) = data.tokenizer() {
                tokenizer.save(&directory.tokenizer())?;
            }
            data.scan().map_or(Ok(()), |scan| record_scan(directory.path(), scan))?;
            if initial.is_some() {
                // A resume cannot recreate these weights.
                let state = identity(&config, &data, position(&trainer));
                checkpoint::save(
                    &directory.checkpoints(),
                    &snapshot(&mut trainer, state, Vec::new(), None)?()?,
                )?;
            }
            let origin = if initial.is_some() { Initial::Given } else { Initial::Random };
            let start = Provenance {
                weights: initial.map(fingerprint),
                lambda: lambda.cloned(),
                ..Provenance::of_start(&trainer.backend().device(), origin)
            };
            start.record(&directory.provenance())?;
            let metrics = MetricsLog::create(&directory.metrics())?;
            let mut log = Log::open(&directory.log())?;
            log.line("started")?;
            // Last: without it there is no run to resume, so a run always has its initial weights.
            directory.write(&directory.config(), config.to_toml().as_bytes())?;
            Ok((metrics, log))
        })?;
        let run = Self::opened(config, data, trainer, directory, metrics, log);
        let notices = exchange.into_iter().collect();
        Ok(Self { saved: initial.map(|_| 0), reference, notices, ..run })
    }

    /// Resumes a run from its newest checkpoint, or, if it has none, from the start. A lost
    /// `tokenizer.json` is written again from the data.
    ///
    /// # Errors
    /// [`Error::File`] for a directory without a run; a damaged newest checkpoint, unless falling
    /// back is allowed and an older one verifies; a run without checkpoints that had given weights
    /// or whose metrics show that it had checkpoints; data or settings that differ and are not
    /// allowed to; and fewer steps than are done. [`Error::Room`]; [`Error::Io`], also for a
    /// directory in use.
    pub fn resume(path: &Path, how: &Resume) -> Result<Self> {
        Self::resume_in(Box::new(Solo), path, how, |_| Ok(()))
    }

    /// Like [`Self::resume`], as rank 0 of a group whose other ranks
    /// [join](super::Follower::join); `announce` sees the configuration before any path in it is
    /// read, and may refuse it.
    ///
    /// # Errors
    /// Like [`Self::resume`]; errors of the group and of `announce`.
    pub fn resume_in(
        group: Box<dyn Group>,
        path: &Path,
        how: &Resume,
        announce: impl FnOnce(&Config) -> Result + Send,
    ) -> Result<Self> {
        // For the number of threads; it is read again under the run's lock.
        let config = run_config(path).and_then(|config| config.with_settings(&how.settings));
        let threads = config.map_or(0, |config| config.backend.threads);
        on_configured(threads, || Self::continued(group, path, how, announce))
    }

    fn continued(
        group: Box<dyn Group>,
        path: &Path,
        how: &Resume,
        announce: impl FnOnce(&Config) -> Result,
    ) -> Result<Self> {
        let directory = RunDirectory::open(path)?;
        let mut config = run_config(directory.path())?;
        let before = dotted(table_of(&config));
        let mut asked = Vec::new();
        if !how.settings.is_empty() {
            config = config.with_settings(&how.settings)?;
            make_absolute(&mut config)?;
            asked.extend(how.settings.iter().map(|setting| key_of(setting).to_owned()));
        }
        identity::check_names(&how.allow, &config)?;
        let now = dotted(table_of(&config));
        let mut changed = now.clone();
        changed.retain(|key, value| before.get(key) != Some(value));
        // Another method brings its own lambda.
        asked.extend(changed.keys().cloned());
        let starts = Provenance::readable(&directory.provenance())?;
        announce(&config)?;
        let latest = checkpoint::latest(&directory.checkpoints())?;
        let state = latest.checkpoint.as_deref().map(checkpoint::read_state).transpose()?;
        let data = data_of(directory.path(), &config, state.as_ref())?;
        // The process may have died before a checkpoint had what an earlier resume changed.
        let newest = latest.checkpoint.as_deref().and_then(checkpoint::step_of);
        let unsaved = starts.into_iter().filter(|start| start.after >= newest);
        // Older versions recorded the path of the data, without quotes, as `data`.
        let renamed = |(key, value): (String, String)| match key == "data" {
            true => (DATA.to_owned(), toml::Value::String(value).to_string()),
            false => (key, value),
        };
        let unsaved = unsaved.flat_map(|start| start.changed).map(renamed);
        let mut earlier: BTreeMap<_, _> = unsaved.collect();
        earlier.retain(|key, value| now.get(key) == Some(value));
        // It is replaced only where that was allowed.
        let former = Tokenizer::load(&directory.tokenizer()).ok();
        let is_saved = former.as_ref() == data.tokenizer();
        let is_replaced = is_saved && earlier.contains_key(DATA);
        let mut allow = asked;
        allow.retain(|key| !(how.keeps_data && covers(key, DATA)));
        allow.extend(earlier.into_keys());
        allow.extend(is_replaced.then(|| TOKENIZER.to_owned()));
        allow.extend_from_slice(&how.allow);
        if let Some((_, error)) = latest.refused.first().filter(|_| how.damaged == Damaged::Refuse)
        {
            let advice = match latest.checkpoint {
                Some(_) => format!(
                    "restore it, or continue from the one before it with `{}`",
                    how.command(path, "--fall-back")
                ),
                None => "no other is intact either: restore one, or start a new run".to_owned(),
            };
            let problem = format!("its newest checkpoint is damaged ({error}); ");
            return Err(Error::file(path, problem).advising(&advice));
        }
        let rows = latest.checkpoint.as_deref();
        let rows =
            rows.map(|path| checkpoint::rows(path, config.model.token_table())).transpose()?;
        let vocabulary = vocabulary(&config, &data, rows.unwrap_or(0));
        let begin = || trainer_in(group, &config, vocabulary);
        let mut trainer;
        let mut plans = Plans::new();
        let mut notices: Vec<_> = latest
            .refused
            .iter()
            .map(|(_, error)| format!("skipped a damaged checkpoint: {error}"))
            .collect();
        let (mut saved, mut flip_counts) = (None, FlipCounts::default());
        let (mut skipped, mut tokens_seen) = (0, 0);
        let (mut measured_anew_after, mut accepted) = (None, Vec::new());
        let initial = match latest.checkpoint {
            Some(path) => {
                let mut checkpoint = checkpoint::load(&path)?;
                plans.clone_from(&checkpoint.state.plan);
                // Checked before the trainer is allocated, since its model may not fit in memory.
                let mut now = identity(&config, &data, checkpoint.state.clone());
                now.dataset = identity::of_same_data(&data, checkpoint.state.dataset)?;
                let is_ids = matches!(data, RunData::Text(_)) && data.tokenizer().is_none();
                if is_ids && Some(vocabulary) == rows {
                    // The largest id plus one; the weights have rows for all ids.
                    now.dataset.vocabulary = checkpoint.state.dataset.vocabulary;
                }
                let State { step, total_steps, .. } = checkpoint.state;
                let advise = |other: String| match how.is_member {
                    true => format!("remove {} to train it again", word(directory.path())),
                    false => other,
                };
                if config.steps != total_steps && config.steps <= step {
                    let problem = format!(
                        "has done step {step} of {total_steps}, but the run now has steps = {}; ",
                        config.steps
                    );
                    let undo = format!(
                        "undo it with `--set steps={total_steps}`, or ask for more than {step}"
                    );
                    return Err(Error::file(&path, problem + &advise(undo)));
                }
                let more = if config.steps == step { " --set steps=N" } else { "" };
                let accept = |allow: &str| {
                    let command = how.command(directory.path(), &format!("{allow}{more}"));
                    advise(format!("accept it with `{command}`"))
                };
                if former.is_none() && !allow.iter().any(|key| key == TOKENIZER) {
                    check_rebuilt(&data, &directory, &checkpoint.state)?;
                }
                accepted = identity::check(&path, &checkpoint.state, &now, &allow, accept)?;
                let of_phases = ["method.name", "method.phases"];
                let is_kept = !accepted.iter().any(|(key, _)| of_phases.contains(&key.as_str()));
                notices.extend(accepted.iter().map(|(_, notice)| notice.clone()));
                let model = config.recipe(vocabulary)?.model;
                check_weights(&model, &checkpoint.weights, |_| false)?;
                trainer = begin()?;
                let kept = kept_ends(&checkpoint.state, trainer.recipe(), is_kept);
                notices.extend(moved_switch(&checkpoint.state, trainer.recipe(), &kept));
                if !identity::measure_alike(&checkpoint.state, &now)? {
                    measured_anew_after = Some(checkpoint.state.step);
                }
                skipped = checkpoint.state.skipped_steps;
                tokens_seen = checkpoint.state.tokens_seen;
                flip_counts = FlipCounts::of_checkpoint(&checkpoint.auxiliary);
                // Masks with the structure of another method are searched again, and scales with
                // them.
                let method = &trainer.recipe().method;
                let pruned = |of: &Method| (of.pruned_operands(), of.sparse_phase().forward);
                if identity::method(&checkpoint.state)
                    .is_ok_and(|saved| pruned(&saved) != pruned(method))
                {
                    checkpoint.masks.clear();
                }
                checkpoint.state.phase_ends = phase_ends(&kept);
                restore(&mut trainer, checkpoint)?;
                checkpoint::set_aside_after(&directory.checkpoints(), trainer.step())?;
                saved = Some(trainer.step());
                Initial::Checkpoint
            }
            None if !notices.is_empty() => {
                bail!(path, "has no intact checkpoint; start a new run");
            }
            None if Provenance::read(&directory.provenance())?
                .first()
                .is_none_or(|first| first.initial != Initial::Random) =>
            {
                let problem =
                    "has no checkpoint left, and its given initial weights cannot be recreated";
                let command = if config.task()?.is_some() { "finetune" } else { "train" };
                bail!(path, "{problem}; start a new run with `sparse24 {command} --init-from`");
            }
            None => {
                trainer = begin()?;
                let metrics = directory.metrics();
                let mut last = 0;
                if disk::exists(&metrics)? {
                    MetricsLog::salvage(&metrics, |metrics| last = metrics.step)?;
                }
                // A save is logged when it is complete, and the second one starts only then.
                let second = config.run.checkpoint_every.saturating_mul(2);
                let has_saved = (1..last).contains(&second);
                if has_saved || last > 0 && Log::reports_save(&directory.log()) {
                    bail!(
                        path,
                        "holds metrics up to step {last}, but none of the checkpoints that it \
                            saved in its folder checkpoints; restore one, or start a new run"
                    );
                }
                if last > 0 {
                    let (_, kept) = disk::keep(&metrics)?;
                    notices.push(format!("the metrics up to step {last} are kept as {kept}"));
                }
                Initial::Random
            }
        };
        data.scan().map_or(Ok(()), |scan| record_scan(directory.path(), scan))?;
        // The file has at least the checkpoint's plans, unless it is lost.
        if disk::exists(&directory.plans())? {
            plans = plans::read(&directory.plans())?;
        }
        notices.extend(plans::use_own(&mut trainer, &plans, &directory.plans())?);
        notices.extend(set_up(&config, &data, &mut trainer, vocabulary, saved.is_some())?);
        let former_ends = former_ends(&directory, &trainer)?;
        let mut best = Best::of(directory.path())?;
        best.resumed(Some(trainer.step()), measured_anew_after);
        let former_best = if config.run.keep_best { best.changes.len() } else { 0 };
        let kept_too = former_ends.len() + former_best;
        check_space(&config, trainer.recipe(), kept_too, directory.path())?;
        let step = trainer.step();
        let (metrics, cut) = MetricsLog::resume(&directory.metrics(), step)?;
        notices.extend(cut.damage.map(|damage| format!("metrics.jsonl: {damage}")));
        let is_pending =
            |last: &StepMetrics| step > 0 && last.step == step && last.val_loss.is_none();
        if measured_anew_after.is_some() && cut.last.as_ref().is_some_and(is_pending) {
            measured_anew_after = Some(step - 1);
            best.resumed(Some(step), measured_anew_after);
        }
        if cut.lost.count > 0 {
            let steps = if cut.lost.count == 1 { "step" } else { "steps" };
            notices.push(format!("metrics.jsonl has lost {steps} {}", cut.lost.list));
        }
        let of_last = cut.last.iter().filter(|last| last.step == step);
        notices.extend(of_last.filter_map(|last| raised_rate(last, &accepted, trainer.recipe())));
        if changed.get("run.keep_best").map(String::as_str) == Some("false") {
            notices.push("the next save may remove the best checkpoint".to_owned());
        }
        notices.push(match config.steps {
            last if last == step => format!("the run is finished: step {step} was the last"),
            _ => format!("resumed after step {step}"),
        });
        let mut named = how.settings.clone();
        named.retain(|setting| changed.keys().any(|key| covers(key_of(setting), key)));
        let mut finished = cut
            .last
            .clone()
            .filter(|last| config.steps == step && last.step == step && last.val_loss.is_some());
        if !accepted.is_empty() && finished.is_some() {
            bail!(
                path,
                "is finished; to continue with other settings or data, set more steps than {step}: \
                 add --set steps=N"
            );
        }
        // `--allow` evaluates a finished run again.
        finished = finished.filter(|_| changed.is_empty() && how.allow.is_empty());
        if finished.is_none() {
            let start = Provenance::of_start(&trainer.backend().device(), initial);
            let start = Provenance { after: Some(step), changed, measured_anew_after, ..start };
            if let Some(kept) = start.record(&directory.provenance())? {
                notices.push(format!("provenance.json was damaged; it is kept as {kept}"));
            }
        }
        let run = &config.run;
        if run.keep_best && measured_anew_after.is_some() {
            let notice = "evaluations measure something else from here on, and only they count \
                          for the best checkpoint; a former best is kept";
            notices.push(notice.to_owned());
        }
        let watches = run.spike_z > 0.0 || !run.flip_reference.is_empty() || run.keep_best;
        // It changes no result, so a reference that has moved must not prevent a resume.
        let mut reference = FlipReference::open(&config).unwrap_or_else(|error| {
            notices.push(format!("{error}; flip rates are not compared"));
            None
        });
        let mut spikes = Spikes::new(run.spike_z, run.spike_window);
        let before = watches.then(|| MetricsLog::steps(&directory.metrics())).transpose()?;
        for metrics in before.into_iter().flatten() {
            let metrics = metrics?;
            spikes.push(metrics.loss);
            best.next(&metrics);
            if let Some(reference) = &mut reference {
                reference.next(&metrics);
            }
        }
        if !is_saved {
            notices.push(save_tokenizer(&data, &directory, former, state)?);
        }
        if !named.is_empty() {
            directory.write(&directory.config(), config.to_toml().as_bytes())?;
            notices.push(format!("from here on with {}", named.join(", ")));
        }
        let mut log = Log::open(&directory.log())?;
        for notice in &notices {
            log.line(notice)?;
        }
        let run = Self::opened(config, data, trainer, directory, metrics, log);
        let mut run =
            Self { notices, saved, former_ends, skipped, tokens_seen, flip_counts, ..run };
        (run.spikes, run.best) = (spikes, best);
        (run.reference, run.finished, run.lost) = (reference, finished, cut.lost.count);
        // A signal may have come between the step and its evaluation.
        run.pending = cut.last.filter(|metrics| {
            metrics.step == step && metrics.val_loss.is_none() && run.evaluates_after(step)
        });
        Ok(run)
    }

    /// A run without a checkpoint.
    fn opened(
        config: Config,
        data: RunData,
        mut trainer: Trainer,
        directory: RunDirectory,
        metrics: MetricsLog,
        log: Log,
    ) -> Self {
        let saver = Saver::new(directory.checkpoints());
        let spikes = Spikes::new(config.run.spike_z, config.run.spike_window);
        let ahead = data.read_ahead(&mut trainer);
        Self {
            config,
            ahead,
            data,
            trainer,
            directory,
            metrics,
            log,
            notices: Vec::new(),
            plans_recorded: 0,
            saver,
            saved: None,
            former_ends: Vec::new(),
            pending: None,
            skipped: 0,
            tokens_seen: 0,
            spikes,
            best: Best::default(),
            flip_counts: FlipCounts::default(),
            reference: None,
            finished: None,
            lost: 0,
            must_resume: false,
        }
    }
}

/// Whether a parameter belongs to the head of a fine-tuned model, which pre-training does not have.
fn is_of_head(name: &str) -> bool {
    ["pooler.", "classifier.", "score.", "qa_outputs."].iter().any(|head| name.starts_with(head))
}

/// Makes the paths of a configuration absolute: a resume may run in another working directory.
fn make_absolute(config: &mut Config) -> Result {
    let paths = [&mut config.data.path, &mut config.run.flip_reference];
    for path in paths.into_iter().filter(|path| !path.is_empty()) {
        let absolute = std::path::absolute(&*path).map_err(|e| Error::io("find", &*path, e))?;
        // A path that leaves the run's own directory by `..` would be refused.
        let real = absolute.ancestors().find(|above| above.ends_with("..")).and_then(|above| {
            let real = fs::canonicalize(above).ok()?.join(absolute.strip_prefix(above).ok()?);
            Some(real.components().collect())
        });
        let absolute = real.unwrap_or(absolute);
        *path = absolute.into_os_string().into_string().unwrap_or_else(|_| path.clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
