//! Reads initial weights from a run, a checkpoint or a Hugging Face GPT-2.

use std::path::Path;

use sparse24_run::{
    checkpoint::NamedTensor,
    config::Config,
    interchange::{self, Gpt2Config, shapes},
    run::Model,
};
use sparse24_train::nn::Bias;

use crate::failure::Failure;

/// The initial weights of a run with this configuration and vocabulary; linear layers are
/// `[out, in]`.
pub(crate) fn read(
    path: &Path,
    config: &Config,
    vocabulary: usize,
) -> Result<Vec<NamedTensor>, Failure> {
    if ["config.toml", "manifest.json"].iter().any(|file| path.join(file).exists()) {
        return Ok(Model::read(path)?.checkpoint.weights);
    }
    let model = config.recipe(vocabulary)?.model;
    Ok(interchange::import(path, &shapes(&model)?)?)
}

/// A Hugging Face GPT-2 with the shape in its `config.json`; biases that are all zero are dropped.
pub(crate) fn read_gpt2(path: &Path) -> Result<(Gpt2Config, Vec<NamedTensor>, Bias), Failure> {
    let shape = Gpt2Config::read(path)?;
    let mut weights = interchange::import(path, &shape.parameters(Bias::Present))?;
    let is_bias = |tensor: &NamedTensor| tensor.name.ends_with(".bias");
    let is_zero = |tensor: &NamedTensor| tensor.values.iter().all(|&value| value == 0.0);
    if !weights.iter().all(|tensor| !is_bias(tensor) || is_zero(tensor)) {
        return Ok((shape, weights, Bias::Present));
    }
    weights.retain(|tensor| !is_bias(tensor));
    Ok((shape, weights, Bias::Absent))
}
