//! The contents of a checkpoint: tensors, masks and [`State`], and how they stand in the four
//! files.
//!
//! Invariant of what is written and of what is read: names are unique, every length is its shape's,
//! every value is finite, every moment and mask belongs to a weight and has its shape. Deliberately
//! absent: directories and their life ([`super::save`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use safetensors::Dtype;
use sparse24_core::Mask;

use super::{
    State,
    manifest::{MASKS, MODEL, Manifest, OPTIMIZER, Parts, Recorder, STATE},
};
use crate::{
    Error, disk,
    tensors::{self, Layout, TensorFile, first_non_finite},
};

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";
const AUXILIARY: &str = "auxiliary.";
/// Longest state that is read; its lists of names take a dozen times the memory of their text.
const STATE_LIMIT: u64 = 1 << 20;

/// A named host tensor, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// Its name, unique among its kind.
    pub name: String,
    /// `[length]` or `[rows, columns]`.
    pub shape: Vec<usize>,
    /// As many as the shape says.
    pub values: Vec<f32>,
}

/// Everything that a resume needs, at an optimizer-step boundary.
///
/// Order is kept. A list of moments may be empty (an optimizer without it) or cover some weights
/// only.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Counters and identities.
    pub state: State,
    /// The weights, not pruned; linear layers `[out, in]`.
    pub weights: Vec<NamedTensor>,
    /// The optimizer's mean of gradients, under the names of the weights.
    pub first_moments: Vec<NamedTensor>,
    /// The optimizer's mean of squared gradients, under the names of the weights.
    pub second_moments: Vec<NamedTensor>,
    /// The masks that go with the weights, under their names: those that the next sparse step, or
    /// an evaluation, would use.
    pub masks: Vec<(String, Mask)>,
    /// What a training method owns beyond that.
    pub auxiliary: Vec<NamedTensor>,
}

impl Checkpoint {
    /// The weight of this name.
    #[must_use]
    pub fn weight(&self, name: &str) -> Option<&NamedTensor> {
        self.weights.iter().find(|tensor| tensor.name == name)
    }

    /// The lists of tensors, each with the prefix of its names and its file.
    fn lists(&self) -> [(&'static str, &[NamedTensor]); 4] {
        [
            ("", &self.weights),
            (FIRST, &self.first_moments),
            (SECOND, &self.second_moments),
            (AUXILIARY, &self.auxiliary),
        ]
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        let floats = self
            .lists()
            .into_iter()
            .flat_map(|(_, list)| list)
            .map(|tensor| 4 * tensor.values.len());
        let masks = self.masks.iter().map(|(_, mask)| 2 * mask.tiles().len());
        floats.chain(masks).sum::<usize>() as u64
    }

    /// Refuses what must not be written.
    pub(crate) fn check_finite(&self) -> Result<(), Error> {
        for (prefix, tensor) in self
            .lists()
            .into_iter()
            .flat_map(|(prefix, list)| list.iter().map(move |tensor| (prefix, tensor)))
        {
            if let Some(element) = first_non_finite(&tensor.values) {
                return Err(Error::NonFiniteCheckpoint {
                    step: self.state.step,
                    tensor: format!("{prefix}{}", tensor.name),
                    element,
                    value: tensor.values[element],
                });
            }
        }
        Ok(())
    }

    /// The first thing that contradicts the invariant.
    pub(crate) fn contradiction(&self) -> Option<String> {
        for (prefix, list) in self.lists() {
            let mut seen = BTreeSet::new();
            for NamedTensor { name, shape, values } in list {
                if shape.iter().try_fold(1, |product: usize, &length| product.checked_mul(length))
                    != Some(values.len())
                {
                    return Some(format!(
                        "{:?} has shape {shape:?} and {} values",
                        format!("{prefix}{name}"),
                        values.len()
                    ));
                }
                if !seen.insert(name.as_str()) || name == "__metadata__" {
                    return Some(format!(
                        "the name {:?} stands twice or is reserved",
                        format!("{prefix}{name}")
                    ));
                }
            }
        }
        let weights: BTreeMap<_, _> =
            self.weights.iter().map(|w| (w.name.as_str(), w.shape.as_slice())).collect();
        for (prefix, moment) in [(FIRST, &self.first_moments), (SECOND, &self.second_moments)]
            .into_iter()
            .flat_map(|(prefix, list)| list.iter().map(move |moment| (prefix, moment)))
        {
            let expected = weights.get(moment.name.as_str());
            if expected != Some(&moment.shape.as_slice()) {
                return Some(format!(
                    "{:?} has shape {:?}, its weight {}",
                    format!("{prefix}{}", moment.name),
                    moment.shape,
                    shape_or_missing(expected)
                ));
            }
        }
        let mut seen = BTreeSet::new();
        for (name, mask) in &self.masks {
            let expected = weights.get(name.as_str());
            if expected != Some(&mask.shape().as_slice()) {
                return Some(format!(
                    "the mask {name:?} has shape {:?}, its weight {}",
                    mask.shape(),
                    shape_or_missing(expected)
                ));
            }
            if !seen.insert(name) {
                return Some(format!("the mask {name:?} stands twice"));
            }
        }
        None
    }

    /// Writes the four files and then the manifest into an existing directory.
    pub(crate) fn write(&self, directory: &Path) -> Result<(), Error> {
        let mut files = BTreeMap::new();
        let [weights, optimizer @ ..] = self.lists();
        files.insert(MODEL.into(), write_tensors(&directory.join(MODEL), &[weights])?);
        files.insert(OPTIMIZER.into(), write_tensors(&directory.join(OPTIMIZER), &optimizer)?);
        files.insert(MASKS.into(), write_masks(&directory.join(MASKS), &self.masks)?);
        let mut state = Recorder::create(directory.join(STATE))?;
        let mut text =
            serde_json::to_vec_pretty(&self.state).expect("strings and integers are JSON");
        text.push(b'\n');
        state.write(&text)?;
        state.end_part("state");
        files.insert(STATE.into(), state.finish()?);
        let mut manifest = disk::NewFile::create(directory.join(super::manifest::MANIFEST))?;
        manifest.write(&Manifest::new(self.state.step, files).seal())?;
        manifest.sync()?;
        disk::sync_directory(directory)
    }
}

fn shape_or_missing(shape: Option<&&[usize]>) -> String {
    shape.map_or_else(|| "is missing".into(), |shape| format!("{shape:?}"))
}

fn write_tensors(path: &Path, lists: &[(&str, &[NamedTensor])]) -> Result<Parts, Error> {
    let tensors =
        || lists.iter().flat_map(|(prefix, list)| list.iter().map(move |tensor| (prefix, tensor)));
    let layout: Vec<_> = tensors()
        .map(|(prefix, t)| Layout {
            name: format!("{prefix}{}", t.name),
            dtype: Dtype::F32,
            shape: t.shape.clone(),
        })
        .collect();
    let mut file = Recorder::create(path.to_owned())?;
    file.write(&tensors::header(&[("format", "pt")], &layout))?;
    file.end_part("header");
    for ((_, tensor), Layout { name, dtype, .. }) in tensors().zip(&layout) {
        tensors::write_floats(&tensor.values, *dtype, |bytes| file.write(bytes))?;
        file.end_part(name);
    }
    file.finish()
}

fn write_masks(path: &Path, masks: &[(String, Mask)]) -> Result<Parts, Error> {
    let tiles = |mask: &Mask| vec![mask.rows() / 4, mask.columns() / 4];
    let layout: Vec<_> = masks
        .iter()
        .map(|(name, mask)| Layout { name: name.clone(), dtype: Dtype::U16, shape: tiles(mask) })
        .collect();
    let mut file = Recorder::create(path.to_owned())?;
    file.write(&tensors::header(&[], &layout))?;
    file.end_part("header");
    for (name, mask) in masks {
        tensors::write_tiles(mask.tiles(), |bytes| file.write(bytes))?;
        file.end_part(name);
    }
    file.finish()
}

/// Reads a checkpoint directory.
///
/// The manifest proves itself, then every file's size and hashes, before anything is parsed. Memory
/// beyond the tensors is proportional to the headers, whatever the bytes.
///
/// # Errors
/// [`Error::File`] names the file, and the tensor and bytes where there are any: a damaged, cut or
/// missing-from-manifest file, another format version, or contents that contradict each other.
/// [`Error::Io`] if a file cannot be read.
pub fn load(checkpoint: &Path) -> Result<Checkpoint, Error> {
    let manifest = Manifest::open(checkpoint)?;
    manifest.prove(checkpoint)?;
    let state = read_state(checkpoint)?;
    if state.step != manifest.step {
        return Err(Error::file(
            checkpoint.join(STATE),
            format!("is of step {}, the manifest of step {}", state.step, manifest.step),
        ));
    }
    let (mut first_moments, mut second_moments, mut auxiliary) =
        (Vec::new(), Vec::new(), Vec::new());
    let weights = read_tensors(&checkpoint.join(MODEL))?;
    for mut tensor in read_tensors(&checkpoint.join(OPTIMIZER))? {
        let lists = [
            (FIRST, &mut first_moments),
            (SECOND, &mut second_moments),
            (AUXILIARY, &mut auxiliary),
        ];
        let Some((prefix, list)) =
            lists.into_iter().find(|(prefix, _)| tensor.name.starts_with(prefix))
        else {
            return Err(Error::file(
                checkpoint.join(OPTIMIZER),
                format!(
                    "tensor {:?}: expected a name that begins with {FIRST:?}, {SECOND:?} or {AUXILIARY:?}",
                    tensor.name
                ),
            ));
        };
        tensor.name.drain(..prefix.len());
        list.push(tensor);
    }
    let masks = read_masks(&checkpoint.join(MASKS))?;
    let loaded = Checkpoint { state, weights, first_moments, second_moments, masks, auxiliary };
    match loaded.contradiction() {
        None => Ok(loaded),
        Some(problem) => Err(Error::file(checkpoint, problem)),
    }
}

/// The state alone, which nothing proves.
pub(super) fn read_state(checkpoint: &Path) -> Result<State, Error> {
    let path = checkpoint.join(STATE);
    serde_json::from_slice(&disk::read_small(&path, STATE_LIMIT)?)
        .map_err(|e| Error::file(&path, format!("is no checkpoint state: {e}")))
}

fn read_tensors(path: &Path) -> Result<Vec<NamedTensor>, Error> {
    let mut file = TensorFile::open(path)?;
    let entries = std::mem::take(&mut file.entries);
    entries
        .into_iter()
        .map(|entry| {
            let values = file.floats(&entry)?;
            Ok(NamedTensor { name: entry.name, shape: entry.shape, values })
        })
        .collect()
}

fn read_masks(path: &Path) -> Result<Vec<(String, Mask)>, Error> {
    let mut file = TensorFile::open(path)?;
    let entries = std::mem::take(&mut file.entries);
    entries
        .into_iter()
        .map(|entry| {
            let elements = |length: usize| length.checked_mul(4);
            let &[Some(rows), Some(columns)] =
                entry.shape.iter().map(|&l| elements(l)).collect::<Vec<_>>().as_slice()
            else {
                return Err(file.refuse(&entry, "is no mask: expected [rows/4, columns/4]"));
            };
            let mask = Mask::from_tiles(rows, columns, file.tiles(&entry)?)?;
            Ok((entry.name, mask))
        })
        .collect()
}
