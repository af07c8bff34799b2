//! `config.json`: the shape of a GPT-2. Options that would change the computation are refused;
//! dropout is a setting of the training.

use std::{fs, path::Path};

use serde::Deserialize;
use serde_json::{Value, json};

use super::CONFIG;
use crate::{
    Error,
    config::{MOST, MOST_LAYERS},
    disk, json,
    tensors::shards::check_inside,
};
use sparse24_core::op::Activation;
use sparse24_train::{
    model::{Gpt2Spec, ModelSpec, Sparsify},
    nn::{Bias, Role},
};

/// Values of `activation_function` in Hugging Face's GPT-2; the first is the default.
const ACTIVATIONS: [(&str, Activation); 3] = [
    ("gelu_new", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu", Activation::GeluErf),
];

/// The shape of a GPT-2 in `config.json`: GELU, pre-LayerNorm with epsilon 1e-5, tied head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpt2Config {
    /// Number of blocks.
    pub n_layer: usize,
    /// Attention heads; divides `n_embd`.
    pub n_head: usize,
    /// d_model.
    pub n_embd: usize,
    /// Longest sequence.
    pub n_positions: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// d_ff; 4 d_model if the file has none.
    pub n_inner: usize,
    /// `activation_function`: GELU in its tanh form, the default, or in its erf form.
    pub activation: Activation,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with model_type")]
struct Kind {
    model_type: String,
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

/// The name and shape of every parameter of a model; vectors have one length.
///
/// # Errors
/// [`Error::Train`] for a sparsifiable shape that does not consist of 4x4 tiles.
pub fn shapes(model: &ModelSpec) -> Result<Vec<(String, Vec<usize>)>, Error> {
    let shape = |[rows, columns]: [usize; 2], role| {
        if role == Role::Vector { vec![columns] } else { vec![rows, columns] }
    };
    let parameters = model.parameters()?.into_iter();
    Ok(parameters.map(|spec| (spec.name, shape(spec.shape, spec.role))).collect())
}

impl Gpt2Config {
    /// The shape of one of our models.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that is not a GPT-2, or is fine-tuned.
    pub fn of(model: &ModelSpec) -> Result<Self, Error> {
        let ModelSpec::Gpt2(spec) = model else {
            return Err(Error::setting(
                "model.kind",
                "expected \"gpt2\", the only model with an export",
            ));
        };
        if spec.prediction.is_some() {
            let problem = "a fine-tuned model has no export yet; the checkpoint's \
                model.safetensors holds the weights";
            return Err(Error::setting("task.name", problem));
        }
        if !ACTIVATIONS.iter().any(|&(_, activation)| activation == spec.activation) {
            let problem = "no Hugging Face model has GPT-2's layers with a gated feed-forward, \
                expected gelu or gelu-erf; the checkpoint's model.safetensors holds the weights";
            return Err(Error::setting("model.activation", problem));
        }
        Ok(Self {
            n_layer: spec.layers,
            n_head: spec.heads,
            n_embd: spec.d_model,
            n_positions: spec.sequence_length,
            vocab_size: spec.vocabulary,
            n_inner: spec.d_ff,
            activation: spec.activation,
        })
    }

    /// Reads `config.json` in a folder, or beside a weights file.
    ///
    /// # Errors
    /// [`Error::File`] names the key and what was expected: another model, an activation other than
    /// GELU, an untied head, another epsilon, impossible lengths. [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let expected = "a folder with config.json and model.safetensors, or the latter with the \
            former beside it";
        fs::metadata(path).map_err(|e| Error::io("read", path, e).expecting(expected))?;
        let path = &if path.is_dir() { path.join(CONFIG) } else { path.with_file_name(CONFIG) };
        let refuse = |problem: String| Err(Error::file(path, problem));
        if path.is_symlink() {
            check_inside(path)?;
        }
        let text = disk::read_small(path, 1 << 20)
            .map_err(|e| e.expecting("that of a Hugging Face GPT-2"))?;
        let malformed =
            |e: serde_json::Error| Error::file(path, format!("not a GPT-2 configuration: {e}"));
        let Kind { model_type } = serde_json::from_slice(&text).map_err(malformed)?;
        if model_type != "gpt2" {
            let supported = "expected \"gpt2\", the only model that can be imported";
            return refuse(format!("model_type is {model_type:?}, {supported}"));
        }
        let raw: Raw = serde_json::from_slice(&text).map_err(malformed)?;
        let same = |found: &Value, expected: &Value| match (found.as_f64(), expected.as_f64()) {
            (Some(found), Some(expected)) => (found - expected).abs() <= 1e-6 * expected.abs(),
            _ => found == expected,
        };
        let expected = [
            (
                "activation_function",
                &raw.activation_function,
                ACTIVATIONS.map(|(name, _)| json!(name)).to_vec(),
            ),
            ("layer_norm_epsilon", &raw.layer_norm_epsilon, vec![json!(1e-5)]),
            ("tie_word_embeddings", &raw.tie_word_embeddings, vec![json!(true)]),
            ("scale_attn_weights", &raw.scale_attn_weights, vec![json!(true)]),
            (
                "scale_attn_by_inverse_layer_idx",
                &raw.scale_attn_by_inverse_layer_idx,
                vec![json!(false)],
            ),
            ("add_cross_attention", &raw.add_cross_attention, vec![json!(false)]),
        ];
        for (key, found, admitted) in expected {
            if let Some(found) =
                found.as_ref().filter(|found| !admitted.iter().any(|value| same(found, value)))
            {
                let admitted: Vec<_> = admitted.iter().map(Value::to_string).collect();
                return refuse(format!("{key} is {found}, expected {}", admitted.join(" or ")));
            }
        }
        let Raw { n_layer, n_head, n_embd, n_positions, vocab_size, activation_function, .. } = raw;
        let named =
            |(name, _): &&(&str, _)| activation_function.as_ref().is_some_and(|f| f == name);
        let (_, activation) = *ACTIVATIONS.iter().find(named).unwrap_or(&ACTIVATIONS[0]);
        let n_inner = raw.n_inner.unwrap_or(n_embd.saturating_mul(4));
        let lengths = [
            ("n_head", n_head),
            ("n_embd", n_embd),
            ("n_positions", n_positions),
            ("vocab_size", vocab_size),
            ("n_inner", n_inner),
        ];
        // Far above any GPT-2, so that a hostile file cannot create an endless list of parameters.
        let bounded = lengths.map(|(key, length)| (key, length, MOST)).into_iter();
        for (key, length, most) in bounded.chain([("n_layer", n_layer, MOST_LAYERS)]) {
            if !(1..=most).contains(&length) {
                return refuse(format!("{key} is {length}, expected 1..={most}"));
            }
        }
        if n_embd % n_head != 0 {
            return refuse(format!("n_embd is {n_embd}, expected a multiple of n_head = {n_head}"));
        }
        Ok(Self { n_layer, n_head, n_embd, n_positions, vocab_size, n_inner, activation })
    }

    /// The model that computes it.
    #[must_use]
    pub fn spec(&self, bias: Bias) -> Gpt2Spec {
        Gpt2Spec {
            layers: self.n_layer,
            heads: self.n_head,
            d_model: self.n_embd,
            d_ff: self.n_inner,
            sequence_length: self.n_positions,
            vocabulary: self.vocab_size,
            activation: self.activation,
            bias,
            sparsify: Sparsify::Ffn,
            prediction: None,
        }
    }

    /// The name and shape of every parameter, linear layers `[out, in]`, in the order of the
    /// computation.
    #[must_use]
    pub fn parameters(&self, bias: Bias) -> Vec<(String, Vec<usize>)> {
        shapes(&ModelSpec::Gpt2(self.spec(bias))).expect("a dense model has no tiles")
    }

    /// The file that `from_pretrained` reads; `end` is the token that ends a text.
    pub(super) fn to_json(self, dtype: &str, end: Option<u32>) -> Vec<u8> {
        let Self { n_layer, n_head, n_embd, n_positions, vocab_size, n_inner, activation } = self;
        let named = ACTIVATIONS.iter().find(|(_, named)| *named == activation);
        let fields = json!({
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": n_layer,
            "n_head": n_head,
            "n_embd": n_embd,
            "n_positions": n_positions,
            "n_inner": (n_inner != 4 * n_embd).then_some(n_inner),
            "vocab_size": vocab_size,
            "activation_function": named.expect("GELU, as `of` and `read` return").0,
            "layer_norm_epsilon": 1e-5,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "scale_attn_weights": true,
            "tie_word_embeddings": true,
            "bos_token_id": end,
            "eos_token_id": end,
            "torch_dtype": dtype,
        });
        json::pretty(&fields)
    }
}
