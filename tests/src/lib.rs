//! Cross-crate tests: oracle, property, cross-backend, training. The tests are in `tests/`; the
//! code that they share is here.

pub mod conformance;
pub mod hardening;
pub mod hooked;
pub mod oracle;

use sparse24_train::model::{EncoderSpec, Gpt2Spec, ModelSpec};

/// An encoder of the sizes of a GPT-2, which smooths its targets.
#[must_use]
pub fn encoder(gpt2: Gpt2Spec) -> ModelSpec {
    let Gpt2Spec { layers, heads, d_model, d_ff, sequence_length, vocabulary, .. } = gpt2;
    let Gpt2Spec { activation, sparsify, .. } = gpt2;
    let smoothing = 0.125;
    ModelSpec::Encoder(EncoderSpec {
        layers,
        heads,
        d_model,
        d_ff,
        sequence_length,
        vocabulary,
        activation,
        sparsify,
        smoothing,
    })
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
