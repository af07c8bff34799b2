//! Export of weights for Hugging Face's library.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use serde_json::json;
use sparse24_core::{Mask, MaskKind};

use super::{
    CONFIG, WEIGHTS,
    folder::{Description, shapes, to_json},
    format::Format,
    tokenizer, transpose,
};
use crate::{
    Error, Result,
    checkpoint::{NamedTensor, PhaseKind},
    disk, json,
    tensors::{self, Layout, TensorFile},
};
use sparse24_train::{
    model::{BertSpec, Gpt2Spec, ModelSpec},
    nn::Bias,
};

/// Stored type of exported values; F16 and BF16 round to nearest, ties to even.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 4 bytes, exact.
    F32,
    /// 2 bytes, IEEE half.
    F16,
    /// 2 bytes, bfloat16.
    Bf16,
}

impl Dtype {
    /// The type in the file, and its name in PyTorch.
    fn stored(self) -> (safetensors::Dtype, &'static str) {
        match self {
            Self::F32 => (safetensors::Dtype::F32, "float32"),
            Self::F16 => (safetensors::Dtype::F16, "float16"),
            Self::Bf16 => (safetensors::Dtype::BF16, "bfloat16"),
        }
    }
}

/// The values to export.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// The weights, not pruned.
    Dense,
    /// The weights under their masks, with zeros for pruned ones: a 2:4 model.
    Sparse24 {
        /// Phase of the checkpoint; in a dense one the weights no longer match their masks.
        phase: PhaseKind,
        /// Masks by weight.
        masks: &'a [(String, Mask)],
        /// Structure required of every mask.
        structure: MaskKind,
    },
}

/// Result of an export.
#[derive(Debug, Clone)]
pub struct Exported {
    /// How it is stored.
    pub format: &'static Format,
    /// Biases that the model lacks and Hugging Face's format requires; written as zeros.
    pub zero_biases: Vec<String>,
    /// Weights verified to be 2:4 in the file.
    pub sparse24: Vec<String>,
    /// Whether there are tokenizer files.
    pub has_tokenizer: bool,
}

/// Writes a folder with `model.safetensors` and `config.json` that the `from_pretrained` of a class
/// of transformers loads, and for GPT-2's tokenizer and for bytes the `tokenizer.json` and
/// `tokenizer_config.json` of `AutoTokenizer`.
///
/// `folder` must not exist, or be empty; its parents are created. Nothing is left behind on an
/// error. A 2:4 export is read back and verified: each mask has its structure, and pruned elements
/// are zero.
///
/// # Errors
/// [`Error::Setting`] for a model that transformers does not have; [`Error::File`] names the folder
/// and the reason: a folder that is not empty, a weight that is missing, unknown or of another
/// shape, a value that is not finite in `dtype`, a checkpoint that is not 2:4. [`Error::Train`] for
/// a mask without the structure. [`Error::Parameter`] for values that do not fill their shape.
/// [`Error::Io`].
pub fn export(
    folder: &Path,
    weights: &[NamedTensor],
    description: Description<'_>,
    dtype: Dtype,
    values: Values<'_>,
) -> Result<Exported> {
    let Description { spec, tokenizer, .. } = description;
    let plan = Plan::new(folder, weights, spec, values)?;
    let (_, torch_name) = dtype.stored();
    let end = tokenizer::end_of_text(tokenizer);
    let config_json = to_json(plan.format, &description, torch_name, end);
    let mut files = tokenizer.map_or_else(Vec::new, |t| tokenizer::files(t, spec));
    let has_tokenizer = !files.is_empty();
    if has_tokenizer && matches!(spec, ModelSpec::Transformer(_)) {
        let config = json!({ "langs": description.languages });
        files.push(("tokenizer_config.json", json::pretty(&config)));
    }
    files.push((CONFIG, config_json));
    disk::fill_folder(folder, |aside| {
        plan.write(aside, dtype)?;
        plan.prove(&aside.join(WEIGHTS))?;
        files.iter().try_for_each(|(name, contents)| {
            let mut file = disk::NewFile::create(aside.join(name))?;
            file.write(contents)?;
            file.sync()
        })
    })?;
    let names = |is: fn(&Item<'_>) -> bool| {
        plan.items.iter().filter(|item| is(item)).map(|item| item.name.clone()).collect()
    };
    Ok(Exported {
        format: plan.format,
        zero_biases: names(|item| item.weight.is_none()),
        sparse24: names(|item| item.mask.is_some()),
        has_tokenizer,
    })
}

/// The model with the biases, or the width of the pooler, that its format requires.
fn required(spec: &ModelSpec) -> ModelSpec {
    match spec {
        ModelSpec::Gpt2(spec) => ModelSpec::Gpt2(Gpt2Spec { bias: Bias::Present, ..*spec }),
        ModelSpec::Bert(spec) => ModelSpec::Bert(BertSpec { pooler: spec.d_model, ..*spec }),
        other => other.clone(),
    }
}

/// One tensor to be written, in our orientation.
struct Item<'a> {
    name: String,
    shape: Vec<usize>,
    /// `None` for a bias of zeros.
    weight: Option<&'a NamedTensor>,
    mask: Option<&'a Mask>,
}

struct Plan<'a> {
    folder: PathBuf,
    format: &'static Format,
    items: Vec<Item<'a>>,
}

impl<'a> Plan<'a> {
    /// Checks everything that can be checked before writing.
    fn new(
        folder: &Path,
        weights: &'a [NamedTensor],
        spec: &ModelSpec,
        values: Values<'a>,
    ) -> Result<Self> {
        let format = Format::of(spec)?;
        let refuse =
            |problem: String| Error::file(folder, format!("cannot be exported to: {problem}"));
        weights.iter().try_for_each(NamedTensor::check_length)?;
        let mut masks = HashMap::new();
        if let Values::Sparse24 { phase, masks: given, structure } = values {
            if phase == PhaseKind::Dense || given.is_empty() {
                return Err(refuse(format!(
                    "the checkpoint is of a {phase} phase with {} masks, so it is not a 2:4 \
                        model; export its dense values, or take the checkpoint at the switch to \
                        the dense phase",
                    given.len()
                )));
            }
            given.iter().try_for_each(|(_, mask)| mask.check(structure))?;
            masks.extend(given.iter().map(|(name, mask)| (name.as_str(), mask)));
        }
        let mut weights: HashMap<_, _> =
            weights.iter().map(|weight| (weight.name.as_str(), weight)).collect();
        let mut items = Vec::new();
        for (name, shape) in shapes(&required(spec))? {
            let (weight, mask) = (weights.remove(name.as_str()), masks.remove(name.as_str()));
            match weight {
                None if !name.ends_with(".bias") => {
                    return Err(refuse(format!("the weight {name:?} is missing")));
                }
                // A matrix of one row is trained as a vector.
                Some(NamedTensor { shape: found, .. })
                    if *found != shape && (shape[0] != 1 || *found != shape[1..]) =>
                {
                    return Err(refuse(format!(
                        "the weight {name:?} is {found:?}, {} expects {shape:?}",
                        format.title
                    )));
                }
                _ => {}
            }
            if let Some(mask) = mask.filter(|mask| mask.shape() != *shape) {
                return Err(refuse(format!(
                    "the mask of {name:?} is {:?}, its weight {shape:?}",
                    mask.shape()
                )));
            }
            items.push(Item { name, shape, weight, mask });
        }
        match weights.keys().chain(masks.keys()).min() {
            Some(name) => {
                Err(refuse(format!("{name:?} does not exist in Hugging Face's {}", format.title)))
            }
            None => Ok(Self { folder: folder.to_owned(), format, items }),
        }
    }

    /// The names of the tensors that hold a parameter, and their common shape, in our orientation.
    fn parts(&self, item: &Item<'_>) -> (Vec<String>, Vec<usize>) {
        let names = (self.format.stored)(&item.name);
        let mut shape = item.shape.clone();
        shape[0] /= names.len();
        (names, shape)
    }

    fn is_transposed(&self, item: &Item<'_>) -> bool {
        (self.format.is_transposed)(&item.name)
    }

    fn write(&self, into: &Path, dtype: Dtype) -> Result {
        let (stored, _) = dtype.stored();
        let mut layout = Vec::new();
        for item in &self.items {
            let (names, mut shape) = self.parts(item);
            if self.is_transposed(item) {
                shape.reverse();
            }
            layout.extend(names.iter().map(|name| Layout {
                name: self.format.full(name),
                dtype: stored,
                shape: (self.format.shaped)(name, &shape),
            }));
        }
        let mut file = disk::NewFile::create(into.join(WEIGHTS))?;
        file.write(&tensors::header(&[("format", "pt")], &layout))?;
        for item in &self.items {
            let values = item.values();
            if let Some(at) = values.iter().position(|&v| !tensors::round(v, stored).is_finite()) {
                let problem = format!(
                    "{:?} holds {} at element {at}, which is not finite in {stored}",
                    item.name, values[at]
                );
                bail!(&self.folder, "cannot be exported to: {problem}");
            }
            let values = match *item.shape {
                [rows, columns] if self.is_transposed(item) => transpose(&values, [rows, columns]),
                _ => values,
            };
            tensors::write_floats(&values, stored, |bytes| file.write(bytes))?;
        }
        file.sync()
    }

    /// Reads the masked weights back and checks that pruned elements are zero.
    fn prove(&self, path: &Path) -> Result {
        if self.items.iter().all(|item| item.mask.is_none()) {
            return Ok(());
        }
        let file = TensorFile::open(path)?;
        let mut entries = file.entries.iter();
        for item in &self.items {
            let (names, _) = self.parts(item);
            let parts: Vec<_> = entries.by_ref().take(names.len()).collect();
            let Some(mask) = item.mask else { continue };
            let mut values = Vec::new();
            for entry in &parts {
                values.extend(file.floats(entry)?);
            }
            if self.is_transposed(item) {
                values = transpose(&values, [mask.columns(), mask.rows()]);
            }
            if let Some(at) =
                pruned(mask).zip(&values).position(|(is_pruned, &v)| is_pruned && v != 0.0)
            {
                let problem = format!(
                    "should be 2:4 and is not: element {at} is pruned, found {}",
                    values[at]
                );
                return Err(file.refuse(parts[0], &problem));
            }
        }
        Ok(())
    }
}

impl Item<'_> {
    /// The values in our orientation, under the mask.
    fn values(&self) -> Vec<f32> {
        let Some(weight) = self.weight else { return vec![0.0; self.shape.iter().product()] };
        match self.mask {
            None => weight.values.clone(),
            Some(mask) => pruned(mask)
                .zip(&weight.values)
                .map(|(is_pruned, &v)| if is_pruned { 0.0 } else { v })
                .collect(),
        }
    }
}

/// Whether each element of the matrix, row-major, is pruned.
fn pruned(mask: &Mask) -> impl Iterator<Item = bool> + '_ {
    (0..mask.rows())
        .flat_map(move |row| (0..mask.columns()).map(move |column| !mask.keeps(row, column)))
}
