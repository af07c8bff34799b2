//! A run on disk: configuration, data, trainer and run directory together, from start or resume to the last step.
//!
//! Invariant: whatever happens, `resume` continues from the last checkpoint that verifies (or from the beginning) and ends with the bits of
//! an uninterrupted run. Deliberately absent: terminals and arguments ([`Observer`] is what a command implements).

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::Instant,
};

use crate::{
    Error,
    checkpoint::{self, Checkpoint, Fingerprint, Retention, State},
    config::Config,
    data::{Dataset, Draw, EvaluationWindows, Tokenizer},
    estimate::estimate,
    machine,
    run::{Log, MetricsLog, Provenance, RunDirectory, StepMetrics},
    trainer::{Batches, FlipSampling, ParameterState, Trainer, Windows, overall_flip_rate},
};

mod model;

pub use model::{Loaded, adopt, load, locate};

/// A run that this process alone may continue.
pub struct Session {
    config: Config,
    dataset: Dataset,
    trainer: Trainer,
    directory: RunDirectory,
    metrics: MetricsLog,
    log: Log,
}

/// Who watches a run.
pub trait Observer {
    /// After every optimizer step.
    fn stepped(&mut self, metrics: &StepMetrics);
    /// Something worth a line.
    fn said(&mut self, line: &str);
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Summary {
    /// The run directory.
    pub run: PathBuf,
    /// Optimizer steps done.
    pub steps: u32,
    /// Loss of the last step, nats a token; none if no step was left to do.
    pub loss: Option<f32>,
    /// Loss on the held-out split at the end, nats a token.
    pub val_loss: f64,
    /// Wall time of this process.
    pub seconds: f64,
}

impl Session {
    /// Begins a run in a new directory, from random weights or from these; nothing is written before everything has been checked.
    ///
    /// # Errors
    /// Those of the configuration, the data and the directory.
    pub fn start(mut config: Config, initial: Option<&[checkpoint::Tensor]>, directory: &Path) -> Result<Self, Error> {
        let dataset = open_dataset(&config)?;
        let mut trainer = new_trainer(&config, dataset.vocabulary() as usize)?;
        if let Some(weights) = initial {
            trainer.start_from(&borrowed(weights))?;
        }
        if !config.data.path.is_empty() {
            // A resume may begin elsewhere.
            let absolute = std::path::absolute(&config.data.path).map_err(|e| Error::io("find", &config.data.path, e))?;
            config.data.path = absolute.into_os_string().into_string().unwrap_or(config.data.path);
        }
        let directory = RunDirectory::create(directory)?;
        directory.write(&directory.config(), config.to_toml().as_bytes())?;
        if let Some(tokenizer) = dataset.tokenizer() {
            tokenizer.save(&directory.tokenizer())?;
        }
        let metrics = MetricsLog::create(&directory.metrics())?;
        let mut session = Self::assemble(config, dataset, trainer, directory, metrics)?;
        if initial.is_some() {
            // A resume cannot make these weights again.
            session.save()?;
        }
        session.log.line("started")?;
        Ok(session)
    }

    /// Continues a run from its newest checkpoint that verifies, or from the beginning if it has none.
    ///
    /// # Errors
    /// [`Error::File`] for a directory that holds no run or is in use, for a damaged newest checkpoint, and for data that are not the
    /// checkpoint's.
    pub fn resume(path: &Path) -> Result<Self, Error> {
        let directory = RunDirectory::open(path)?;
        let config = run_config(directory.path())?;
        let dataset = open_dataset(&config)?;
        let mut trainer = new_trainer(&config, dataset.vocabulary() as usize)?;
        let latest = checkpoint::latest(&directory.checkpoints())?;
        if let Some((refused, error)) = latest.refused.into_iter().next() {
            let refused = refused.display();
            return Err(Error::file(path, format!("its newest checkpoint is damaged ({error}); remove {refused} to continue before it")));
        }
        if let Some(path) = latest.checkpoint {
            let checkpoint = checkpoint::load(&path)?;
            check_identity(&path, &checkpoint.state, &identity(&config, &dataset, &trainer))?;
            restore(&mut trainer, checkpoint)?;
        }
        let (metrics, _) = MetricsLog::resume(&directory.metrics(), trainer.step())?;
        let mut session = Self::assemble(config, dataset, trainer, directory, metrics)?;
        session.log.line(&format!("resumed after step {}", session.trainer.step()))?;
        Ok(session)
    }

    fn assemble(config: Config, dataset: Dataset, trainer: Trainer, directory: RunDirectory, metrics: MetricsLog) -> Result<Self, Error> {
        let device = trainer.backend().device();
        Provenance::now(&device.description, sparse24_cpu::Simd::detect().to_string(), sparse24_cpu::threads())
            .record(&directory.provenance())?;
        let log = Log::open(&directory.log())?;
        Ok(Self { config, dataset, trainer, directory, metrics, log })
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

    /// Trains to the last step.
    ///
    /// # Errors
    /// [`Error::NonFinite`] before any update; the last checkpoint stays. Those of the run directory.
    pub fn run(&mut self, observer: &mut dyn Observer) -> Result<Summary, Error> {
        let began = Instant::now();
        let mut last: Option<StepMetrics> = None;
        let mut tokens_since = Instant::now();
        while self.trainer.step() < self.config.steps {
            let metrics = self.step(&mut tokens_since).inspect_err(|error| {
                // The error itself matters more than a log that cannot be written.
                let _ = self.log.line(&error.to_string());
            })?;
            observer.stepped(&metrics);
            if self.saves_after(metrics.step) {
                let path = self.save()?;
                self.log.line(&format!("step {}: saved {}", metrics.step, path.display()))?;
                tokens_since = Instant::now();
            }
            if metrics.step == self.switch() && metrics.step < self.config.steps {
                let line = format!("step {}: sparse training ends, dense fine-tuning begins", metrics.step);
                observer.said(&line);
                self.log.line(&line)?;
            }
            last = Some(metrics);
        }
        let val_loss = match last.as_ref().and_then(|metrics| metrics.val_loss) {
            Some(loss) => f64::from(loss),
            None => self.evaluate()?,
        };
        let loss = last.map(|metrics| metrics.loss);
        Ok(Summary { run: self.path().to_owned(), steps: self.trainer.step(), loss, val_loss, seconds: began.elapsed().as_secs_f64() })
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
        let val_loss = if evaluates { Some(self.evaluate()? as f32) } else { None };
        *since = Instant::now();
        let metrics = StepMetrics {
            step,
            phase: outcome.phase,
            loss: outcome.loss as f32,
            lr: outcome.learning_rate,
            grad_norm: outcome.grad_norm,
            tokens_per_s: self.trainer.recipe().tokens_per_step() as f64 / seconds,
            flip_rate: outcome.flips.as_deref().map(overall_flip_rate),
            flip_rate_per_layer: outcome
                .flips
                .map(|flips| flips.into_iter().map(|layer| sparse24_core::flip::flip_rate(layer.flips, layer.weights)).collect()),
            val_loss,
        };
        self.metrics.append(&metrics)?;
        Ok(metrics)
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
        let state = self.state();
        let checkpoint = snapshot(&mut self.trainer, state)?;
        let path = checkpoint::save(&self.directory.checkpoints(), &checkpoint)?;
        let last = NonZeroUsize::new(self.config.run.keep_last).unwrap_or(NonZeroUsize::MIN);
        checkpoint::retain(&self.directory.checkpoints(), &Retention { last, always: vec![self.switch()] })?;
        Ok(path)
    }

    fn state(&self) -> State {
        identity(&self.config, &self.dataset, &self.trainer)
    }
}

/// The configuration of a run directory.
///
/// # Errors
/// [`Error::File`] for a directory that holds no run or a damaged configuration; [`Error::Io`].
pub fn run_config(run: &Path) -> Result<Config, Error> {
    let path = run.join("config.toml");
    if path.is_file() { Config::read(&path) } else { Err(Error::file(run, "is no run directory: it holds no config.toml")) }
}

fn borrowed(tensors: &[checkpoint::Tensor]) -> Vec<(&str, &[f32])> {
    tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.values.as_slice())).collect()
}

/// The dataset of a configuration, long enough for its context.
///
/// # Errors
/// Those of the data; a corpus shorter than a context is refused.
pub fn open_dataset(config: &Config) -> Result<Dataset, Error> {
    let path = (!config.data.path.is_empty()).then(|| Path::new(&config.data.path));
    let dataset = Dataset::open(path, Some(config.data.tokenizer), config.data.validation)?;
    dataset.check_context(config.model.context)?;
    Ok(dataset)
}

/// Other data than a run's own, read with its tokenizer.
///
/// # Errors
/// Those of the data.
pub fn open_other_dataset(path: &Path, tokenizer: Option<&Tokenizer>, config: &Config) -> Result<Dataset, Error> {
    let dataset = match tokenizer {
        Some(tokenizer) => Dataset::open_with(path, tokenizer.clone(), config.data.validation)?,
        None => Dataset::open(Some(path), None, config.data.validation)?,
    };
    dataset.check_context(config.model.context)?;
    Ok(dataset)
}

fn new_trainer(config: &Config, vocabulary: usize) -> Result<Trainer, Error> {
    let recipe = config.recipe(vocabulary)?;
    let needed = estimate(&recipe).device_bytes();
    if let Some(there) = machine::memory().map(|memory| memory.total).filter(|&there| needed > there) {
        let [needed, there] = [needed, there].map(|bytes| bytes >> 20);
        let problem = format!("needs {needed} MiB of memory, this machine has {there}; make it or batch.sequences smaller");
        return Err(Error::setting("model", problem));
    }
    Trainer::new((config.backend_entry()?.open)(config.backend.arithmetic)?, recipe)
}

fn identity(config: &Config, dataset: &Dataset, trainer: &Trainer) -> State {
    State {
        step: trainer.step(),
        total_steps: config.steps,
        phase: trainer.recipe().method.phase_at(trainer.step(), config.steps) as u32,
        phase_kind: trainer.phase().kind(),
        seed: config.seed,
        tokens_seen: trainer.recipe().tokens_per_step() * u64::from(trainer.step()),
        method: Default::default(),
        plan: Default::default(),
        config: decisive(config),
        dataset: dataset_fingerprint(dataset),
        tokenizer: tokenizer_fingerprint(dataset.tokenizer()),
    }
}

/// What stands for data or a tokenizer where there is none.
const NONE: &[u8] = &[];

fn dataset_fingerprint(dataset: &Dataset) -> Fingerprint {
    Fingerprint::from_bytes(*dataset.fingerprint().as_bytes())
}

fn tokenizer_fingerprint(tokenizer: Option<&Tokenizer>) -> Fingerprint {
    tokenizer.map_or_else(|| Fingerprint::of(NONE), |tokenizer| Fingerprint::from_bytes(*tokenizer.fingerprint().as_bytes()))
}

/// Of the configuration, as far as it decides the bits: neither where the data lie, which have their own fingerprint, nor the threads.
fn decisive(config: &Config) -> Fingerprint {
    let mut config = config.clone();
    config.data.path.clear();
    config.backend.threads = 0;
    Fingerprint::of(config.to_toml().as_bytes())
}

/// Refuses to continue a run with what it did not begin with.
fn check_identity(path: &Path, saved: &State, now: &State) -> Result<(), Error> {
    if saved.dataset == Fingerprint::of(NONE) {
        let problem = "is an imported model, which was not trained here; begin a run from it with `sparse24 train --init-from`";
        return Err(Error::file(path, problem));
    }
    let differs = [
        ("another configuration", saved.config, now.config, "undo the change in config.toml"),
        ("other data", saved.dataset, now.dataset, "restore them"),
        ("another tokenizer", saved.tokenizer, now.tokenizer, "restore it"),
    ];
    match differs.into_iter().find(|(_, saved, now, _)| saved != now) {
        None => Ok(()),
        Some((what, saved, now, advice)) => {
            let [saved, now] = [saved, now].map(|fingerprint| fingerprint.to_string()[..8].to_owned());
            let problem = format!("was saved with {what} (fingerprint {saved}) than the run has now ({now}); {advice}, or start a new run");
            Err(Error::file(path, problem))
        }
    }
}

fn snapshot(trainer: &mut Trainer, state: State) -> Result<Checkpoint, Error> {
    let mut out = Checkpoint {
        state,
        weights: Vec::new(),
        first_moments: Vec::new(),
        second_moments: Vec::new(),
        masks: Vec::new(),
        auxiliary: Vec::new(),
    };
    for parameter in trainer.parameter_states()? {
        let ParameterState { name, shape, weight, first_moment, second_moment, mask } = parameter;
        let shape = if shape[0] == 1 { vec![shape[1]] } else { shape.to_vec() };
        let tensor = |values| checkpoint::Tensor { name: name.clone(), shape: shape.clone(), values };
        out.weights.push(tensor(weight));
        out.first_moments.push(tensor(first_moment));
        out.second_moments.push(tensor(second_moment));
        out.masks.extend(mask.map(|mask| (name, mask)));
    }
    Ok(out)
}

fn restore(trainer: &mut Trainer, checkpoint: Checkpoint) -> Result<(), Error> {
    let Checkpoint { state, weights, first_moments, second_moments, mut masks, .. } = checkpoint;
    let mut first: Vec<_> = first_moments.into_iter().map(Some).collect();
    let mut second: Vec<_> = second_moments.into_iter().map(Some).collect();
    let take = |list: &mut Vec<Option<checkpoint::Tensor>>, name: &str| {
        list.iter_mut().find(|slot| slot.as_ref().is_some_and(|t| t.name == name)).and_then(Option::take).map(|t| t.values)
    };
    let states: Vec<ParameterState> = weights
        .into_iter()
        .map(|checkpoint::Tensor { name, shape, values }| {
            let missing = |what| Error::Parameter { name: name.clone(), problem: format!("its {what} is missing") };
            let first_moment = take(&mut first, &name).ok_or_else(|| missing("first moment"))?;
            let second_moment = take(&mut second, &name).ok_or_else(|| missing("second moment"))?;
            let mask = masks.iter().position(|(of, _)| *of == name).map(|at| masks.swap_remove(at).1);
            let shape = if let [rows, columns] = shape[..] { [rows, columns] } else { [1, values.len()] };
            Ok(ParameterState { name, shape, weight: values, first_moment, second_moment, mask })
        })
        .collect::<Result<_, Error>>()?;
    trainer.restore(state.step, &states)
}

/// Whether something that happens every so many steps (0 is never) happens after this one.
fn is_due(every: u32, step: u32) -> bool {
    every > 0 && step.is_multiple_of(every)
}

impl Windows for EvaluationWindows<'_> {
    fn count(&self) -> usize {
        EvaluationWindows::count(*self)
    }

    fn fill(&self, first: usize, sequences: usize, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> usize {
        EvaluationWindows::fill(*self, first, sequences, inputs, targets)
    }
}

/// The training batches of a run.
struct SeededBatches<'a> {
    dataset: &'a Dataset,
    seed: u64,
    sequences: usize,
    context: usize,
}

impl Batches for SeededBatches<'_> {
    fn fill(&self, step: u32, micro_step: u32, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
        let Self { dataset, seed, sequences, context } = *self;
        dataset.batch(Draw { seed, step, micro_step, sequences, context }, inputs, targets);
    }
}
