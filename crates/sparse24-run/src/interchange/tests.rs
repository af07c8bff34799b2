//! The way out and back, and the message of every refusal.

mod fsmt;
mod refusals;
mod timm;
mod transformers;

use std::{collections::BTreeMap, fs, path::PathBuf};

use sparse24_core::{Mask, MaskKind, op::Activation, tile::TilePattern};
use tempfile::TempDir;

use super::*;
use crate::{
    checkpoint::{NamedTensor, PhaseKind},
    disk::fault::{self, Fault, Plan},
    error::problem,
    tensors::{self, Layout},
};
use sparse24_train::{
    model::{BertSpec, Gpt2Spec, ModelSpec, Sparsify},
    nn::{Bias, Prediction},
    objective::MASKED,
};

pub(super) const GPT2: Gpt2Spec = Gpt2Spec {
    layers: 2,
    heads: 2,
    d_model: 8,
    d_ff: 32,
    sequence_length: 6,
    vocabulary: 11,
    activation: Activation::Gelu,
    bias: Bias::Present,
    sparsify: Sparsify::Ffn,
    prediction: None,
};

const UNBIASED: ModelSpec = ModelSpec::Gpt2(Gpt2Spec { bias: Bias::Absent, ..GPT2 });

pub(super) const BERT: ModelSpec = ModelSpec::Bert(BertSpec {
    layers: 2,
    heads: 2,
    d_model: 8,
    d_ff: 32,
    sequence_length: 6,
    vocabulary: 11,
    activation: Activation::GeluErf,
    sparsify: Sparsify::Ffn,
    mask_probability: MASKED,
    pooler: 8,
    prediction: None,
});

/// A model of each class, without names for its labels.
fn models() -> Vec<ModelSpec> {
    let heads = [Prediction::Class(3), Prediction::Value, Prediction::Span].map(Some);
    let predictions = [&[None], &heads[..]].concat();
    let models = [UNBIASED, ModelSpec::Gpt2(GPT2), BERT];
    models
        .iter()
        .flat_map(|model| {
            let predicting = |&prediction| model.clone().predicting(prediction);
            predictions.iter().map(predicting)
        })
        .collect()
}

fn weights(model: &ModelSpec) -> Vec<NamedTensor> {
    let tensor = |(i, (name, shape)): (usize, (String, Vec<usize>))| {
        let length: usize = shape.iter().product();
        // Multiples of 1/8 below 16: exact in f16 and bf16.
        let values = (0..length).map(|j| ((j * 7 + i * 13) % 251) as f32 / 8.0 - 15.5).collect();
        NamedTensor { name, shape, values }
    };
    shapes(model).unwrap().into_iter().enumerate().map(tensor).collect()
}

fn format(model: &ModelSpec) -> &'static Format {
    Format::of(model).unwrap()
}

fn describe(spec: &ModelSpec) -> Description<'_> {
    Description { spec, tokenizer: None, labels: &[], languages: [""; 2] }
}

/// Masks of matrices of these names and shapes.
fn masks(of: &[(&str, [usize; 2])]) -> Vec<(String, Mask)> {
    let mask = |(offset, &(name, [rows, columns])): (usize, &(&str, [usize; 2]))| {
        let tiles =
            (0..rows * columns / 16).map(|i| TilePattern::ALL[(i * 5 + offset) % 90].bits());
        (name.to_owned(), Mask::from_tiles(rows, columns, tiles.collect()).unwrap())
    };
    of.iter().enumerate().map(mask).collect()
}

fn gpt2_masks() -> Vec<(String, Mask)> {
    masks(&[("h.0.mlp.c_fc.weight", [32, 8]), ("h.0.mlp.c_proj.weight", [8, 32])])
}

/// A file of F32 tensors as Hugging Face writes them.
fn foreign(tensors: &[(&str, &[usize], &[f32])]) -> (TempDir, PathBuf) {
    let dtype = safetensors::Dtype::F32;
    let layout = |&(name, shape, _): &(&str, &[usize], _)| Layout {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
    };
    let mut bytes = tensors::header(&[], &tensors.iter().map(layout).collect::<Vec<_>>());
    let values = tensors.iter().flat_map(|(_, _, values)| *values);
    bytes.extend(values.flat_map(|value| value.to_le_bytes()));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(WEIGHTS);
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn expected(list: &[(&str, &[usize])]) -> Vec<(String, Vec<usize>)> {
    list.iter().map(|&(name, shape)| (name.into(), shape.to_vec())).collect()
}

/// The ways out and back: with these types, and without biases as with them.
#[test]
fn out_and_back_is_the_same() {
    for model in models() {
        let out = weights(&model);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let directory = tempfile::tempdir().unwrap();
            let folder = directory.path().join("deep/model");
            let exported = export(&folder, &out, describe(&model), dtype, Values::Dense).unwrap();
            let is_unbiased = model.extents().bias == Bias::Absent;
            let zeros = if is_unbiased { 2 * 6 + 1 } else { 0 };
            assert_eq!((exported.zero_biases.len(), exported.sparse24.len()), (zeros, 0));
            let FolderModel { spec, labels, .. } = FolderModel::read(&folder).unwrap();
            let biased = match model.clone() {
                ModelSpec::Gpt2(spec) => ModelSpec::Gpt2(Gpt2Spec { bias: Bias::Present, ..spec }),
                other => other,
            };
            assert_eq!(spec, biased);
            let names = ["LABEL_0", "LABEL_1", "LABEL_2"];
            let named = model.prediction().filter(|&found| found != Prediction::Span);
            assert_eq!(labels, names[..named.map_or(0, Prediction::outputs)]);
            let read = |path: &PathBuf, model: &ModelSpec| {
                import(path, exported.format, &shapes(model).unwrap()).unwrap()
            };
            for path in [&folder, &folder.join(WEIGHTS)] {
                let found = read(path, &model);
                assert!(found.weights == out && found.dropped.is_empty(), "{model:?} {dtype:?}");
            }
            let with = read(&folder, &biased).weights;
            let added = with.iter().filter(|tensor| exported.zero_biases.contains(&tensor.name));
            assert!(added.flat_map(|tensor| &tensor.values).all(|&value| value == 0.0));
        }
    }
}

#[test]
fn conv1d_weights_are_transposed_and_nothing_else_is() {
    let (_directory, path) = foreign(&[
        (
            "transformer.h.0.attn.c_attn.weight",
            &[2, 6],
            &[0., 1., 2., 3., 4., 5., 10., 11., 12., 13., 14., 15.],
        ),
        ("transformer.wte.weight", &[3, 2], &[0., 1., 2., 3., 4., 5.]),
        ("lm_head.weight", &[3, 2], &[0., 1., 2., 3., 4., 5.]),
        ("transformer.h.0.attn.bias", &[1], &[f32::NAN]),
        ("h.0.attn.masked_bias", &[1], &[-1e4]),
    ]);
    let wanted = expected(&[("wte.weight", &[3, 2]), ("h.0.attn.c_attn.weight", &[6, 2])]);
    let read = import(&path, &gpt2::FORMAT, &wanted).unwrap().weights;
    assert_eq!(read[0].values, [0., 1., 2., 3., 4., 5.]);
    assert_eq!(read[1].values, [0., 10., 1., 11., 2., 12., 3., 13., 4., 14., 5., 15.]);
    let is_conv1d = gpt2::FORMAT.is_transposed;
    assert!(
        is_conv1d("h.10.mlp.c_proj.weight")
            && !is_conv1d("h.1.mlp.c_proj.bias")
            && !is_conv1d("wpe.weight")
    );
}

/// Queries, keys and values become one parameter; old names, buffers, copies and a name without
/// the prefix are read; heads without a place are left out, and a pooler may be missing.
#[test]
fn the_parts_of_a_bert_are_joined() {
    let attention = "bert.encoder.layer.0.attention.self.";
    let of = |part: &str| format!("{attention}{part}");
    let names = ["key.bias", "query.bias", "value.bias"].map(of);
    let table = [0., 1., 2., 3., 4., 5.];
    let (_directory, path) = foreign(&[
        (&names[0], &[2], &[3., 4.]),
        (&names[1], &[2], &[1., 2.]),
        (&names[2], &[2], &[5., 6.]),
        ("embeddings.word_embeddings.weight", &[3, 2], &table),
        ("bert.embeddings.LayerNorm.gamma", &[2], &[7., 8.]),
        ("bert.embeddings.position_ids", &[1], &[f32::NAN]),
        ("cls.predictions.decoder.weight", &[3, 2], &table),
        ("cls.predictions.decoder.bias", &[3], &[9., 10., 11.]),
        ("cls.seq_relationship.bias", &[2], &[0., 1.]),
        ("classifier.weight", &[1, 2], &[0., 1.]),
    ]);
    let wanted = expected(&[
        ("encoder.layer.0.attention.self.qkv.bias", &[6]),
        ("embeddings.word_embeddings.weight", &[3, 2]),
        ("embeddings.LayerNorm.weight", &[2]),
        ("cls.predictions.bias", &[3]),
        ("pooler.dense.bias", &[2]),
    ]);
    let Imported { weights, dropped } = import(&path, &bert::FORMAT, &wanted).unwrap();
    let values: Vec<_> = weights.iter().map(|tensor| tensor.values.as_slice()).collect();
    let joined: [&[f32]; 4] = [&[1., 2., 3., 4., 5., 6.], &table, &[7., 8.], &[9., 10., 11.]];
    assert_eq!(values, joined);
    assert_eq!(dropped, ["classifier", "cls.seq_relationship"]);
}

#[test]
fn a_sparse_export_is_24_in_both_directions() {
    let encoder = "encoder.layer.1.";
    let of = |part: &str| format!("{encoder}{part}.weight");
    let names = ["attention.self.qkv", "intermediate.dense"].map(of);
    let bert_masks = masks(&[(&names[0], [24, 8]), (&names[1], [32, 8])]);
    for (model, masks, filter) in
        [(UNBIASED, gpt2_masks(), "--include mlp"), (BERT, bert_masks, "--include encoder")]
    {
        let (directory, out) = (tempfile::tempdir().unwrap(), weights(&model));
        let values = Values::Sparse24 {
            phase: PhaseKind::Sparse,
            masks: &masks,
            structure: MaskKind::Transposable,
        };
        let exported =
            export(directory.path(), &out, describe(&model), Dtype::Bf16, values).unwrap();
        assert!(exported.sparse24.iter().eq(masks.iter().map(|(name, _)| name)));
        assert_eq!(exported.format.filter(&exported.sparse24), filter);
        let read = import(directory.path(), exported.format, &shapes(&model).unwrap()).unwrap();
        for (read, written) in read.weights.iter().zip(&out) {
            let Some((_, mask)) = masks.iter().find(|(name, _)| *name == read.name) else {
                assert_eq!(read, written);
                continue;
            };
            for (at, (&found, &weight)) in read.values.iter().zip(&written.values).enumerate() {
                let is_kept = mask.keeps(at / mask.columns(), at % mask.columns());
                let expected = if is_kept { weight.to_bits() } else { 0 };
                assert_eq!(found.to_bits(), expected, "{}, element {at}", read.name);
            }
        }
    }
    let stored = |model: &ModelSpec, name| format(model).stored_mask(name, MaskKind::RowWise);
    assert_eq!(stored(&UNBIASED, "h.0.mlp.c_fc.weight"), MaskKind::ColumnWise);
    assert_eq!(stored(&BERT, &names[1]), MaskKind::RowWise);
    assert_eq!(bert::FORMAT.filter(&names[1..]), "--include encoder --exclude attention");
}
