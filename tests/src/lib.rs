//! Cross-crate tests: oracle, property, cross-backend, training. The tests are in `tests/`; the
//! code that they share is here.

pub mod conformance;
pub mod hardening;
pub mod hooked;
pub mod oracle;

#[cfg(feature = "wgpu")]
use std::env;

#[cfg(feature = "wgpu")]
use sparse24_train::backend::{
    Backend, BackendSettings,
    wgpu::{WgpuBackend, adapters},
};
use sparse24_train::model::{BertSpec, DeitSpec, Gpt2Spec, ModelSpec, TransformerSpec};

/// The wgpu backend of the first adapter; none where there is no adapter, which skips a test.
///
/// # Panics
/// If an adapter cannot be used, or `SPARSE24_REQUIRE_WGPU` is set and there is none.
#[cfg(feature = "wgpu")]
#[must_use]
pub fn wgpu() -> Option<Box<dyn Backend>> {
    if adapters().is_empty() && env::var_os("SPARSE24_REQUIRE_WGPU").is_none() {
        println!("skipped: there is no GPU adapter");
        return None;
    }
    match WgpuBackend::open(BackendSettings::default()) {
        Ok(backend) => Some(Box::new(backend)),
        Err(error) => panic!("{error}"),
    }
}

/// A BERT of the sizes of a GPT-2, in which every token may be a target.
#[must_use]
pub fn bert(gpt2: Gpt2Spec) -> ModelSpec {
    ModelSpec::Bert(bert_spec(gpt2))
}

/// A crammed BERT of the sizes of a GPT-2, in which every token may be a target.
#[must_use]
pub fn crammed_bert(gpt2: Gpt2Spec) -> ModelSpec {
    ModelSpec::CrammedBert(BertSpec { pooler: gpt2.d_model + 4, ..bert_spec(gpt2) })
}

/// A DeiT of the sizes of a GPT-2, for images of four patches of 4x4 pixels, of which there are as
/// many classes as tokens.
#[must_use]
pub fn deit(gpt2: Gpt2Spec) -> ModelSpec {
    let Gpt2Spec { layers, heads, d_model, d_ff, vocabulary, activation, sparsify, .. } = gpt2;
    ModelSpec::Deit(DeitSpec {
        layers,
        heads,
        d_model,
        d_ff,
        image_size: 8,
        patch_size: 4,
        classes: vocabulary,
        activation,
        sparsify,
        drop_path: 0.5,
        label_smoothing: 0.125,
    })
}

/// A Transformer of the sizes of a GPT-2, with label smoothing.
#[must_use]
pub fn transformer(gpt2: Gpt2Spec) -> ModelSpec {
    let Gpt2Spec { layers, heads, d_model, d_ff, sequence_length, vocabulary, .. } = gpt2;
    let Gpt2Spec { activation, sparsify, .. } = gpt2;
    ModelSpec::Transformer(TransformerSpec {
        layers,
        heads,
        d_model,
        d_ff,
        sequence_length,
        vocabulary,
        activation,
        sparsify,
        label_smoothing: 0.125,
    })
}

fn bert_spec(gpt2: Gpt2Spec) -> BertSpec {
    let Gpt2Spec { layers, heads, d_model, d_ff, sequence_length, vocabulary, .. } = gpt2;
    let Gpt2Spec { activation, sparsify, prediction, .. } = gpt2;
    BertSpec {
        layers,
        heads,
        d_model,
        d_ff,
        sequence_length,
        vocabulary,
        activation,
        sparsify,
        mask_probability: 1.0,
        pooler: d_model,
        prediction,
    }
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
