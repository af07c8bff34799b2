//! The contents of a checkpoint, tensors, masks and [`State`], and their layout in the four files.
//!
//! Invariant, checked before writing and after reading: names are unique, every length is that of
//! its shape, every float is finite, and every moment and mask belongs to a weight and has its
//! shape.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    path::Path,
};

use safetensors::Dtype;
use sparse24_core::Mask;

use super::{
    NamedTensor, State, Values,
    manifest::{MANIFEST, MASKS, MODEL, Manifest, OPTIMIZER, Parts, Recorder, STATE},
    tensor::fills,
    version1,
};
use crate::{
    Error, Result, disk, json,
    tensors::{self, Layout, TensorFile, first_non_finite},
};

const FIRST: &str = "exp_avg.";
const SECOND: &str = "exp_avg_sq.";
const AUXILIARY: &str = "auxiliary.";
/// Longest state that is read. Parsed, its lists of names take about 12 times as much memory.
const STATE_LIMIT: u64 = 1 << 20;
/// The tensor files, with the metadata of their headers.
const TENSORS: [(&str, &[(&str, &str)]); 3] =
    [(MODEL, &[("format", "pt")]), (OPTIMIZER, &[("format", "pt")]), (MASKS, &[])];

/// All that a resume needs, at an optimizer-step boundary.
///
/// Order is kept. A list of moments may be empty (an optimizer without it) or cover only some
/// weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Counters and identities.
    pub state: State,
    /// The weights, not pruned; linear layers are `[out, in]`.
    pub weights: Vec<NamedTensor>,
    /// Adam's mean of gradients, under the names of the weights.
    pub first_moments: Vec<NamedTensor>,
    /// Adam's mean of squared gradients, under the names of the weights.
    pub second_moments: Vec<NamedTensor>,
    /// The masks that the next sparse step or an evaluation would use, by weight.
    pub masks: Vec<(String, Mask)>,
    /// Further state of the training method and of the instruments.
    pub auxiliary: Vec<NamedTensor<Values>>,
}

/// A tensor as a file holds it.
struct Stored<'a> {
    file: &'static str,
    prefix: &'static str,
    name: &'a str,
    shape: Vec<usize>,
    data: Data<'a>,
}

#[derive(Clone, Copy)]
enum Data<'a> {
    F32(&'a [f32]),
    U32(&'a [u32]),
    U16(&'a [u16]),
}

impl Data<'_> {
    fn length(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::U16(values) => values.len(),
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::U32(_) => Dtype::U32,
            Self::U16(_) => Dtype::U16,
        }
    }

    fn bytes(self) -> u64 {
        (self.length() * self.dtype().bitsize() / 8) as u64
    }
}

impl Stored<'_> {
    fn full_name(&self) -> String {
        format!("{}{}", self.prefix, self.name)
    }
}

impl Checkpoint {
    /// The weight of this name.
    #[must_use]
    pub fn weight(&self, name: &str) -> Option<&NamedTensor> {
        self.weights.iter().find(|tensor| tensor.name == name)
    }

    /// BLAKE3 of the masks in order, as their tiles in little-endian u16; none without masks.
    #[must_use]
    pub fn mask_hash(&self) -> Option<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        let tiles = self.masks.iter().flat_map(|(_, mask)| mask.tiles());
        for tile in tiles {
            hasher.update(&tile.to_le_bytes());
        }
        (!self.masks.is_empty()).then(|| hasher.finalize())
    }

    /// All tensors, in the order of the files and within them.
    fn stored(&self) -> impl Iterator<Item = Stored<'_>> {
        let floats = [
            (MODEL, "", &self.weights),
            (OPTIMIZER, FIRST, &self.first_moments),
            (OPTIMIZER, SECOND, &self.second_moments),
        ];
        let floats = floats.into_iter().flat_map(|(file, prefix, list)| {
            list.iter().map(move |NamedTensor { name, shape, values }| Stored {
                file,
                prefix,
                name,
                shape: shape.clone(),
                data: Data::F32(values),
            })
        });
        let auxiliary = self.auxiliary.iter().map(|NamedTensor { name, shape, values }| Stored {
            file: OPTIMIZER,
            prefix: AUXILIARY,
            name,
            shape: shape.clone(),
            data: match values {
                Values::F32(values) => Data::F32(values),
                Values::U32(values) => Data::U32(values),
                Values::U16(values) => Data::U16(values),
            },
        });
        let masks = self.masks.iter().map(|(name, mask)| Stored {
            file: MASKS,
            prefix: "",
            name,
            shape: vec![mask.rows() / 4, mask.columns() / 4],
            data: Data::U16(mask.tiles()),
        });
        floats.chain(auxiliary).chain(masks)
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.stored().map(|tensor| tensor.data.bytes()).sum()
    }

    /// The header of a tensor file, and its tensors.
    fn file(&self, name: &str, metadata: &[(&str, &str)]) -> (Vec<u8>, Vec<Stored<'_>>) {
        let tensors: Vec<_> = self.stored().filter(|tensor| tensor.file == name).collect();
        let layout = |tensor: &Stored<'_>| Layout {
            name: tensor.full_name(),
            dtype: tensor.data.dtype(),
            shape: tensor.shape.clone(),
        };
        let layout: Vec<_> = tensors.iter().map(layout).collect();
        (tensors::header(metadata, &layout), tensors)
    }

    /// Refuses what [`load`] would refuse if it were written into this directory.
    pub(crate) fn check(&self, directory: &Path) -> Result {
        if let Some(problem) = self.contradiction() {
            return Err(Error::file(directory, problem));
        }
        self.check_finite()?;
        let length = json::pretty(&self.state).len() as u64;
        disk::check_size(&directory.join(STATE), length, STATE_LIMIT)?;
        let state = Parts::planned([("state".to_owned(), length)]);
        let mut files = BTreeMap::from([(STATE.to_owned(), state)]);
        for (name, metadata) in TENSORS {
            let (header, tensors) = self.file(name, metadata);
            let first = iter::once(("header".to_owned(), header.len() as u64));
            let others = tensors.iter().map(|tensor| (tensor.full_name(), tensor.data.bytes()));
            let parts = Parts::planned(first.chain(others));
            tensors::read_header(&directory.join(name), &mut &header[..], parts.size())?;
            files.insert(name.to_owned(), parts);
        }
        Manifest::new(self.state.step, files).seal(directory).map(drop)
    }

    /// Refuses values that must not be written.
    fn check_finite(&self) -> Result {
        for tensor in self.stored() {
            let Data::F32(values) = tensor.data else { continue };
            if let Some(element) = first_non_finite(values) {
                return Err(Error::NonFiniteCheckpoint {
                    step: self.state.step,
                    tensor: tensor.full_name(),
                    element,
                    value: values[element],
                    kept: None,
                });
            }
        }
        Ok(())
    }

    /// The first violation of the invariant.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let weights: BTreeMap<_, _> =
            self.weights.iter().map(|w| (w.name.as_str(), w.shape.as_slice())).collect();
        let masks: BTreeMap<_, _> =
            self.masks.iter().map(|(name, mask)| (name.as_str(), mask.shape())).collect();
        let State { total_steps, seed, config, .. } = &self.state;
        for (name, value, key) in
            [("total_steps", u64::from(*total_steps), "steps"), ("seed", *seed, "seed")]
        {
            let other = |recorded: &&String| **recorded != value.to_string();
            if let Some(recorded) = config.get(key).filter(other) {
                return Some(format!(
                    "its {STATE} has {name} {value}, but {key} = {recorded} in its config"
                ));
            }
        }
        let mut seen = BTreeSet::new();
        for tensor in self.stored() {
            let Stored { file, prefix, name, shape, data } = &tensor;
            if !fills(shape, data.length()) {
                let (name, values) = (tensor.full_name(), data.length());
                return Some(format!("{name:?} has shape {shape:?} and {values} values"));
            }
            if !seen.insert((*file, *prefix, *name)) || *name == "__metadata__" {
                return Some(format!(
                    "the name {:?} is used twice or reserved",
                    tensor.full_name()
                ));
            }
            let (what, shape) = match (*file, *prefix) {
                (_, FIRST | SECOND) => (format!("{:?}", tensor.full_name()), shape.as_slice()),
                (MASKS, _) => (format!("the mask {name:?}"), masks[name].as_slice()),
                _ => continue,
            };
            if weights.get(name) != Some(&shape) {
                let weight = weights
                    .get(name)
                    .map_or_else(|| "is missing".to_owned(), |shape| format!("{shape:?}"));
                return Some(format!("{what} has shape {shape:?}, its weight {weight}"));
            }
        }
        None
    }

    /// Writes the four files and then the manifest into an existing directory.
    pub(crate) fn write(&self, directory: &Path) -> Result {
        let mut files = BTreeMap::new();
        for (name, metadata) in TENSORS {
            let (header, tensors) = self.file(name, metadata);
            let mut file = Recorder::create(directory.join(name))?;
            file.write(&header)?;
            file.end_part("header");
            for tensor in tensors {
                let write = |bytes: &[u8]| file.write(bytes);
                match tensor.data {
                    Data::F32(values) => tensors::write(values, f32::to_le_bytes, write),
                    Data::U32(values) => tensors::write(values, u32::to_le_bytes, write),
                    Data::U16(values) => tensors::write(values, u16::to_le_bytes, write),
                }?;
                file.end_part(&tensor.full_name());
            }
            files.insert(name.into(), file.finish()?);
        }
        let mut state = Recorder::create(directory.join(STATE))?;
        state.write(&json::pretty(&self.state))?;
        state.end_part("state");
        files.insert(STATE.into(), state.finish()?);
        let mut manifest = disk::NewFile::create(directory.join(MANIFEST))?;
        manifest.write(&Manifest::new(self.state.step, files).seal(directory)?)?;
        manifest.sync()?;
        disk::sync_directory(directory)
    }
}

/// Reads a checkpoint directory.
///
/// The manifest is proved first, then the size and hashes of every file, before anything is parsed.
/// Memory beyond the tensors is proportional to the headers, whatever the bytes.
///
/// # Errors
/// [`Error::File`] names the file, and the tensor and bytes where there are any: a file that is
/// damaged, cut or not in the manifest, an unknown format version, or contents that contradict each
/// other. [`Error::Io`] if a file cannot be read.
pub fn load(checkpoint: &Path) -> Result<Checkpoint> {
    let manifest = Manifest::open(checkpoint)?;
    manifest.prove(checkpoint)?;
    let state = state_of(checkpoint, &manifest)?;
    let weights = read_tensors(&checkpoint.join(MODEL), TensorFile::floats)?;
    let mut loaded = Checkpoint {
        state,
        weights,
        first_moments: Vec::new(),
        second_moments: Vec::new(),
        masks: read_masks(&checkpoint.join(MASKS))?,
        auxiliary: Vec::new(),
    };
    let path = checkpoint.join(OPTIMIZER);
    for NamedTensor { name, shape, values } in read_tensors(&path, values)? {
        if let Some(name) = name.strip_prefix(AUXILIARY) {
            let values = match manifest.format_version {
                1 => version1::typed(name, values),
                _ => values,
            };
            loaded.auxiliary.push(NamedTensor { name: name.to_owned(), shape, values });
            continue;
        }
        let refuse = |problem: String| Error::file(&path, format!("tensor {name:?}: {problem}"));
        let (list, weight) = if let Some(weight) = name.strip_prefix(FIRST) {
            (&mut loaded.first_moments, weight)
        } else if let Some(weight) = name.strip_prefix(SECOND) {
            (&mut loaded.second_moments, weight)
        } else {
            let starts = format!("{FIRST:?}, {SECOND:?} or {AUXILIARY:?}");
            return Err(refuse(format!("expected a name that starts with {starts}")));
        };
        let Values::F32(values) = values else {
            return Err(refuse("expected F32, F16 or BF16".to_owned()));
        };
        list.push(NamedTensor { name: weight.to_owned(), shape, values });
    }
    match loaded.contradiction() {
        None => Ok(loaded),
        Some(problem) => Err(Error::file(checkpoint, problem)),
    }
}

/// The number of rows of a weight of a checkpoint that was proved; 0 without the weight.
pub(crate) fn rows(checkpoint: &Path, weight: &str) -> Result<usize> {
    let file = TensorFile::open(&checkpoint.join(MODEL))?;
    let found = file.entries.iter().find(|entry| entry.name == weight);
    Ok(found.and_then(|entry| entry.shape.first().copied()).unwrap_or(0))
}

/// The state alone, proved by nothing but the manifest's step.
pub(crate) fn read_state(checkpoint: &Path) -> Result<State> {
    state_of(checkpoint, &Manifest::open(checkpoint)?)
}

fn state_of(checkpoint: &Path, manifest: &Manifest) -> Result<State> {
    let path = checkpoint.join(STATE);
    let text = disk::read_small(&path, STATE_LIMIT)?;
    let state: State = match manifest.format_version {
        1 => serde_json::from_slice::<version1::State>(&text).map(Into::into),
        _ => serde_json::from_slice(&text),
    }
    .map_err(|e| Error::file(&path, format!("not a checkpoint state: {e}")))?;
    if state.step == manifest.step {
        return Ok(state);
    }
    Err(Error::file(
        path,
        format!("is of step {}, but the manifest of step {}", state.step, manifest.step),
    ))
}

fn read_tensors<V>(
    path: &Path,
    read: impl Fn(&TensorFile, &tensors::Entry) -> Result<V>,
) -> Result<Vec<NamedTensor<V>>> {
    let file = TensorFile::open(path)?;
    let tensor = |entry: &tensors::Entry| {
        let values = read(&file, entry)?;
        Ok(NamedTensor { name: entry.name.clone(), shape: entry.shape.clone(), values })
    };
    file.entries.iter().map(tensor).collect()
}

fn values(file: &TensorFile, entry: &tensors::Entry) -> Result<Values> {
    match entry.dtype {
        Dtype::U32 => file.integers(entry, Dtype::U32, u32::from_le_bytes).map(Values::U32),
        Dtype::U16 => file.integers(entry, Dtype::U16, u16::from_le_bytes).map(Values::U16),
        _ => file.floats(entry).map(Values::F32),
    }
}

fn read_masks(path: &Path) -> Result<Vec<(String, Mask)>> {
    let tiles = |file: &TensorFile, entry: &tensors::Entry| {
        let lengths: Vec<_> = entry.shape.iter().map(|length| length.checked_mul(4)).collect();
        let &[Some(rows), Some(columns)] = lengths.as_slice() else {
            return Err(file.refuse(entry, "is not a mask: expected [rows/4, columns/4]"));
        };
        let tiles = file.integers(entry, Dtype::U16, u16::from_le_bytes)?;
        Ok(Mask::from_tiles(rows, columns, tiles)?)
    };
    Ok(read_tensors(path, tiles)?.into_iter().map(|mask| (mask.name, mask.values)).collect())
}
