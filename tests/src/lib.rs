//! Cross-crate tests: oracle, property, cross-backend, training. The tests are in `tests/`; the
//! code that they share is here.

pub mod conformance;
pub mod hardening;
pub mod hooked;
pub mod oracle;

use std::num::NonZeroU32;

use sparse24_core::op::Activation;
use sparse24_train::{
    method::Method,
    model::{ActivationCheckpointing, BertSpec, DeitSpec, Gpt2Spec, ModelSpec, Sparsify},
    nn::{BatchShape, Bias, NoWeightDecay},
    optim::{Adam, Optimizer, UpdateRule},
    schedule::{Decay, GradientAccumulation, Schedule},
    trainer::Recipe,
};

/// Optimizer steps of a tiny run.
pub const STEPS: u32 = 12;

/// Two layers of width 8; two micro-batches of 21 tokens, not a multiple of four; one position is
/// never used.
///
/// Adam's epsilon is of the size of the gradients, so that a step is a smooth function of them.
#[must_use]
pub fn recipe(method: Method) -> Recipe {
    let two = NonZeroU32::MIN.saturating_add(1);
    Recipe {
        model: ModelSpec::Gpt2(Gpt2Spec {
            layers: 2,
            heads: 2,
            d_model: 8,
            d_ff: 16,
            sequence_length: 8,
            vocabulary: 11,
            activation: Activation::Gelu,
            bias: Bias::Present,
            sparsify: Sparsify::Ffn,
            prediction: None,
        }),
        method,
        steps: STEPS,
        batch: BatchShape { size: 3, sequence_length: 7 },
        checkpointing: ActivationCheckpointing::None,
        gradient_accumulation: GradientAccumulation::constant(two),
        dropout: 0.0,
        optimizer: Optimizer {
            rule: UpdateRule::AdamW(Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-3 }),
            clip: 0.5,
        },
        weight_decay: 0.1,
        no_weight_decay: NoWeightDecay::Vectors,
        schedule: Schedule {
            peak: 3e-2,
            floor: 3e-3,
            warmup_start: 0.0,
            warmup_steps: 3,
            decay_steps: STEPS,
            decay: Decay::Cosine,
            cooldown_steps: 4,
        },
        seed: 5,
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
