//! Weights and configurations of Hugging Face's GPT-2, starting from an export.
//!
//! An import returns the requested tensors in their shapes, all values finite.

use std::{fs, path::PathBuf};

use sparse24_core::op::Activation;
use sparse24_run::{
    checkpoint::NamedTensor,
    interchange::{Dtype, Gpt2Config, Values, export, import},
};
use sparse24_train::nn::Bias;

use super::{document::Document, file, files, path, read, refused, tensors};

/// Small enough for a fuzzer to hit.
const TINY: Gpt2Config = Gpt2Config {
    n_layer: 1,
    n_head: 1,
    n_embd: 2,
    n_positions: 2,
    vocab_size: 3,
    n_inner: 4,
    activation: Activation::Gelu,
};

/// A folder with an export of this type.
fn exported(dtype: Dtype) -> PathBuf {
    let folder = path(&format!("exported-{dtype:?}"));
    if !folder.exists() {
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let values = vec![0.5; shape.iter().product()];
            NamedTensor { name, shape, values }
        };
        let weights: Vec<_> = TINY.parameters(Bias::Present).into_iter().map(tensor).collect();
        export(&folder, &weights, &TINY, None, dtype, Values::Dense).unwrap();
    }
    folder
}

pub(super) fn weights(bytes: &[u8]) -> bool {
    let path = file("model.safetensors", bytes);
    let imported = [Bias::Absent, Bias::Present].map(|bias| {
        let expected = TINY.parameters(bias);
        let found = match import(&path, &expected) {
            Ok(found) => found,
            Err(error) => return refused(&error, "model.safetensors"),
        };
        let shapes = found.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone()));
        assert!(shapes.eq(expected));
        for NamedTensor { name, shape, values } in &found {
            assert_eq!(values.len(), shape.iter().product::<usize>());
            assert!(values.iter().all(|value| value.is_finite()), "{name}");
        }
        true
    });
    imported.contains(&true)
}

pub(super) fn weights_seeds() -> Vec<Vec<u8>> {
    let sound = [Dtype::F32, Dtype::F16, Dtype::Bf16]
        .map(|dtype| read(exported(dtype).join("model.safetensors")));
    let mut seeds = sound.to_vec();
    let (header, data) = tensors::split(&sound[0]);
    // Other exporters leave the prefix out.
    seeds.push(tensors::file(&header.replace("transformer.", ""), data));
    seeds.extend(tensors::attacks());
    seeds
}

pub(super) fn weights_variants() -> Vec<Vec<u8>> {
    tensors::variants(&read(exported(Dtype::F32).join("model.safetensors")))
}

pub(super) fn config(bytes: &[u8]) -> bool {
    let path = file("hf/config.json", bytes);
    let config = match Gpt2Config::read(path.parent().expect("a folder")) {
        Ok(config) => config,
        Err(error) => return refused(&error, "config.json"),
    };
    let parameters = config.parameters(Bias::Present);
    assert!(parameters.len() > 4 * config.n_layer);
    let elements = |shape: &[usize]| shape.iter().map(|&length| length as u128).product::<u128>();
    let total: u128 = parameters.iter().map(|(_, shape)| elements(shape)).sum();
    assert!(total >= config.n_embd as u128);
    true
}

fn sound_config() -> String {
    fs::read_to_string(exported(Dtype::F32).join("config.json")).expect("an export has one")
}

pub(super) fn config_seeds() -> Vec<Vec<u8>> {
    let more = sound_config().replacen('{', "{\"task_specific_params\":{\"a\":{\"b\":1}},", 1);
    let minimal = "{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":4,\"n_embd\":32,\
        \"n_positions\":64,\"vocab_size\":256}";
    let mut seeds = files(&[&sound_config(), &more, minimal, "{\"model_type\":\"gpt2\"}"]);
    for (from, to) in [("32", "33"), ("\"n_layer\":2", "\"n_layer\":4097"), ("64", "16777217")] {
        seeds.push(minimal.replacen(from, to, 1).into_bytes());
    }
    seeds
}

pub(super) fn config_variants() -> Vec<Vec<u8>> {
    let words =
        ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "gpt2", "gpt_neo"];
    Document::json(&sound_config(), &words).variants(String::into_bytes)
}
