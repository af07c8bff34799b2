//! Reads a model from a run directory or checkpoint. Invariant: configuration, checkpoint and
//! tokenizer were saved together, whatever the run's configuration became since.

use std::{
    borrow::Cow,
    io::ErrorKind,
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use ndarray::{ArrayView2, ArrayViewMut2};
use sparse24_cpu::threshold::soft_threshold;

use super::{
    Log, MetricsLog,
    components::{RunData, check_memory, check_tensors, data_of, new_trainer, run_config},
    directory::{CHECKPOINTS, LOG, METRICS, PROVENANCE, TOKENIZER, has_config, without_config},
    identity::{config_of, of_same_data, of_tokenizer},
    metrics::Best,
    snapshot::{check_weights, ends, no_dataset, restore, scale, take_average},
};
use crate::{
    Error, Result,
    checkpoint::{self, Checkpoint, NamedTensor},
    config::Config,
    data::{Dataset, Tokenizer, is_shards},
    disk::{self, Confined, confine},
    images::{ImageSource, Images},
    task::{Examples, TaskSource},
    translation::{LENGTHS, LONGER, PairSource, Pairs},
};
use sparse24_train::{
    method::{KeptValues, Phase, WeightOperand},
    model::ModelSpec,
    trainer::{Recipe, Trainer},
};

/// A model read from a run directory or one of its checkpoints, to evaluate, sample or export.
pub struct Model {
    /// The configuration that the checkpoint was saved with.
    pub config: Config,
    /// State, weights, and masks in a sparse phase.
    pub checkpoint: Checkpoint,
    /// The run's tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
    recipe: Recipe,
    run: PathBuf,
    _confined: Confined,
}

/// A run, what confines its files, and a checkpoint.
type Located = (PathBuf, Confined, PathBuf);

impl Model {
    /// Reads the newest checkpoint of a run directory, or the checkpoint itself.
    ///
    /// # Errors
    /// [`Error::File`] if there is none, it is damaged, or the tokenizer is not the one it was
    /// saved with.
    pub fn read(path: &Path) -> Result<Self> {
        Self::lasting(|| locate(path))
    }

    /// Reads the checkpoint of a run's lowest validation loss, which `run.keep_best` keeps.
    ///
    /// # Errors
    /// [`Error::File`] for a run without evaluations or without that checkpoint; errors of
    /// [`Self::read`].
    pub fn read_best(run: &Path) -> Result<Self> {
        if !has_config(run)? {
            bail!(run, "is not a run directory; only a run has a best checkpoint");
        }
        Self::lasting(|| {
            let confined = confine(run)?;
            let mut best = Best::of(run)?;
            let metrics = run.join(METRICS);
            if disk::exists(&metrics)? {
                for metrics in MetricsLog::steps(&metrics)? {
                    best.next(&metrics?);
                }
            }
            let Some((loss, step)) = best.lowest else {
                let problem = match best.former.last() {
                    Some(step) => format!(
                        "has not been evaluated since what evaluations measure changed; the best \
                         one before that was at step {step}"
                    ),
                    None => "has no evaluation yet, so no best checkpoint".to_owned(),
                };
                return Err(Error::file(run, problem));
            };
            let Some(from) = checkpoint::named(&run.join(CHECKPOINTS), step)? else {
                bail!(
                    run,
                    "has no checkpoint of step {step}, where its validation loss was lowest \
                     ({loss:.4}); the best checkpoint is kept only while run.keep_best = true"
                );
            };
            Ok((run.to_owned(), confined, from))
        })
    }

    /// Reads a checkpoint. If a training run has removed it meanwhile, locates and reads another.
    fn lasting(locate: impl Fn() -> Result<Located>) -> Result<Self> {
        let mut tries = 0..MOST_TRIES;
        loop {
            let located = locate()?;
            let from = located.2.clone();
            let read = Self::located(located);
            if read.is_ok() || !is_gone(&from) || tries.next().is_none() {
                return read;
            }
        }
    }

    fn located((run, confined, from): Located) -> Result<Self> {
        let checkpoint = checkpoint::load(&from)?;
        let config =
            config_of(&checkpoint.state, run_config(&run)?).map_err(|error| match error {
                Error::Setting { .. } => Error::file(&from, format!("its state.json: {error}")),
                other => other,
            })?;
        let table = config.model.token_table();
        let missing = || {
            Error::file(
                &from,
                format!("has no {table}, the table of tokens or classes; name another checkpoint"),
            )
        };
        let vocabulary = checkpoint.weight(table).ok_or_else(missing)?.shape[0];
        let beside = run.join(TOKENIZER);
        let tokenizer = disk::exists(&beside)?.then(|| Tokenizer::load(&beside)).transpose()?;
        if checkpoint.state.tokenizer != of_tokenizer(tokenizer.as_ref()) {
            let what = if tokenizer.is_some() { "is not" } else { "is missing," };
            bail!(
                beside,
                "{what} the tokenizer that {} was saved with; restore it",
                from.display()
            );
        }
        if let Some(tokens) = tokenizer
            .as_ref()
            .map(Tokenizer::vocabulary)
            .filter(|&tokens| tokens as usize > vocabulary)
        {
            bail!(
                from,
                "has a {table} of {vocabulary} rows for the {tokens} tokens of its tokenizer; \
                    name another checkpoint"
            );
        }
        let recipe = config.recipe(vocabulary)?;
        Ok(Self { config, checkpoint, tokenizer, recipe, run, _confined: confined })
    }

    /// The model with the moving averages of its weights in their place, under the same masks.
    ///
    /// # Errors
    /// [`Error::File`] for a checkpoint without them.
    pub fn averaged(mut self) -> Result<Self> {
        let mut weights = std::mem::take(&mut self.checkpoint.weights);
        for weight in &mut weights {
            let average = take_average(&mut self.checkpoint, &weight.name)
                .filter(|average| average.len() == weight.values.len());
            let Some(average) = average else {
                bail!(
                    &self.run,
                    "its checkpoint holds no moving average of the weights, which \
                    optimizer.ema_decay keeps while a run trains"
                );
            };
            weight.values = average;
        }
        self.checkpoint.weights = weights;
        Ok(self)
    }

    /// The recipe of its training.
    #[must_use]
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The phase of the last step done; the first phase at step 0.
    #[must_use]
    pub fn phase(&self) -> &Phase {
        let Recipe { method, steps, .. } = &self.recipe;
        &method.phases
            [method.phase_at(self.checkpoint.state.step, *steps, &ends(&self.checkpoint.state))]
    }

    /// The weights with kept values as in the forward pass (soft-thresholded if the method does
    /// so), before masking.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a soft-thresholded weight without its scale; [`Error::Train`]
    /// for a mask that is not row-wise.
    pub fn mapped_weights(&self) -> Result<Cow<'_, [NamedTensor]>> {
        let WeightOperand::Pruned(_, KeptValues::SoftThreshold) = self.phase().forward else {
            return Ok(Cow::Borrowed(&self.checkpoint.weights));
        };
        let mut weights = self.checkpoint.weights.clone();
        for (name, mask) in &self.checkpoint.masks {
            let missing = || Error::Parameter {
                name: name.clone(),
                problem: "its scale is missing".to_owned(),
            };
            let scale = scale(&self.checkpoint, name).ok_or_else(missing)?;
            let weight = weights
                .iter_mut()
                .find(|weight| weight.name == *name)
                .expect("a mask belongs to a weight");
            let dense = std::mem::take(&mut weight.values);
            weight.values.resize(dense.len(), 0.0);
            let shape = (mask.rows(), mask.columns());
            let w =
                ArrayView2::from_shape(shape, &dense).expect("a mask has the shape of its weight");
            let out = ArrayViewMut2::from_shape(shape, &mut weight.values).expect("the same shape");
            soft_threshold(w, mask, scale, out)?;
        }
        Ok(Cow::Owned(weights))
    }

    /// The run's own data; for an imported model, those of its configuration.
    ///
    /// # Errors
    /// Errors from [`open_data`](super::open_data); [`Error::File`] for data that have
    /// changed since.
    pub fn data(&self) -> Result<RunData> {
        let trained_on = self.checkpoint.state.dataset;
        if trained_on == no_dataset() {
            if self.tokenizer.is_none() && self.config.image_source().is_none() {
                self.check_readable(Path::new(&self.config.data.path))?;
            }
            self.config.check_corpus()?;
        }
        let data = data_of(&self.run, &self.config, Some(&self.checkpoint.state))?;
        if trained_on == of_same_data(&data, trained_on)? || trained_on == no_dataset() {
            return Ok(data);
        }
        Err(Error::file(
            data.source(),
            "does not hold the data that the run was trained on; restore it, or name the data to \
                evaluate on",
        ))
    }

    /// Other data than the run's own, read with its tokenizer; without one, prepared shards.
    ///
    /// # Errors
    /// Errors from the data; [`Error::File`] for text that no tokenizer can read, and for ids
    /// beyond the model's vocabulary.
    pub fn other_data(&self, path: &Path) -> Result<RunData> {
        if let (Some(source), Some(tokenizer)) = (self.config.task_source()?, &self.tokenizer) {
            let source = TaskSource { folder: path.to_owned(), ..source };
            return Ok(Examples::open_validation(source, tokenizer)?.into());
        }
        if let Some(source) = self.config.image_source() {
            return Ok(Images::open(ImageSource { folder: path.to_owned(), ..source })?.into());
        }
        if let (Some(source), Some(tokenizer)) = (self.config.pair_source(), &self.tokenizer) {
            let source = PairSource { folder: path.to_owned(), ..source };
            return Ok(Pairs::open_validation(source, tokenizer)?.into());
        }
        let dataset = match &self.tokenizer {
            Some(tokenizer) => {
                Dataset::open_with(path, tokenizer.clone(), self.config.data.validation_share)?
            }
            None => {
                self.check_readable(path)?;
                Dataset::open(Some(path), None, self.config.data.validation_share)?
            }
        };
        dataset.check_held_out()?;
        Ok(dataset.into())
    }

    /// Refuses text, which needs a tokenizer. A path that does not exist is not an error here.
    fn check_readable(&self, path: &Path) -> Result {
        if self.config.pair_source().is_some() {
            bail!(&self.run, "has no dictionary, which sentence pairs need");
        }
        if path.as_os_str().is_empty() {
            bail!(
                setting = "data.path",
                "the embedded corpus is text, which this model has no tokenizer for; name \
                    prepared shards"
            );
        }
        if path.exists() && !is_shards(path) {
            bail!(
                path,
                "is text, which this model has no tokenizer for; expected a folder of \
                prepared shards (train.bin and val.bin)"
            );
        }
        Ok(())
    }

    /// Limits a Transformer's sequence length to that of sentences of at most `longest` tokens and
    /// their translations. Its positional encodings are computed, so no tensor bounds the length in
    /// a checkpoint's settings.
    #[must_use]
    pub fn for_sentences(mut self, longest: usize) -> Self {
        if let ModelSpec::Transformer(_) = self.recipe.model {
            let needed = (longest + LONGER).next_multiple_of(LENGTHS).max(BUSY_TOKENS);
            let most = &mut self.config.model.sequence_length;
            *most = needed.min(*most);
        }
        self
    }

    /// Loads the model on its device, to evaluate or sample as many sequences at a time as fit.
    ///
    /// # Errors
    /// [`Error::File`] for a checkpoint of another model than the configuration's; errors from the
    /// backend.
    pub fn into_trainer(self) -> Result<Trainer> {
        let Self { mut config, checkpoint, recipe, run, .. } = self;
        config.batch.size = evaluated_at_once(&config);
        config.batch.replicas = NonZeroU32::MIN;
        let unfit = |error| match error {
            Error::Parameter { .. } => Error::file(
                &run,
                format!("its checkpoint is not one of its configuration: {error}"),
            ),
            other => other,
        };
        check_weights(&recipe.model, &checkpoint.weights, |_| false).map_err(unfit)?;
        let vocabulary = recipe.model.vocabulary();
        let fits = |config: &Config| {
            let recipe = config.recipe(vocabulary)?;
            check_tensors(config, &recipe)?;
            check_memory(config, &recipe, 1)
        };
        while config.batch.size > 1 && matches!(fits(&config), Err(Error::Setting { .. })) {
            config.batch.size /= 2;
        }
        let mut trainer = new_trainer(&config, vocabulary)?;
        restore(&mut trainer, checkpoint).map_err(unfit)?;
        Ok(trainer)
    }
}

/// Tokens that keep a CPU busy; more at once would only cost memory.
const BUSY_TOKENS: usize = 1024;

/// Batch size of evaluations, during and after training: the loss is summed in these parts, and its
/// bits depend on them.
pub(super) fn evaluated_at_once(config: &Config) -> usize {
    match config.backend.name.as_str() {
        "cpu" => (BUSY_TOKENS / config.model.sequence_length).clamp(1, config.batch.size),
        _ => config.batch.size,
    }
}

/// Attempts to read a checkpoint while a run removes checkpoints; a moved run has none at its path.
const MOST_TRIES: usize = 100;

/// Whether a checkpoint no longer exists, as when a training run removes it. A dangling link still
/// exists.
fn is_gone(checkpoint: &Path) -> bool {
    checkpoint.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// The run directory and the checkpoint that a path refers to.
///
/// # Errors
/// [`Error::File`] if the path is neither, or no checkpoint verifies.
fn locate(path: &Path) -> Result<Located> {
    if checkpoint::step_of(path).is_some() {
        let absolute = std::path::absolute(path).map_err(|e| Error::io("find", path, e))?;
        let run = absolute.ancestors().nth(2).unwrap_or(&absolute);
        return match has_config(run)?.then_some(run) {
            Some(run) if path.is_dir() => Ok((run.to_owned(), confine(run)?, absolute.clone())),
            Some(_) => Err(Error::file(path, "does not exist, expected a checkpoint of the run")),
            None => Err(Error::file(
                path,
                "is not in a run directory, expected RUN/checkpoints/step-NNNNNNNN",
            )),
        };
    }
    if !has_config(path)? {
        if path.join(PROVENANCE).is_file() {
            return Err(without_config(path));
        }
        bail!(
            path,
            "is neither a run directory, which holds a config.toml, nor a checkpoint of one"
        );
    }
    let confined = confine(path)?;
    let mut tries = 0..MOST_TRIES;
    let latest = loop {
        let latest = checkpoint::latest(&path.join(CHECKPOINTS))?;
        let is_refused = latest.refused.iter().any(|(refused, _)| is_gone(refused));
        if !is_refused || tries.next().is_none() {
            break latest;
        }
    };
    match (latest.checkpoint, latest.refused.into_iter().next()) {
        (Some(checkpoint), None) => Ok((path.to_owned(), confined, checkpoint)),
        (intact, Some((refused, error))) => {
            let advice = intact.map_or_else(
                || "it has no other that is intact".to_owned(),
                |intact| format!("name an older one, such as {}", intact.display()),
            );
            let refused = refused.display();
            let problem = format!("its newest checkpoint {refused} is damaged ({error}); {advice}");
            Err(Error::file(path, problem))
        }
        (None, None) => {
            let problem = match Log::reports_save(&path.join(LOG)) {
                true => {
                    "the checkpoints listed in log.txt were not kept (`--keep results`) or are \
                    lost; restore checkpoints/, or train the run again"
                }
                false => "has no checkpoint yet",
            };
            Err(Error::file(path, problem))
        }
    }
}
