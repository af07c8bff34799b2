//! Hugging Face's BERT: `BertForMaskedLM`, `BertForSequenceClassification` and
//! `BertForQuestionAnswering`.
//!
//! Queries, keys and values are three linear layers there and one here, in this order. The decoder
//! of the head for masked tokens is tied to the token embedding. A masked model has no pooler, so
//! that of `BertForPreTraining` is left out. Options that would change the computation are refused;
//! dropout is a setting of the training.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    config::{Sizes, activation, activation_name, admit, object, parse},
    format::Format,
};
use crate::Result;
use sparse24_train::{
    model::{
        BertSpec, ModelSpec, Sparsify,
        bert::{SEGMENTS, TOKEN_TABLE},
    },
    objective::MASKED,
};

pub(super) const FORMAT: Format = Format {
    name: "bert",
    title: "BERT",
    prefix: "bert.",
    heads: &["cls.predictions.", "cls.seq_relationship.", "classifier.", "qa_outputs."],
    optional: &["pooler."],
    tied: &[
        ("cls.predictions.decoder.weight", TOKEN_TABLE),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
    buffers: &["embeddings.position_ids", "embeddings.token_type_ids"],
    tables: [TOKEN_TABLE, "embeddings.position_embeddings.weight"],
    classes: ["BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"],
    stored,
    shaped: |_, shape| shape.to_vec(),
    is_transposed: |_| false,
    read,
    fields,
    attention: ".attention.",
    filters: ["--include encoder --exclude attention", "--include encoder"],
};

fn stored(name: &str) -> Vec<String> {
    match name.split_once(".self.qkv.") {
        None => vec![name.to_owned()],
        Some((attention, part)) => ["query", "key", "value"]
            .map(|layer| format!("{attention}.self.{layer}.{part}"))
            .to_vec(),
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Raw {
    num_hidden_layers: usize,
    num_attention_heads: usize,
    hidden_size: usize,
    intermediate_size: usize,
    max_position_embeddings: usize,
    vocab_size: usize,
    hidden_act: Option<Value>,
    type_vocab_size: Option<Value>,
    layer_norm_eps: Option<Value>,
    position_embedding_type: Option<Value>,
    tie_word_embeddings: Option<Value>,
    is_decoder: Option<Value>,
    add_cross_attention: Option<Value>,
}

/// Post-LayerNorm with epsilon 1e-12, absolute positions, two segments, tied decoder.
fn read(path: &Path, text: &[u8]) -> Result<ModelSpec> {
    let raw: Raw = parse(path, FORMAT.title, text)?;
    let activation = activation(path, "hidden_act", raw.hidden_act.as_ref(), "gelu")?;
    for (key, found, admitted) in [
        ("type_vocab_size", &raw.type_vocab_size, json!(SEGMENTS)),
        ("layer_norm_eps", &raw.layer_norm_eps, json!(1e-12)),
        ("position_embedding_type", &raw.position_embedding_type, json!("absolute")),
        ("tie_word_embeddings", &raw.tie_word_embeddings, json!(true)),
        ("is_decoder", &raw.is_decoder, json!(false)),
        ("add_cross_attention", &raw.add_cross_attention, json!(false)),
    ] {
        admit(path, key, found.as_ref(), &[admitted])?;
    }
    Sizes {
        layers: ("num_hidden_layers", raw.num_hidden_layers),
        heads: ("num_attention_heads", raw.num_attention_heads),
        d_model: ("hidden_size", raw.hidden_size),
        others: [
            ("max_position_embeddings", raw.max_position_embeddings),
            ("vocab_size", raw.vocab_size),
            ("intermediate_size", raw.intermediate_size),
        ],
    }
    .check(path)?;
    Ok(ModelSpec::Bert(BertSpec {
        layers: raw.num_hidden_layers,
        heads: raw.num_attention_heads,
        d_model: raw.hidden_size,
        d_ff: raw.intermediate_size,
        sequence_length: raw.max_position_embeddings,
        vocabulary: raw.vocab_size,
        activation,
        sparsify: Sparsify::Ffn,
        mask_probability: MASKED,
        pooler: raw.hidden_size,
        prediction: None,
    }))
}

fn fields(model: &ModelSpec, _: Option<u32>) -> Map<String, Value> {
    let ModelSpec::Bert(spec) = model else { unreachable!("the format of another model") };
    object(json!({
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": spec.sequence_length,
        "vocab_size": spec.vocabulary,
        "type_vocab_size": SEGMENTS,
        "hidden_act": activation_name(&FORMAT, model).expect("an activation of `of`"),
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "is_decoder": false,
        "pad_token_id": null,
    }))
}
