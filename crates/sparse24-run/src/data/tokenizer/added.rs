//! The tokens that Hugging Face's library matches in a text before it encodes the rest: added
//! tokens and special tokens.

use std::{io::ErrorKind, path::Path};

use serde_json::{Map, Value};

use crate::{Error, Result, disk, json, tensors::shards::check_inside};

/// Bytes of the largest file that is read.
const LARGEST: u64 = 4 << 20;

/// Returns the `tokenizer_config.json` beside a tokenizer's file, or null if there is none. Fails
/// if it, `own` (the contents of that file if it is a `tokenizer.json`) or another file beside it
/// adds a token that is not `known`.
///
/// # Errors
/// [`Error::File`] for the first such token, a damaged file, or a link out of the folder;
/// [`Error::Io`].
pub(crate) fn config_beside(path: &Path, own: &Value, known: &[&str]) -> Result<Value> {
    let check = |path: &Path, file: &Value| {
        let found = added(file).into_iter().find(|token| !known.contains(token));
        let problem = "is not supported: text that contains it would be tokenized differently";
        found.map_or(Ok(()), |token| {
            Err(Error::file(path, format!("the added token {token:?} {problem}")))
        })
    };
    let read = |name: &str| {
        let Some(file) = read_beside(path, name)? else { return Ok(Value::Null) };
        let is_list = name == "added_tokens.json";
        let tokens = || Map::from_iter([(ADDED[0].to_owned(), file.keys().cloned().collect())]);
        let file = Value::Object(if is_list { tokens() } else { file });
        check(&disk::parent(path).join(name), &file).map(|()| file)
    };
    check(path, own)?;
    read("special_tokens_map.json")?;
    read("added_tokens.json")?;
    read("tokenizer_config.json")
}

/// The class of a tokenizer without a `tokenizer.json`, from its `tokenizer_config.json` or else
/// the `config.json` beside it.
///
/// # Errors
/// [`Error::File`] for a damaged file, or a link out of the folder; [`Error::Io`].
#[cfg(feature = "tokenizers")]
pub(super) fn class(path: &Path, config: &Value) -> Result<Option<String>> {
    let class = |config: &Value| config["tokenizer_class"].as_str().map(str::to_owned);
    match class(config) {
        None => Ok(read_beside(path, "config.json")?.and_then(|model| class(&model.into()))),
        found => Ok(found),
    }
}

/// The JSON object in a file beside a tokenizer's file, if there is one.
fn read_beside(path: &Path, name: &str) -> Result<Option<Map<String, Value>>> {
    let path = disk::parent(path).join(name);
    if path.is_symlink() {
        check_inside(&path)?;
    }
    match disk::read_small(&path, LARGEST) {
        Ok(bytes) => json::parse(&bytes, json::VALUES)
            .map(Some)
            .map_err(|problem| Error::file(&path, problem)),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The keys of several tokens, in a list or an object.
const ADDED: [&str; 4] =
    ["added_tokens", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"];

/// The tokens of a file, which are strings or objects.
fn added(file: &Value) -> Vec<&str> {
    let tokens = file.as_object().into_iter().flatten().flat_map(|(key, value)| match value {
        Value::Array(tokens) if ADDED.contains(&&**key) => tokens.iter().collect(),
        Value::Object(tokens) if ADDED.contains(&&**key) => tokens.values().collect(),
        token if key.ends_with("_token") => vec![token],
        _ => Vec::new(),
    });
    tokens.filter_map(|token| token.as_str().or_else(|| token["content"].as_str())).collect()
}
