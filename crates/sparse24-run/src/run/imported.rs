//! Saves given weights as a run directory that was not trained. The directory is complete or not
//! created.

use std::path::{Path, PathBuf};

use super::{
    Initial, Provenance, RunDirectory, components::open_backend, identity::of_tokenizer,
    snapshot::no_dataset,
};
use crate::{
    Error, Result,
    checkpoint::{self, Checkpoint, NamedTensor, State},
    config::Config,
    data::Tokenizer,
    interchange::shapes,
};

/// Saves weights as a run at step 0 with a dense method, to be evaluated, sampled, exported or used
/// as initial weights; returns the path of its checkpoint.
///
/// # Errors
/// [`Error::Parameter`] names the first weight whose name or shape is not that of the model's next
/// parameter; [`Error::Setting`] for a method that does not start dense; errors from the directory.
/// Nothing is left behind.
pub fn save_imported(
    config: &Config,
    weights: Vec<NamedTensor>,
    tokenizer: Option<&Tokenizer>,
    directory: &Path,
) -> Result<PathBuf> {
    config.check()?;
    let vocabulary = weights
        .iter()
        .find(|tensor| tensor.name == config.model.token_table())
        .map_or(0, |tensor| tensor.values.len() / config.model.d_model);
    let recipe = config.recipe(vocabulary)?;
    let first = &recipe.method.phases[0];
    if first.mask().is_some() {
        bail!(
            setting = "method.name",
            "expected a method that starts dense: given weights have no masks"
        );
    }
    let expected = shapes(&recipe.model)?;
    let found: Vec<_> = weights.iter().map(|t| (t.name.clone(), t.shape.clone())).collect();
    if found != expected {
        let odd = found.iter().zip(&expected).find(|(found, expected)| found != expected);
        let name = odd.map_or_else(
            || format!("parameter {}", found.len().min(expected.len())),
            |((name, _), _)| name.clone(),
        );
        let problem = "is not the model's next parameter, or has another shape".to_owned();
        return Err(Error::Parameter { name, problem });
    }
    weights.iter().try_for_each(NamedTensor::check)?;
    let state = State {
        step: 0,
        total_steps: config.steps,
        phase: 0,
        phase_kind: first.kind(),
        seed: config.seed,
        tokens_seen: 0,
        skipped_steps: 0,
        phase_ends: Vec::new(),
        plan: Default::default(),
        config: config.decisive(),
        dataset: no_dataset(),
        tokenizer: of_tokenizer(tokenizer),
    };
    let has_v = recipe.optimizer.rule.adam().is_some();
    let zeros: Vec<_> = weights
        .iter()
        .map(|tensor| NamedTensor { values: vec![0.0; tensor.values.len()], ..tensor.clone() })
        .collect();
    let checkpoint = Checkpoint {
        state,
        weights,
        first_moments: zeros.clone(),
        second_moments: if has_v { zeros } else { Vec::new() },
        masks: Vec::new(),
        auxiliary: Vec::new(),
    };
    let device = open_backend(config)?.device();
    let (_, saved) = RunDirectory::filled(directory, |directory| {
        if let Some(tokenizer) = tokenizer {
            tokenizer.save(&directory.tokenizer())?;
        }
        let saved = checkpoint::save(&directory.checkpoints(), &checkpoint)?;
        Provenance::of_start(&device, Initial::Given).record(&directory.provenance())?;
        directory.write(&directory.config(), config.to_toml().as_bytes())?;
        Ok(saved)
    })?;
    Ok(saved)
}
