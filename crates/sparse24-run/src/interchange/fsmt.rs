//! Hugging Face's FSMT (`FSMTForConditionalGeneration`), fairseq's Transformers as its port names
//! them: `model.` before fairseq's own names. So fairseq's weights, saved as safetensors beside a
//! `config.json`, are read too.
//!
//! Queries, keys and values are linear layers of their own there. Both embeddings and the logits
//! have one table here, which a file may repeat. Positions are computed. Options that would change
//! the computation are refused; dropout is a setting of the training.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    config::{Sizes, activation, activation_name, admit, object, parse},
    format::Format,
};
use crate::{
    Result,
    tensors::{Entry, TensorFile},
};
use sparse24_train::{
    model::{ModelSpec, Sparsify, TransformerSpec, transformer::TOKEN_TABLE},
    nn::fixed_sinusoid,
};

pub(super) const FORMAT: Format = Format {
    name: "fsmt",
    title: "FSMT",
    prefix: "model.",
    heads: &[],
    optional: &[],
    tied: &[
        ("decoder.embed_tokens.weight", TOKEN_TABLE),
        ("decoder.output_projection.weight", TOKEN_TABLE),
    ],
    buffers: &[POSITIONS, "embed_positions._float_tensor", "coder.version"],
    tables: [TOKEN_TABLE, ""],
    classes: ["FSMTForConditionalGeneration"; 3],
    stored,
    shaped: |_, shape| shape.to_vec(),
    is_transposed: |_| false,
    read,
    fields,
    attention: "_attn.",
    filters: ["--include layers --exclude attn", "--include layers"],
};

/// The table of positions, which the model computes.
pub(super) const POSITIONS: &str = "embed_positions.weight";

/// Refuses positions that were trained. Their rows begin with two that no token has.
pub(super) fn check_positions(file: &TensorFile, entry: &Entry) -> Result {
    let &[_, d] = &entry.shape[..] else { return Ok(()) };
    let is_trained = |(at, value): (usize, &f32)| {
        d > 3 && (value - fixed_sinusoid([at / d - 2, at % d], d)).abs() > 0.01
    };
    match file.floats(entry)?.iter().enumerate().skip(2 * d).any(is_trained) {
        true => Err(file.refuse(entry, "was trained, but the model computes its positions")),
        false => Ok(()),
    }
}

/// The longest sentence of a model that reads longer ones: positions are computed, so the length
/// is no property of the weights, and takes memory.
const LONGEST: usize = 256;

fn stored(name: &str) -> Vec<String> {
    let layers: &[&str] = match name {
        _ if name.contains(".qkv_proj.") => &["q", "k", "v"],
        _ if name.contains(".kv_proj.") => &["k", "v"],
        _ => return vec![name.to_owned()],
    };
    let (attention, part) = name.split_once("kv_proj.").expect("it contains this");
    let attention = attention.trim_end_matches('q');
    layers.iter().map(|layer| format!("{attention}{layer}_proj.{part}")).collect()
}

#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Raw {
    d_model: usize,
    encoder_layers: usize,
    decoder_layers: usize,
    encoder_attention_heads: usize,
    decoder_attention_heads: usize,
    encoder_ffn_dim: usize,
    decoder_ffn_dim: usize,
    src_vocab_size: usize,
    tgt_vocab_size: usize,
    max_position_embeddings: usize,
    activation_function: Option<Value>,
    scale_embedding: Option<Value>,
    bos_token_id: Option<Value>,
    pad_token_id: Option<Value>,
    eos_token_id: Option<Value>,
    decoder_start_token_id: Option<Value>,
}

/// An encoder and a decoder of one size with one vocabulary, and fairseq's special tokens.
fn read(path: &Path, text: &[u8]) -> Result<ModelSpec> {
    let raw: Raw = parse(path, FORMAT.title, text)?;
    let activation =
        activation(path, "activation_function", raw.activation_function.as_ref(), "relu")?;
    for (key, found, admitted) in [
        ("scale_embedding", &raw.scale_embedding, json!(true)),
        ("bos_token_id", &raw.bos_token_id, json!(0)),
        ("pad_token_id", &raw.pad_token_id, json!(1)),
        ("eos_token_id", &raw.eos_token_id, json!(2)),
        ("decoder_start_token_id", &raw.decoder_start_token_id, json!(2)),
        ("decoder_layers", &Some(raw.decoder_layers.into()), json!(raw.encoder_layers)),
        (
            "decoder_attention_heads",
            &Some(raw.decoder_attention_heads.into()),
            json!(raw.encoder_attention_heads),
        ),
        ("decoder_ffn_dim", &Some(raw.decoder_ffn_dim.into()), json!(raw.encoder_ffn_dim)),
        ("tgt_vocab_size", &Some(raw.tgt_vocab_size.into()), json!(raw.src_vocab_size)),
    ] {
        admit(path, key, found.as_ref(), &[admitted])?;
    }
    Sizes {
        layers: ("encoder_layers", raw.encoder_layers),
        heads: ("encoder_attention_heads", raw.encoder_attention_heads),
        d_model: ("d_model", raw.d_model),
        others: [
            ("max_position_embeddings", raw.max_position_embeddings),
            ("src_vocab_size", raw.src_vocab_size),
            ("encoder_ffn_dim", raw.encoder_ffn_dim),
        ],
    }
    .check(path)?;
    Ok(ModelSpec::Transformer(TransformerSpec {
        layers: raw.encoder_layers,
        heads: raw.encoder_attention_heads,
        d_model: raw.d_model,
        d_ff: raw.encoder_ffn_dim,
        sequence_length: raw.max_position_embeddings.min(LONGEST),
        vocabulary: raw.src_vocab_size,
        activation,
        sparsify: Sparsify::Ffn,
        label_smoothing: 0.0,
    }))
}

fn fields(model: &ModelSpec, _: Option<u32>) -> Map<String, Value> {
    let ModelSpec::Transformer(spec) = model else { unreachable!("the format of another model") };
    object(json!({
        "d_model": spec.d_model,
        "encoder_layers": spec.layers,
        "decoder_layers": spec.layers,
        "encoder_attention_heads": spec.heads,
        "decoder_attention_heads": spec.heads,
        "encoder_ffn_dim": spec.d_ff,
        "decoder_ffn_dim": spec.d_ff,
        "src_vocab_size": spec.vocabulary,
        "tgt_vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.sequence_length,
        "activation_function": activation_name(&FORMAT, model).expect("an activation of `of`"),
        "scale_embedding": true,
        "dropout": 0.0,
        "is_encoder_decoder": true,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
        "decoder_start_token_id": 2,
    }))
}
