//! Import of Hugging Face's GPT-2 weights.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{PREFIX, SIDE, is_conv1d, transpose_rows};
use crate::{
    Error,
    checkpoint::NamedTensor,
    tensors::{Entry, Shards, TensorFile},
};

/// A tensor where it is stored.
type Found<'a> = (&'a TensorFile, &'a Entry);

/// Reads a GPT-2 from a safetensors file (F32, F16 or BF16), or from a folder with one or with
/// several and an index: exactly the `expected` names and shapes (ours: see
/// [`super::Gpt2Config::parameters`]), in that order, linear layers `[out, in]`.
///
/// Names may carry the prefix `transformer.`. The causal-mask buffers `attn.bias` and
/// `attn.masked_bias` are ignored, as are `lm_head.weight` if it equals `wte.weight`, and
/// biases that are all zero where none is expected.
///
/// # Errors
/// [`Error::File`] names the tensor: missing, unknown, of another shape or type, not finite; a
/// vocabulary of another size; a bias that is not zero for a model without; an untied head.
/// [`Error::Io`].
pub fn import(path: &Path, expected: &[(String, Vec<usize>)]) -> Result<Vec<NamedTensor>, Error> {
    let model = Shards::open(path)?;
    let entries = model.files.iter().flat_map(|f| f.entries.iter().map(move |entry| (f, entry)));
    let is_buffer =
        |name: &str| name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    let mut found = BTreeMap::new();
    for (file, entry) in entries.filter(|(_, entry)| !is_buffer(&entry.name)) {
        let name = entry.name.strip_prefix(PREFIX).unwrap_or(&entry.name);
        if found.insert(name, (file, entry)).is_some() {
            let problem = "occurs twice, with and without the prefix \"transformer.\"";
            return Err(file.refuse(entry, problem));
        }
    }
    let head = found.remove("lm_head.weight");
    refuse_others(&found, expected)?;
    let mut tensors = Vec::with_capacity(expected.len());
    for (name, shape) in expected {
        let &(file, entry) = found.get(name.as_str()).ok_or_else(|| missing(path, name))?;
        let values = read(file, entry, name, shape)?;
        if let Some((file, head)) = head.filter(|_| name == "wte.weight")
            && (head.shape != entry.shape || file.floats(head)? != values)
        {
            return Err(file.refuse(
                head,
                "differs from \"wte.weight\": the head is not tied to \
                the embedding, which this model needs",
            ));
        }
        tensors.push(NamedTensor { name: name.clone(), shape: shape.clone(), values });
    }
    Ok(tensors)
}

/// Refuses tensors that have no place in the model, except zero biases.
fn refuse_others(
    found: &BTreeMap<&str, Found<'_>>,
    expected: &[(String, Vec<usize>)],
) -> Result<(), Error> {
    let expected: BTreeSet<_> = expected.iter().map(|(name, _)| name.as_str()).collect();
    for (name, (file, entry)) in found.iter().filter(|(name, _)| !expected.contains(*name)) {
        let weight = name.strip_suffix(".bias").map(|layer| format!("{layer}.weight"));
        if !weight.is_some_and(|weight| expected.contains(weight.as_str())) {
            return Err(file.refuse(entry, "has no place in the model"));
        }
        if file.floats(entry)?.iter().any(|&v| v != 0.0) {
            return Err(file
                .refuse(entry, "is not zero, and the model has no biases; set model.bias = true"));
        }
    }
    Ok(())
}

fn missing(path: &Path, name: &str) -> Error {
    let advice = if name.ends_with(".bias") {
        "; add it, with zeros if the model has no biases"
    } else {
        ""
    };
    Error::file(
        path,
        format!("holds no tensor {name:?} (nor {:?}){advice}", format!("{PREFIX}{name}")),
    )
}

fn read(file: &TensorFile, entry: &Entry, name: &str, shape: &[usize]) -> Result<Vec<f32>, Error> {
    let is_transposed = is_conv1d(name);
    let stored: Vec<_> =
        if is_transposed { shape.iter().rev().copied().collect() } else { shape.to_vec() };
    if entry.shape != stored {
        let problem = match (name, entry.shape.as_slice(), shape) {
            ("wte.weight", &[tokens, width], &[expected, also]) if width == also => {
                format!(
                    "has a vocabulary of {tokens} tokens, the model one of {expected}; use the \
                        tokenizer that goes with the weights"
                )
            }
            ("wpe.weight", &[positions, width], &[expected, also]) if width == also => {
                format!("has {positions} positions, the model a context of {expected}")
            }
            _ => format!("is expected to be {stored:?}"),
        };
        return Err(file.refuse(entry, &problem));
    }
    match *stored {
        [rows, columns] if is_transposed => {
            // Transposed while reading, so that a large tensor is not in memory twice.
            let (mut values, mut row) = (file.buffer(entry)?, 0);
            values.resize(rows * columns, 0.0);
            file.float_pieces(entry, SIDE * columns, |panel| {
                transpose_rows(panel, row, &mut values, [rows, columns]);
                row += SIDE;
            })?;
            Ok(values)
        }
        _ => file.floats(entry),
    }
}
