//! Models that are not being trained: read from a run or a checkpoint, or adopted from elsewhere.

use std::path::{Path, PathBuf};

use sparse24_core::Mask;

use super::{
    NONE, borrowed, dataset_fingerprint, decisive, new_trainer, open_dataset, restore, run_config, snapshot, tokenizer_fingerprint,
};
use crate::{
    Error,
    checkpoint::{self, Fingerprint, State},
    config::Config,
    data::{Dataset, Tokenizer},
    run::RunDirectory,
    trainer::Trainer,
};

/// A model read from a run directory or one of its checkpoints, to evaluate, sample or export.
pub struct Loaded {
    /// The run's configuration.
    pub config: Config,
    /// Where the run stood.
    pub state: State,
    /// At that step.
    pub trainer: Trainer,
    /// The run's tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
}

impl Loaded {
    /// The run's own data; those of its configuration for an imported model, which was trained on none.
    ///
    /// # Errors
    /// Those of [`open_dataset`]; [`Error::File`] for data that have changed since.
    pub fn dataset(&self) -> Result<Dataset, Error> {
        let dataset = open_dataset(&self.config)?;
        if self.state.dataset == dataset_fingerprint(&dataset) || self.state.dataset == Fingerprint::of(NONE) {
            return Ok(dataset);
        }
        Err(Error::file(dataset.source(), "holds other data than the run was trained on; restore them, or name the data to evaluate on"))
    }

    /// The weights, not pruned, linear layers `[out, in]`.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn weights(&mut self) -> Result<Vec<checkpoint::Tensor>, Error> {
        Ok(snapshot(&mut self.trainer, self.state.clone())?.weights)
    }

    /// The masks of a sparse phase, under the names of the weights.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn masks(&mut self) -> Result<Vec<(String, Mask)>, Error> {
        Ok(snapshot(&mut self.trainer, self.state.clone())?.masks)
    }
}

/// Reads the newest checkpoint of a run directory, or the checkpoint itself.
///
/// # Errors
/// [`Error::File`] if there is none, it is damaged, or the configuration has been edited since.
pub fn load(path: &Path) -> Result<Loaded, Error> {
    let (run, from) = locate(path)?;
    let config = run_config(&run)?;
    let checkpoint = checkpoint::load(&from)?;
    if checkpoint.state.config != decisive(&config) {
        let problem = format!("is not the configuration that {} was saved with; undo the change", from.display());
        return Err(Error::file(run.join("config.toml"), problem));
    }
    let embedding = checkpoint.weight("wte.weight").ok_or_else(|| Error::file(path, "its model has no wte.weight"))?;
    let mut trainer = new_trainer(&config, embedding.shape[0])?;
    let tokenizer = run.join("tokenizer.json");
    let tokenizer = tokenizer.exists().then(|| Tokenizer::load(&tokenizer)).transpose()?;
    let state = checkpoint.state.clone();
    restore(&mut trainer, checkpoint)?;
    Ok(Loaded { config, state, trainer, tokenizer })
}

/// The run directory and the checkpoint that a path means.
///
/// # Errors
/// [`Error::File`] if the path is neither, or no checkpoint verifies.
pub fn locate(path: &Path) -> Result<(PathBuf, PathBuf), Error> {
    if checkpoint::step_of(path).is_some() {
        let absolute = std::path::absolute(path).map_err(|e| Error::io("find", path, e))?;
        let run = absolute.ancestors().nth(2).filter(|run| run.join("config.toml").is_file());
        return match run {
            Some(run) if path.is_dir() => Ok((run.to_owned(), path.to_owned())),
            Some(_) => Err(Error::file(path, "does not exist, expected a checkpoint of the run")),
            None => Err(Error::file(path, "lies in no run directory, expected RUN/checkpoints/step-NNNNNNNN")),
        };
    }
    if !path.join("config.toml").is_file() {
        return Err(Error::file(path, "is neither a run directory, which holds a config.toml, nor a checkpoint of one"));
    }
    let latest = checkpoint::latest(&path.join("checkpoints"))?;
    match (latest.checkpoint, latest.refused.into_iter().next()) {
        (Some(checkpoint), None) => Ok((path.to_owned(), checkpoint)),
        (_, Some((refused, error))) => {
            Err(Error::file(path, format!("its newest checkpoint {} is damaged ({error}); name an older one", refused.display())))
        }
        (None, None) => Err(Error::file(path, "has no checkpoint yet")),
    }
}

/// Saves an untrained run whose weights come from elsewhere: step 0, dense, ready to be evaluated, sampled, exported or trained from.
///
/// # Errors
/// Those of the configuration and the directory.
pub fn adopt(config: &Config, weights: &[checkpoint::Tensor], tokenizer: Option<&Tokenizer>, directory: &Path) -> Result<PathBuf, Error> {
    let embedding = weights.iter().find(|tensor| tensor.name == "wte.weight").map_or(0, |tensor| tensor.values.len());
    let mut trainer = new_trainer(config, embedding / config.model.width)?;
    trainer.start_from(&borrowed(weights))?;
    let state = State {
        step: 0,
        total_steps: config.steps,
        phase: 0,
        phase_kind: trainer.phase().kind(),
        seed: config.seed,
        tokens_seen: 0,
        method: Default::default(),
        plan: Default::default(),
        config: decisive(config),
        dataset: Fingerprint::of(NONE),
        tokenizer: tokenizer_fingerprint(tokenizer),
    };
    let checkpoint = snapshot(&mut trainer, state)?;
    let directory = RunDirectory::create(directory)?;
    directory.write(&directory.config(), config.to_toml().as_bytes())?;
    if let Some(tokenizer) = tokenizer {
        tokenizer.save(&directory.tokenizer())?;
    }
    checkpoint::save(&directory.checkpoints(), &checkpoint)
}
