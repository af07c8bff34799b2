//! Settings of a `config.json`, checked one by one.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::format::Format;
use crate::{Error, Result};
use sparse24_core::op::Activation;
use sparse24_train::{
    limits::{MOST, MOST_LAYERS},
    model::ModelSpec,
};

/// Hugging Face's names of activations; an export uses the first of several.
const ACTIVATIONS: [(&str, Activation); 4] = [
    ("gelu_new", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu", Activation::GeluErf),
    ("relu", Activation::Relu),
];

/// Hugging Face's name of the activation of a model.
pub(super) fn activation_name(format: &Format, model: &ModelSpec) -> Result<&'static str> {
    let activation = model.extents().activation;
    let named = ACTIVATIONS.iter().find(|(_, named)| *named == activation);
    let problem = || {
        format!(
            "no Hugging Face model has {}'s layers with a gated feed-forward, expected gelu, \
                gelu-erf or relu; the checkpoint's model.safetensors holds the weights",
            format.title
        )
    };
    Ok(named.ok_or_else(|| Error::setting("model.activation", problem()))?.0)
}

/// Parses the fields that `T` has.
pub(super) fn parse<'a, T: Deserialize<'a>>(path: &Path, title: &str, text: &'a [u8]) -> Result<T> {
    serde_json::from_slice(text)
        .map_err(|e| Error::file(path, format!("not a {title} configuration: {e}")))
}

/// Refuses a setting with another value than those admitted. An absent one has the default, which
/// is admitted.
pub(super) fn admit(path: &Path, key: &str, found: Option<&Value>, admitted: &[Value]) -> Result {
    let same = |found: &Value, expected: &Value| match (found.as_f64(), expected.as_f64()) {
        (Some(found), Some(expected)) => (found - expected).abs() <= 1e-6 * expected.abs(),
        _ => found == expected,
    };
    let Some(found) = found.filter(|found| !admitted.iter().any(|value| same(found, value))) else {
        return Ok(());
    };
    let admitted: Vec<_> = admitted.iter().map(Value::to_string).collect();
    Err(Error::file(path, format!("{key} is {found}, expected {}", admitted.join(" or "))))
}

/// The activation of a setting, or of its default.
pub(super) fn activation(
    path: &Path,
    key: &str,
    found: Option<&Value>,
    default: &str,
) -> Result<Activation> {
    admit(path, key, found, &ACTIVATIONS.map(|(name, _)| json!(name)))?;
    let name = found.and_then(Value::as_str).unwrap_or(default);
    let named = ACTIVATIONS.iter().find(|(named, _)| *named == name);
    Ok(named.expect("the default and what is admitted have a name").1)
}

/// The lengths of a model, each with its key.
pub(super) struct Sizes {
    pub(super) layers: (&'static str, usize),
    pub(super) heads: (&'static str, usize),
    pub(super) d_model: (&'static str, usize),
    pub(super) others: [(&'static str, usize); 3],
}

impl Sizes {
    /// Refuses lengths far above those of any model, so that a hostile file cannot create an
    /// endless list of parameters, and heads that do not divide d_model.
    pub(super) fn check(self, path: &Path) -> Result {
        let Self { layers, heads, d_model, others } = self;
        let lengths = [heads, d_model].into_iter().chain(others);
        let bounded = lengths.map(|(key, length)| (key, length, MOST));
        for (key, length, most) in bounded.chain([(layers.0, layers.1, MOST_LAYERS)]) {
            if !(1..=most).contains(&length) {
                bail!(path, "{key} is {length}, expected 1..={most}");
            }
        }
        if !d_model.1.is_multiple_of(heads.1) {
            let ((key, found), (by, heads)) = (d_model, heads);
            bail!(path, "{key} is {found}, expected a multiple of {by} = {heads}");
        }
        Ok(())
    }
}

/// The object of a `json!`.
pub(super) fn object(value: Value) -> Map<String, Value> {
    let Value::Object(fields) = value else { unreachable!("not an object") };
    fields
}
