//! Weights from elsewhere: those of a run, a checkpoint or a Hugging Face GPT-2.

use std::path::Path;

use sparse24_train::{
    checkpoint::Tensor,
    config::Config,
    interchange::{self, Gpt2Config},
    nn::linear24::Bias,
    session,
};

use crate::failure::Failure;

/// The weights that a run of this configuration begins with, linear layers `[out, in]`.
pub(crate) fn read(path: &Path, config: &Config) -> Result<Vec<Tensor>, Failure> {
    if is_run(path) {
        return Ok(session::load(path)?.weights()?);
    }
    let vocabulary = session::open_dataset(config)?.vocabulary() as usize;
    let bias = if config.model.bias { Bias::Present } else { Bias::Absent };
    Ok(interchange::import(path, &shape(config, vocabulary).parameters(bias))?)
}

/// A Hugging Face GPT-2 with the shape that its `config.json` says, and whether any of its biases is not zero.
pub(crate) fn read_gpt2(path: &Path) -> Result<(Gpt2Config, Vec<Tensor>, Bias), Failure> {
    let shape = Gpt2Config::read(path)?;
    let mut weights = interchange::import(path, &shape.parameters(Bias::Present))?;
    let is_bias = |tensor: &Tensor| tensor.name.ends_with(".bias");
    if weights.iter().filter(|tensor| is_bias(tensor)).any(|tensor| tensor.values.iter().any(|&value| value != 0.0)) {
        return Ok((shape, weights, Bias::Present));
    }
    weights.retain(|tensor| !is_bias(tensor));
    Ok((shape, weights, Bias::Absent))
}

/// The shape of a configuration's model, as Hugging Face says it.
pub(crate) fn shape(config: &Config, vocabulary: usize) -> Gpt2Config {
    let model = &config.model;
    Gpt2Config {
        n_layer: model.layers,
        n_head: model.heads,
        n_embd: model.width,
        n_positions: model.context,
        vocab_size: vocabulary,
        n_inner: model.ffn_width,
    }
}

fn is_run(path: &Path) -> bool {
    path.join("config.toml").exists() || path.join("manifest.json").exists()
}
