//! Builds the parts of a run from its configuration: dataset, backend, trainer and batches. Nothing
//! is written.

use std::path::Path;

use super::directory::CONFIG;
use crate::{
    Error,
    config::Config,
    data::{Dataset, Draw, EvaluationWindows},
    machine,
};
use sparse24_train::{
    backend::{Backend, Placement},
    estimate::estimate,
    nn::BatchShape,
    objective::{Batch, Evaluation, Objective},
    trainer::Trainer,
};

/// Reads the configuration of a run directory.
///
/// # Errors
/// [`Error::File`] for a directory without a run or a damaged configuration; [`Error::Io`].
pub fn run_config(run: &Path) -> Result<Config, Error> {
    let config = |run: &Path| Some(run.join(CONFIG)).filter(|path| path.is_file());
    if let Some(path) = config(run) {
        return Config::read(&path);
    }
    // A checkpoint, or the folder of them.
    let around = run
        .ancestors()
        .skip(1)
        .take(2)
        .find(|path| !path.as_os_str().is_empty() && config(path).is_some());
    let advice = around
        .map(|around| format!("; it lies in a run, name {}", around.display()))
        .unwrap_or_default();
    Err(Error::file(run, format!("is not a run directory: it holds no {CONFIG}{advice}")))
}

/// Opens the dataset of a configuration.
///
/// # Errors
/// Errors from the data; [`Error::File`] for a corpus shorter than a sequence.
pub fn open_dataset(config: &Config) -> Result<Dataset, Error> {
    let path = (!config.data.path.is_empty()).then(|| Path::new(&config.data.path));
    let dataset = Dataset::open(path, Some(config.data.tokenizer), config.data.validation_share)?;
    dataset.check_context(config.model.sequence_length)?;
    Ok(dataset)
}

/// A trainer at step 0, if this machine has enough memory.
pub(super) fn new_trainer(config: &Config, vocabulary: usize) -> Result<Trainer, Error> {
    let recipe = config.recipe(vocabulary)?;
    let backend = config.backend_entry()?;
    let needed = match backend.placement {
        Placement::Host => estimate(&recipe, backend)?.device_bytes(),
        Placement::Device => 0,
    };
    if let Some(there) =
        machine::memory().map(|memory| memory.total).filter(|&there| needed > there)
    {
        let [needed, there] = [needed, there].map(|bytes| bytes >> 20);
        let problem = format!(
            "needs {needed} MiB of memory, this machine has {there}; lower it or batch.size"
        );
        return Err(Error::setting("model", problem));
    }
    Ok(Trainer::new(open_backend(config)?, recipe)?)
}

/// Opens the backend of the configuration.
pub(super) fn open_backend(config: &Config) -> Result<Box<dyn Backend>, Error> {
    Ok((config.backend_entry()?.open)(config.backend.settings())?)
}

/// Next-token prediction on windows of a dataset.
#[derive(Debug, Clone, Copy)]
pub struct CausalLm<'a> {
    /// The data.
    pub dataset: &'a Dataset,
    /// Seed of the run.
    pub seed: u64,
    /// Shape of a micro-batch.
    pub shape: BatchShape,
}

impl Objective for CausalLm<'_> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) {
        let BatchShape { size: sequences, sequence_length: context } = self.shape;
        let draw = Draw { seed: self.seed, step, micro_step, sequences, context };
        batch.clear();
        self.dataset.batch(draw, &mut batch.tokens, &mut batch.targets);
        batch.counted = batch.targets.len();
    }
}

impl Evaluation for EvaluationWindows<'_> {
    fn sequences(&self) -> usize {
        EvaluationWindows::count(*self)
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) {
        batch.clear();
        let Batch { tokens, targets, .. } = batch;
        batch.counted = EvaluationWindows::fill(*self, first, shape.size, tokens, targets);
    }
}
