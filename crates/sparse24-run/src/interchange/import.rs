//! Import of weights that Hugging Face's library wrote.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{SIDE, format::Format, fsmt, transpose_rows};
use crate::{
    Error, Result,
    checkpoint::NamedTensor,
    tensors::{Entry, Shards, TensorFile},
};

/// Tensors where they are stored, by name without prefix.
type Found<'a> = BTreeMap<Cow<'a, str>, (&'a TensorFile, &'a Entry)>;

/// The result of an import.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// The requested tensors.
    pub weights: Vec<NamedTensor>,
    /// Heads, and other parts that a model may lack, for which there was no place.
    pub dropped: Vec<&'static str>,
}

/// Reads a model from a safetensors file (F32, F16 or BF16), or from a folder with one or with
/// several and an index: the `expected` names and shapes (ours: see [`super::shapes`]), in that
/// order, linear layers `[out, in]`. Only a pooler may be missing.
///
/// Names may lack the prefix of the format. Buffers are ignored, as are tensors that are equal to
/// the one that they are tied to, and biases that are all zero where none is expected.
///
/// # Errors
/// [`Error::File`] names the tensor: missing, unknown, of another shape or type, not finite; a
/// vocabulary of another size; a bias that is not zero for a model without; an untied head;
/// trained positions where the model computes them. [`Error::Io`].
pub fn import(
    path: &Path,
    format: &'static Format,
    expected: &[(String, Vec<usize>)],
) -> Result<Imported> {
    let model = Shards::open(path)?;
    let entries = model.files.iter().flat_map(|f| f.entries.iter().map(move |entry| (f, entry)));
    let is_buffer = |name: &str| format.buffers.iter().any(|end| name.ends_with(end));
    let mut found = Found::new();
    entries
        .clone()
        .filter(|(_, entry)| entry.name.ends_with(fsmt::POSITIONS))
        .try_for_each(|(file, entry)| fsmt::check_positions(file, entry))?;
    for (file, entry) in entries.filter(|(_, entry)| !is_buffer(&entry.name)) {
        if let Some((_, other)) = found.insert(format.short(&entry.name), (file, entry)) {
            return Err(file.refuse(entry, &format!("is also stored as {:?}", other.name)));
        }
    }
    let mut copies = Vec::new();
    for (copy, of) in format.tied {
        let Some(place) = found.remove(*copy) else { continue };
        match found.contains_key(*of) {
            true => copies.push((*of, place)),
            false => drop(found.insert((*of).into(), place)),
        }
    }
    let dropped = unexpected(format, &found, expected)?;
    let mut weights = Vec::with_capacity(expected.len());
    for (name, shape) in expected {
        let optional = format.optional.iter().find(|part| name.starts_with(*part));
        if optional.is_some_and(|part| !found.keys().any(|name| name.starts_with(part))) {
            continue;
        }
        let values = read(path, format, &found, name, shape)?;
        for (_, (file, copy)) in copies.iter().filter(|(of, _)| of == name) {
            if copy.elements() != values.len() || file.floats(copy)? != values {
                let problem =
                    format!("differs from {name:?}: the head is not tied, which this model needs");
                return Err(file.refuse(copy, &problem));
            }
        }
        weights.push(NamedTensor { name: name.clone(), shape: shape.clone(), values });
    }
    Ok(Imported { weights, dropped })
}

/// The parts that have no place in the model. Other tensors without a place are refused, except
/// zero biases.
fn unexpected(
    format: &'static Format,
    found: &Found<'_>,
    expected: &[(String, Vec<usize>)],
) -> Result<Vec<&'static str>> {
    let stored: BTreeSet<_> = expected.iter().flat_map(|(name, _)| (format.stored)(name)).collect();
    let mut dropped = BTreeSet::new();
    for (name, (file, entry)) in found.iter().filter(|(name, _)| !stored.contains(name.as_ref())) {
        let part = format.optional_part(name);
        if let Some(part) = part.filter(|part| !stored.iter().any(|name| name.starts_with(part))) {
            dropped.insert(part.trim_end_matches('.'));
            continue;
        }
        let weight = name.strip_suffix(".bias").map(|layer| format!("{layer}.weight"));
        if !weight.is_some_and(|weight| stored.contains(&weight)) {
            return Err(file.refuse(entry, "does not belong to the model"));
        }
        if file.floats(entry)?.iter().any(|&v| v != 0.0) {
            return Err(file
                .refuse(entry, "is not zero, and the model has no biases; set model.bias = true"));
        }
    }
    Ok(dropped.into_iter().collect())
}

fn missing(path: &Path, format: &Format, name: &str) -> Error {
    let full = format.full(name);
    let also = if full == name { String::new() } else { format!(" (nor {full:?})") };
    let advice = if format.heads.iter().any(|head| name.starts_with(head)) {
        ": it has another head, or none"
    } else if name.ends_with(".bias") {
        "; add it, with zeros if the model has no biases"
    } else {
        ""
    };
    Error::file(path, format!("holds no tensor {name:?}{also}{advice}"))
}

/// A parameter of ours: the tensors that hold it, one below the other.
fn read(
    path: &Path,
    format: &Format,
    found: &Found<'_>,
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>> {
    let parts = (format.stored)(name);
    let mut of_part = shape.to_vec();
    of_part.iter_mut().take(1).for_each(|rows| *rows /= parts.len());
    let mut values = Vec::new();
    for (part, left) in parts.iter().zip((0..parts.len()).rev()) {
        let place = found.get(part.as_str()).ok_or_else(|| missing(path, format, part))?;
        let mut read = read_part(format, *place, part, &of_part)?;
        if values.is_empty() {
            read.reserve_exact(left * read.len());
            values = read;
        } else {
            values.append(&mut read);
        }
    }
    Ok(values)
}

fn read_part(
    format: &Format,
    (file, entry): (&TensorFile, &Entry),
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>> {
    let is_transposed = (format.is_transposed)(name);
    let stored: Vec<_> = if is_transposed {
        shape.iter().rev().copied().collect()
    } else {
        (format.shaped)(name, shape)
    };
    if entry.shape != stored {
        let [tokens, positions] = format.tables;
        let problem = match (entry.shape.as_slice(), shape) {
            (&[rows, width], &[expected, also]) if width == also && name == tokens => {
                format!(
                    "has a vocabulary of {rows} tokens, but the model has {expected}; use the \
                        tokenizer that goes with the weights"
                )
            }
            (&[rows, width], &[expected, also]) if width == also && name == "head.weight" => {
                format!("is for {rows} classes, but the model has {expected}")
            }
            (&[rows, width], &[expected, also]) if width == also && name == positions => {
                format!("has {rows} positions, but the model has {expected}")
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
