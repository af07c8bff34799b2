//! What a run is: the hashes that a resume, or a reader of its model, must find unchanged.
//!
//! Invariant: equal identities end in equal bits. What decides none is left out: where the data lie, threads, the number of the GPU, the name of the preset, and
//! which checkpoints are made and kept. Deliberately absent: tensors.

use std::path::Path;

use crate::{
    Error,
    checkpoint::{Fingerprint, State},
    config::Config,
    data::{Dataset, Tokenizer},
    trainer::Trainer,
};

/// What stands for data or a tokenizer where there is none.
const NONE: &[u8] = &[];

/// The hash of no data, and of no tokenizer.
pub(super) fn none() -> Fingerprint {
    Fingerprint::of(NONE)
}

/// Where a run stands and what it is.
pub(super) fn identity(config: &Config, dataset: &Dataset, trainer: &Trainer) -> State {
    State {
        step: trainer.step(),
        total_steps: config.steps,
        phase: trainer.recipe().method.phase_at(trainer.step(), config.steps) as u32,
        phase_kind: trainer.phase().kind(),
        seed: config.seed,
        tokens_seen: trainer.recipe().tokens_per_step() * u64::from(trainer.step()),
        method: Default::default(),
        plan: trainer.backend().plans(),
        config: decisive(config),
        dataset: of_dataset(dataset),
        tokenizer: of_tokenizer(dataset.tokenizer()),
    }
}

pub(super) fn of_dataset(dataset: &Dataset) -> Fingerprint {
    Fingerprint::from_bytes(*dataset.fingerprint().as_bytes())
}

pub(super) fn of_tokenizer(tokenizer: Option<&Tokenizer>) -> Fingerprint {
    tokenizer.map_or_else(none, |tokenizer| Fingerprint::from_bytes(*tokenizer.fingerprint().as_bytes()))
}

/// Of the configuration, as far as it decides the bits of a model or of the metrics.
pub(super) fn decisive(config: &Config) -> Fingerprint {
    let mut config = config.clone();
    config.preset.clear();
    config.data.path.clear();
    config.run.checkpoint_every = 0;
    config.run.keep_last = 0;
    config.backend.threads = 0;
    config.backend.gpu = 0;
    Fingerprint::of(config.to_toml().as_bytes())
}

/// Refuses to continue a run with what it did not begin with.
pub(super) fn check(path: &Path, saved: &State, now: &State) -> Result<(), Error> {
    if saved.dataset == none() {
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
