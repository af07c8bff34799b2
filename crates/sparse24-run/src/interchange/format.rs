//! How Hugging Face stores a model: the names of its tensors, and its configuration.
//!
//! Our names are theirs without a prefix; a parameter of ours may be several tensors of theirs, one
//! below the other.

use std::{borrow::Cow, path::Path};

use serde_json::{Map, Value};
use sparse24_core::MaskKind;
use sparse24_train::model::ModelSpec;

use crate::Result;

/// A model of Hugging Face's library, or of timm.
#[derive(Debug)]
pub struct Format {
    /// `model_type` in `config.json`; "timm" for timm's, which has none.
    pub name: &'static str,
    /// The name in messages.
    pub(super) title: &'static str,
    /// Prefix of all tensors but those of `heads`; files of a model without a head lack it.
    pub(super) prefix: &'static str,
    /// The beginnings of the names of heads. A model may have another one, or none.
    pub(super) heads: &'static [&'static str],
    /// The beginnings of the names of other parts that a model may lack.
    pub(super) optional: &'static [&'static str],
    /// Tensors that repeat another one.
    pub(super) tied: &'static [(&'static str, &'static str)],
    /// The ends of the names of tensors that are no weights.
    pub(super) buffers: &'static [&'static str],
    /// The tables of tokens and of positions.
    pub(super) tables: [&'static str; 2],
    /// The classes of a model that is not fine-tuned, that predicts a class or a value of a
    /// sequence, and that predicts a span.
    pub(super) classes: [&'static str; 3],
    /// The tensors that hold a parameter of ours, without prefix.
    pub(super) stored: fn(&str) -> Vec<String>,
    /// The shape in a file of one of these tensors, for its rows and columns, or its length.
    pub(super) shaped: fn(&str, &[usize]) -> Vec<usize>,
    /// Whether a weight is stored as `[in, out]`.
    pub(super) is_transposed: fn(&str) -> bool,
    /// The shape in `config.json`.
    pub(super) read: fn(&Path, &[u8]) -> Result<ModelSpec>,
    /// The fields of `config.json` that only this format has; the token that ends a text.
    pub(super) fields: fn(&ModelSpec, Option<u32>) -> Map<String, Value>,
    /// Part of the names of attention weights.
    pub(super) attention: &'static str,
    /// Options of `sparse24 verify` for the weights of feed-forward layers, and for those of all
    /// blocks.
    pub(super) filters: [&'static str; 2],
}

impl Format {
    /// The options of `sparse24 verify`, except `--mask`, for these of our weights.
    #[must_use]
    pub fn filter(&self, weights: &[String]) -> &'static str {
        let [feed_forward, blocks] = self.filters;
        let has_attention = weights.iter().any(|name| name.contains(self.attention));
        if has_attention { blocks } else { feed_forward }
    }

    /// The structure of a mask in the file.
    #[must_use]
    pub fn stored_mask(&self, weight: &str, mask: MaskKind) -> MaskKind {
        match mask {
            MaskKind::RowWise if (self.is_transposed)(weight) => MaskKind::ColumnWise,
            MaskKind::ColumnWise if (self.is_transposed)(weight) => MaskKind::RowWise,
            other => other,
        }
    }

    /// The name without the prefix, and as newer versions spell it.
    pub(super) fn short<'a>(&self, name: &'a str) -> Cow<'a, str> {
        let name = name.strip_prefix(self.prefix).unwrap_or(name);
        for (old, new) in [("LayerNorm.gamma", "weight"), ("LayerNorm.beta", "bias")] {
            if let Some(of) = name.strip_suffix(old) {
                return Cow::Owned(format!("{of}LayerNorm.{new}"));
            }
        }
        Cow::Borrowed(name)
    }

    /// The name in a file.
    pub(super) fn full(&self, name: &str) -> String {
        let has_prefix = !self.heads.iter().any(|head| name.starts_with(head));
        format!("{}{name}", if has_prefix { self.prefix } else { "" })
    }

    /// The part of the model that it may lack to which this tensor belongs.
    pub(super) fn optional_part(&self, name: &str) -> Option<&'static str> {
        self.heads.iter().chain(self.optional).copied().find(|part| name.starts_with(part))
    }
}
