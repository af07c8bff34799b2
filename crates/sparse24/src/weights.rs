//! Weights to begin from: those of a run, a checkpoint or a Hugging Face GPT-2.

use std::path::Path;

use sparse24_train::session;

use crate::failure::Failure;

/// Named weights, `[out, in]`.
pub(crate) fn read(path: &Path) -> Result<Vec<(String, Vec<f32>)>, Failure> {
    let mut loaded = session::load(path)?;
    Ok(loaded.trainer.parameter_states()?.into_iter().map(|state| (state.name, state.weight)).collect())
}
