//! What a configuration asks for: its data and its trainer.
//!
//! Invariant: nothing is written. Deliberately absent: run directories, but for the configuration
//! in one.

use std::path::Path;

use crate::{
    Error,
    config::Config,
    data::{Dataset, Draw, EvaluationWindows},
    machine,
};
use sparse24_train::{
    backend::{Backend, Memory},
    estimate::estimate,
    trainer::{Batches, Trainer, Windows},
};

/// The configuration of a run directory.
///
/// # Errors
/// [`Error::File`] for a directory that holds no run or a damaged configuration; [`Error::Io`].
pub fn run_config(run: &Path) -> Result<Config, Error> {
    let config = |run: &Path| Some(run.join("config.toml")).filter(|path| path.is_file());
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
    Err(Error::file(run, format!("is no run directory: it holds no config.toml{advice}")))
}

/// The dataset of a configuration, long enough for its context.
///
/// # Errors
/// Those of the data; a corpus shorter than a context is refused.
pub fn open_dataset(config: &Config) -> Result<Dataset, Error> {
    let path = (!config.data.path.is_empty()).then(|| Path::new(&config.data.path));
    let dataset = Dataset::open(path, Some(config.data.tokenizer), config.data.validation_share)?;
    dataset.check_context(config.model.sequence_length)?;
    Ok(dataset)
}

/// A trainer at step 0, if this machine has the memory for it.
pub(super) fn new_trainer(config: &Config, vocabulary: usize) -> Result<Trainer, Error> {
    let recipe = config.recipe(vocabulary)?;
    let needed = match config.backend_entry()?.memory {
        Memory::Host => estimate(&recipe).device_bytes(),
        Memory::Device => 0,
    };
    if let Some(there) =
        machine::memory().map(|memory| memory.total).filter(|&there| needed > there)
    {
        let [needed, there] = [needed, there].map(|bytes| bytes >> 20);
        let problem = format!(
            "needs {needed} MiB of memory, this machine has {there}; make it or batch.size smaller"
        );
        return Err(Error::setting("model", problem));
    }
    Ok(Trainer::new(open_backend(config)?, recipe)?)
}

/// The device that the configuration names.
pub(super) fn open_backend(config: &Config) -> Result<Box<dyn Backend>, Error> {
    Ok((config.backend_entry()?.open)(config.backend.settings())?)
}

/// The training batches of a run.
pub(super) struct SeededBatches<'a> {
    pub(super) dataset: &'a Dataset,
    pub(super) seed: u64,
    pub(super) sequences: usize,
    pub(super) context: usize,
}

impl Batches for SeededBatches<'_> {
    fn fill(&self, step: u32, micro_step: u32, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
        let Self { dataset, seed, sequences, context } = *self;
        dataset.batch(Draw { seed, step, micro_step, sequences, context }, inputs, targets);
    }
}

impl Windows for EvaluationWindows<'_> {
    fn count(&self) -> usize {
        EvaluationWindows::count(*self)
    }

    fn fill(
        &self,
        first: usize,
        sequences: usize,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> usize {
        EvaluationWindows::fill(*self, first, sequences, inputs, targets)
    }
}
