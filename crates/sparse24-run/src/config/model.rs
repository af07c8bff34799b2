//! The section `model`.

use serde::{Deserialize, Serialize};
use sparse24_core::op::Activation;
use sparse24_train::model::{
    ActivationCheckpointing, ModelSpec, Sparsify, bert, crammed_bert, deit, gpt2, transformer,
};

use crate::data::Tokenizer;

/// The model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The architecture, which decides the other keys of the section.
    #[serde(default)]
    pub kind: ModelKind,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads per block.
    pub heads: usize,
    /// Width of the residual stream; a multiple of 4 and of `heads`.
    pub d_model: usize,
    /// Width of the feed-forward network; a multiple of 4.
    pub d_ff: usize,
    /// Tokens per sequence; of a DeiT, its patches and the class token.
    pub sequence_length: usize,
    /// Pixels of a side of an image, of a DeiT; 0 for a model of text.
    #[serde(default)]
    pub image_size: usize,
    /// Pixels of a side of a patch; they divide those of an image.
    #[serde(default)]
    pub patch_size: usize,
    /// Activation of the feed-forward network.
    pub activation: Activation,
    /// Whether linear layers and norms have biases.
    pub bias: bool,
    /// Dropout probability, in [0, 1).
    pub dropout: f32,
    /// Probability in [0, 1) that a DeiT's last block drops a half block; 0 in its first, linear.
    #[serde(default)]
    pub drop_path: f32,
    /// Label smoothing of the training loss of a DeiT or a Transformer, in [0, 1).
    #[serde(default)]
    pub label_smoothing: f32,
    /// Linear layers that a method may prune.
    pub sparsify: Sparsify,
    /// Activations that the backward pass recomputes instead of keeping; changes no result.
    pub activation_checkpointing: ActivationCheckpointing,
}

impl ModelConfig {
    /// The parameter whose rows are the vocabulary or the classes.
    #[must_use]
    pub fn token_table(&self) -> &'static str {
        match self.kind {
            ModelKind::Gpt2 => gpt2::TOKEN_TABLE,
            ModelKind::Bert => bert::TOKEN_TABLE,
            ModelKind::CrammedBert => crammed_bert::TOKEN_TABLE,
            ModelKind::Deit => deit::CLASS_TABLE,
            ModelKind::Transformer => transformer::TOKEN_TABLE,
        }
    }

    /// Token ids for data with this many: BERT's mask token is one more, if the tokenizer has none.
    #[must_use]
    pub fn vocabulary(&self, data: u32, tokenizer: Option<&Tokenizer>) -> usize {
        let has_mask = tokenizer.is_some_and(|tokenizer| !tokenizer.special_tokens().is_empty());
        self.with_mask(data, has_mask)
    }

    /// Token ids for data with this many, with or without a mask token.
    pub(super) fn with_mask(&self, data: u32, has_mask: bool) -> usize {
        let needs_mask = match self.kind {
            ModelKind::Gpt2 | ModelKind::Deit | ModelKind::Transformer => false,
            ModelKind::Bert | ModelKind::CrammedBert => true,
        };
        data as usize + usize::from(needs_mask && !has_mask)
    }
}

/// A model architecture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelKind {
    /// GPT-2: a decoder with pre-layer normalization and a tied head.
    #[default]
    Gpt2,
    /// BERT: an encoder with post-layer normalization and a head for masked tokens.
    Bert,
    /// Crammed BERT: an encoder with pre-layer normalization, sinusoidal positions and a linear
    /// head for masked tokens.
    CrammedBert,
    /// DeiT: a classifier of images.
    Deit,
    /// The encoder-decoder Transformer, which translates.
    Transformer,
}

impl ModelKind {
    /// The architecture of a model.
    #[must_use]
    pub fn of(model: &ModelSpec) -> Self {
        match model {
            ModelSpec::Bert(_) => Self::Bert,
            ModelSpec::CrammedBert(_) => Self::CrammedBert,
            ModelSpec::Deit(_) => Self::Deit,
            ModelSpec::Transformer(_) => Self::Transformer,
            _ => Self::Gpt2,
        }
    }
}
