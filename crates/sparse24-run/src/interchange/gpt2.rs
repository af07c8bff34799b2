//! Hugging Face's GPT-2: `GPT2LMHeadModel`, `GPT2ForSequenceClassification` and
//! `GPT2ForQuestionAnswering`.
//!
//! Its Conv1D stores the four linear weights of a block as `[in, out]`, we store `[out, in]`. The
//! head is tied to `wte.weight`. Options that would change the computation are refused; dropout is
//! a setting of the training.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    config::{Sizes, activation, activation_name, admit, object, parse},
    format::Format,
};
use crate::Result;
use sparse24_train::{
    model::{Gpt2Spec, ModelSpec, Sparsify, gpt2::TOKEN_TABLE},
    nn::Bias,
};

pub(super) const FORMAT: Format = Format {
    name: "gpt2",
    title: "GPT-2",
    prefix: "transformer.",
    heads: &["score.", "qa_outputs."],
    optional: &[],
    tied: &[("lm_head.weight", TOKEN_TABLE)],
    buffers: &[".attn.bias", ".attn.masked_bias"],
    tables: [TOKEN_TABLE, "wpe.weight"],
    classes: ["GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForQuestionAnswering"],
    stored: |name| vec![name.to_owned()],
    shaped: |_, shape| shape.to_vec(),
    is_transposed: is_conv1d,
    read,
    fields,
    attention: ".attn.",
    filters: ["--include mlp", "--include transformer.h"],
};

pub(super) fn is_conv1d(name: &str) -> bool {
    name.starts_with("h.")
        && ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
            .iter()
            .any(|suffix| name.strip_suffix(suffix).is_some_and(|rest| rest.ends_with('.')))
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Raw {
    n_layer: usize,
    n_head: usize,
    n_embd: usize,
    n_positions: usize,
    vocab_size: usize,
    n_inner: Option<usize>,
    activation_function: Option<Value>,
    layer_norm_epsilon: Option<Value>,
    tie_word_embeddings: Option<Value>,
    scale_attn_weights: Option<Value>,
    scale_attn_by_inverse_layer_idx: Option<Value>,
    add_cross_attention: Option<Value>,
}

/// GELU, pre-LayerNorm with epsilon 1e-5, tied head, biases; d_ff is 4 d_model if the file has
/// none.
fn read(path: &Path, text: &[u8]) -> Result<ModelSpec> {
    let raw: Raw = parse(path, FORMAT.title, text)?;
    let activation =
        activation(path, "activation_function", raw.activation_function.as_ref(), "gelu_new")?;
    for (key, found, admitted) in [
        ("layer_norm_epsilon", &raw.layer_norm_epsilon, json!(1e-5)),
        ("tie_word_embeddings", &raw.tie_word_embeddings, json!(true)),
        ("scale_attn_weights", &raw.scale_attn_weights, json!(true)),
        ("scale_attn_by_inverse_layer_idx", &raw.scale_attn_by_inverse_layer_idx, json!(false)),
        ("add_cross_attention", &raw.add_cross_attention, json!(false)),
    ] {
        admit(path, key, found.as_ref(), &[admitted])?;
    }
    let Raw { n_layer, n_head, n_embd, n_positions, vocab_size, .. } = raw;
    let n_inner = raw.n_inner.unwrap_or(n_embd.saturating_mul(4));
    Sizes {
        layers: ("n_layer", n_layer),
        heads: ("n_head", n_head),
        d_model: ("n_embd", n_embd),
        others: [("n_positions", n_positions), ("vocab_size", vocab_size), ("n_inner", n_inner)],
    }
    .check(path)?;
    Ok(ModelSpec::Gpt2(Gpt2Spec {
        layers: n_layer,
        heads: n_head,
        d_model: n_embd,
        d_ff: n_inner,
        sequence_length: n_positions,
        vocabulary: vocab_size,
        activation,
        bias: Bias::Present,
        sparsify: Sparsify::Ffn,
        prediction: None,
    }))
}

fn fields(model: &ModelSpec, end: Option<u32>) -> Map<String, Value> {
    let ModelSpec::Gpt2(spec) = model else { unreachable!("the format of another model") };
    let &Gpt2Spec { d_model, d_ff, prediction, .. } = spec;
    object(json!({
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_embd": d_model,
        "n_positions": spec.sequence_length,
        "n_inner": (d_ff != 4 * d_model).then_some(d_ff),
        "vocab_size": spec.vocabulary,
        "activation_function": activation_name(&FORMAT, model).expect("an activation of `of`"),
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": true,
        "bos_token_id": end,
        "eos_token_id": end,
        // A classifier reads the last token that is not this one.
        "pad_token_id": end.filter(|_| prediction.is_some()),
    }))
}
