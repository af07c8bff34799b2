//! Weights and configurations of Hugging Face's GPT-2, BERT and FSMT, starting from exports.
//!
//! An import returns the requested tensors in their shapes, all values finite.

use std::{fs, path::PathBuf};

use sparse24_core::op::Activation;
use sparse24_run::{
    checkpoint::NamedTensor,
    interchange::{Description, Dtype, FolderModel, Format, Values, export, import, shapes},
};
use sparse24_train::{
    model::{Gpt2Spec, ModelSpec, Sparsify},
    nn::{Bias, Prediction},
};

use super::{Files, document::Document, file, files, path, read, refused, tensors};
use crate::{bert, transformer};

/// Small enough for a fuzzer to hit.
const TINY: Gpt2Spec = Gpt2Spec {
    layers: 1,
    heads: 1,
    d_model: 4,
    d_ff: 4,
    sequence_length: 2,
    vocabulary: 3,
    activation: Activation::Gelu,
    bias: Bias::Present,
    sparsify: Sparsify::Ffn,
    prediction: None,
};

/// A model of each format.
fn models() -> [ModelSpec; 3] {
    [ModelSpec::Gpt2(TINY), bert(TINY), transformer(TINY)]
}

/// A folder with an export of this type.
fn exported(spec: &ModelSpec, dtype: Dtype) -> PathBuf {
    let format = Format::of(spec).expect("an export has a format").name;
    let folder = path(&format!("exported-{format}-{dtype:?}-{:?}", spec.prediction()));
    if !folder.exists() {
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let values = vec![0.5; shape.iter().product()];
            NamedTensor { name, shape, values }
        };
        let weights: Vec<_> = shapes(spec).unwrap().into_iter().map(tensor).collect();
        let description = Description { spec, tokenizer: None, labels: &[], languages: [""; 2] };
        export(&folder, &weights, description, dtype, Values::Dense).unwrap();
    }
    folder
}

pub(super) fn weights(bytes: &[u8]) -> bool {
    let path = file("model.safetensors", bytes);
    let [gpt2, bert, fsmt] = models();
    let unbiased = ModelSpec::Gpt2(Gpt2Spec { bias: Bias::Absent, ..TINY });
    let [classifier, answering] = [Prediction::Class(2), Prediction::Span]
        .map(|prediction| bert.clone().predicting(Some(prediction)));
    let imported = [unbiased, gpt2, bert, classifier, answering, fsmt].map(|model| {
        let expected = shapes(&model).unwrap();
        let format = Format::of(&model).expect("an export has a format");
        let found = match import(&path, format, &expected) {
            Ok(found) => found.weights,
            Err(error) => return refused(&error, "model.safetensors"),
        };
        let has_pooler = found.iter().any(|tensor| tensor.name.starts_with("pooler."));
        let expected =
            expected.into_iter().filter(|(name, _)| has_pooler || !name.starts_with("pooler."));
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

pub(super) fn weights_seeds() -> Files {
    let mut seeds = Vec::new();
    for (model, prefix) in models().iter().zip(["transformer.", "bert.", "model."]) {
        let sound = [Dtype::F32, Dtype::F16, Dtype::Bf16]
            .map(|dtype| read(exported(model, dtype).join("model.safetensors")));
        let (header, data) = tensors::split(&sound[0]);
        // Other exporters leave the prefix out.
        seeds.push(tensors::file(&header.replace(prefix, ""), data));
        seeds.extend(sound);
    }
    seeds.extend(tensors::attacks());
    seeds
}

pub(super) fn weights_variants() -> Files {
    let file = |model| read(exported(model, Dtype::F32).join("model.safetensors"));
    models().iter().flat_map(|model| tensors::variants(&file(model))).collect()
}

pub(super) fn config(bytes: &[u8]) -> bool {
    let path = file("hf/config.json", bytes);
    let FolderModel { spec, labels, .. } = match FolderModel::read(path.parent().expect("a folder"))
    {
        Ok(model) => model,
        Err(error) => return refused(&error, "config.json"),
    };
    assert!(labels.is_empty() || labels.len() == spec.prediction().map_or(0, Prediction::outputs));
    let parameters = shapes(&spec).expect("a dense model has no tiles");
    let extents = spec.extents();
    assert!(parameters.len() > 4 * extents.layers);
    let elements = |shape: &[usize]| shape.iter().map(|&length| length as u128).product::<u128>();
    let total: u128 = parameters.iter().map(|(_, shape)| elements(shape)).sum();
    assert!(total >= extents.d_model as u128);
    true
}

/// The configurations of a GPT-2, a BERT, a classifier, a model for spans and an FSMT.
fn sound_configs() -> Vec<String> {
    let [gpt2, bert, fsmt] = models();
    let [classifier, answering] = [Prediction::Class(2), Prediction::Span]
        .map(|prediction| bert.clone().predicting(Some(prediction)));
    let text = |model| fs::read_to_string(exported(model, Dtype::F32).join("config.json"));
    let models = [gpt2, bert, classifier, answering, fsmt];
    models.iter().map(|model| text(model).expect("an export has one")).collect()
}

pub(super) fn config_seeds() -> Files {
    let sound = sound_configs();
    let more = sound[0].replacen('{', "{\"task_specific_params\":{\"a\":{\"b\":1}},", 1);
    let minimal = "{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":4,\"n_embd\":32,\
        \"n_positions\":64,\"vocab_size\":256}";
    let mut seeds = files(&[&sound[0], &more, minimal, "{\"model_type\":\"gpt2\"}"]);
    seeds.extend(sound[1..].iter().map(|text| text.clone().into_bytes()));
    for (from, to) in [("32", "33"), ("\"n_layer\":2", "\"n_layer\":4097"), ("64", "16777217")] {
        seeds.push(minimal.replacen(from, to, 1).into_bytes());
    }
    seeds
}

pub(super) fn config_variants() -> Files {
    let words = [
        "gelu",
        "gelu_new",
        "gelu_pytorch_tanh",
        "relu",
        "silu",
        "swish",
        "gpt2",
        "gpt_neo",
        "bert",
        "fsmt",
        "absolute",
        "relative_key",
        "regression",
        "BertForSequenceClassification",
        "BertForQuestionAnswering",
    ];
    let variants = |text: &String| Document::json(text, &words).variants(String::into_bytes);
    sound_configs().iter().flat_map(variants).collect()
}
