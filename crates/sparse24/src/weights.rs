//! Weights from elsewhere: those of a run, a checkpoint or a Hugging Face GPT-2.

use std::path::Path;

use sparse24_run::{
    checkpoint::NamedTensor,
    config::Config,
    interchange::{self, Gpt2Config, shapes},
    run::Model,
};
use sparse24_train::nn::Bias;

use crate::failure::Failure;

/// The weights that a run of this configuration and vocabulary begins with, linear layers
/// `[out, in]`.
pub(crate) fn read(
    path: &Path,
    config: &Config,
    vocabulary: usize,
) -> Result<Vec<NamedTensor>, Failure> {
    if is_run(path) {
        return Ok(Model::read(path)?.checkpoint.weights);
    }
    let model = config.recipe(vocabulary)?.model;
    Ok(interchange::import(path, &shapes(&model)?)?)
}

/// A Hugging Face GPT-2 with the shape that its `config.json` says, and whether any of its biases
/// is not zero.
pub(crate) fn read_gpt2(path: &Path) -> Result<(Gpt2Config, Vec<NamedTensor>, Bias), Failure> {
    let shape = Gpt2Config::read(path)?;
    let mut weights = interchange::import(path, &shape.parameters(Bias::Present))?;
    let is_bias = |tensor: &NamedTensor| tensor.name.ends_with(".bias");
    if weights
        .iter()
        .filter(|tensor| is_bias(tensor))
        .any(|tensor| tensor.values.iter().any(|&value| value != 0.0))
    {
        return Ok((shape, weights, Bias::Present));
    }
    weights.retain(|tensor| !is_bias(tensor));
    Ok((shape, weights, Bias::Absent))
}

fn is_run(path: &Path) -> bool {
    path.join("config.toml").exists() || path.join("manifest.json").exists()
}
