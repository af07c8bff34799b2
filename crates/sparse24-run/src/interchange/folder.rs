//! The formats, and the model that the `config.json` of a folder describes.

use std::{collections::BTreeMap, fs, mem, path::Path};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    CONFIG, bert,
    config::{activation_name, object, parse},
    format::Format,
    fsmt, gpt2, timm,
};
use crate::{Error, Result, data::Tokenizer, disk, json, tensors::shards::check_inside};
use sparse24_train::{
    limits::MOST,
    model::ModelSpec,
    nn::{Prediction, Role},
};

/// Every format.
pub const FORMATS: &[Format] = &[gpt2::FORMAT, bert::FORMAT, timm::FORMAT, fsmt::FORMAT];

impl Format {
    /// The format of a model.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that Hugging Face's library does not have.
    pub fn of(model: &ModelSpec) -> Result<&'static Self> {
        let format = match model {
            ModelSpec::Gpt2(_) => &gpt2::FORMAT,
            ModelSpec::Bert(_) => &bert::FORMAT,
            ModelSpec::Deit(_) => &timm::FORMAT,
            ModelSpec::Transformer(_) => &fsmt::FORMAT,
            _ => {
                bail!(
                    setting = "model.kind",
                    "Hugging Face's library has no crammed BERT, expected gpt2 or bert; \
                    the checkpoint's model.safetensors holds the weights"
                );
            }
        };
        activation_name(format, model)?;
        Ok(format)
    }
}

/// The model that the `config.json` of a folder describes.
#[derive(Debug, Clone, PartialEq)]
pub struct FolderModel {
    /// Its shape, with biases, and with its prediction if it has a head for one class or one number
    /// per sequence, or for a span.
    pub spec: ModelSpec,
    /// Names of the classes that it predicts.
    pub labels: Vec<String>,
    /// The languages from and to which it translates; empty if it does not or does not name them.
    pub languages: [String; 2],
}

#[derive(Deserialize)]
#[serde(expecting = "an object with model_type")]
struct Kind {
    model_type: Option<String>,
    /// timm's configurations have this instead.
    architecture: Option<serde::de::IgnoredAny>,
}

/// The head of a model.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Head {
    architectures: Option<Vec<String>>,
    id2label: Option<BTreeMap<String, String>>,
    num_labels: Option<usize>,
    problem_type: Option<String>,
    #[serde(default)]
    langs: [String; 2],
}

impl FolderModel {
    /// Reads `config.json` in a folder, or beside a weights file.
    ///
    /// # Errors
    /// [`Error::File`] names the key and what was expected: another model, an activation other than
    /// GELU, an untied head, another epsilon, impossible lengths. [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self> {
        let expected = "a folder with config.json and model.safetensors, or the latter with the \
            former beside it";
        fs::metadata(path).map_err(|e| Error::io("read", path, e).expecting(expected))?;
        if path.is_file() && path.extension().is_none_or(|extension| extension != "safetensors") {
            bail!(path, "is not a safetensors file; save the weights as one");
        }
        let path = &if path.is_dir() { path.join(CONFIG) } else { path.with_file_name(CONFIG) };
        if path.is_symlink() {
            check_inside(path)?;
        }
        let text = disk::read_small(path, 1 << 20)
            .map_err(|e| e.expecting("that of a Hugging Face model"))?;
        let Kind { model_type, architecture } = parse(path, "model", &text)?;
        let of_timm = architecture.map(|_| timm::FORMAT.name.to_owned());
        let Some(model_type) = model_type.or(of_timm) else {
            bail!(path, "not a model configuration: it has no model_type");
        };
        let Some(format) = FORMATS.iter().find(|format| format.name == model_type) else {
            let names: Vec<_> = FORMATS.iter().map(|format| format!("{:?}", format.name)).collect();
            let names = names.join(" or ");
            bail!(path, "model_type is {model_type:?}, expected {names}");
        };
        let spec = (format.read)(path, &text)?;
        let mut head: Head = parse(path, format.title, &text)?;
        let languages = mem::take(&mut head.langs);
        let (prediction, labels) = head.prediction(path, format)?;
        Ok(Self { spec: spec.predicting(prediction), labels, languages })
    }
}

impl Head {
    /// The prediction, and the names of its classes. Heads for several labels or
    /// numbers of one sequence have none here.
    fn prediction(self, path: &Path, format: &Format) -> Result<(Option<Prediction>, Vec<String>)> {
        let [_, sequence, span] =
            format.classes.map(|class| self.architectures.iter().flatten().any(|c| c == class));
        let mut names = BTreeMap::new();
        for (class, name) in self.id2label.unwrap_or_default() {
            let number: usize = class.parse().map_err(|_| {
                Error::file(
                    path,
                    format!("id2label: expected the number of a class, found {class:?}"),
                )
            })?;
            names.insert(number, name);
        }
        if !sequence {
            return Ok((span.then_some(Prediction::Span), Vec::new()));
        }
        if !names.keys().copied().eq(0..names.len()) {
            bail!(path, "id2label: expected the classes from 0 on");
        }
        // Hugging Face's default is two.
        let count = if names.is_empty() { self.num_labels.unwrap_or(2) } else { names.len() };
        if !(1..=MOST).contains(&count) {
            bail!(path, "num_labels is {count}, expected 1..={MOST}");
        }
        let prediction = match (count, self.problem_type.as_deref()) {
            (1, None | Some("regression")) => Some(Prediction::Value),
            (2.., None | Some("single_label_classification")) => Some(Prediction::Class(count)),
            _ => None,
        };
        let is_named = prediction.is_some();
        Ok((prediction, names.into_values().filter(|_| is_named).collect()))
    }
}

/// The name and shape of every parameter of a model; vectors have one length.
///
/// # Errors
/// [`Error::Train`] for a sparsifiable shape that does not consist of 4x4 tiles.
pub fn shapes(model: &ModelSpec) -> Result<Vec<(String, Vec<usize>)>> {
    let shape = |[rows, columns]: [usize; 2], role| {
        if matches!(role, Role::Gain | Role::Bias) { vec![columns] } else { vec![rows, columns] }
    };
    let parameters = model.parameters()?.into_iter();
    Ok(parameters.map(|spec| (spec.name, shape(spec.shape, spec.role))).collect())
}

/// The model to export, besides its weights.
#[derive(Debug, Clone, Copy)]
pub struct Description<'a> {
    /// Its shape.
    pub spec: &'a ModelSpec,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<&'a Tokenizer>,
    /// The names of its classes; those without one are numbered.
    pub labels: &'a [&'a str],
    /// The languages from and to which it translates; empty if it does not.
    pub languages: [&'a str; 2],
}

/// The name of a class that has none, as transformers gives it.
#[must_use]
pub fn numbered(class: usize) -> String {
    format!("LABEL_{class}")
}

/// The file that `from_pretrained` reads; `end` is the token that ends a text.
pub(super) fn to_json(
    format: &Format,
    Description { spec, labels, tokenizer, languages }: &Description<'_>,
    dtype: &str,
    end: Option<u32>,
) -> Vec<u8> {
    let prediction = spec.prediction();
    let mut fields = (format.fields)(spec, end);
    if format.name == timm::FORMAT.name {
        return json::pretty(&Value::Object(fields));
    }
    fields.extend(object(json!({
        "model_type": format.name,
        "architectures": [format.classes[match prediction {
            None => 0,
            Some(Prediction::Class(_) | Prediction::Value) => 1,
            Some(Prediction::Span) => 2,
        }]],
        "tie_word_embeddings": true,
        "torch_dtype": dtype,
    })));
    if matches!(spec, ModelSpec::Transformer(_)) {
        fields.insert("langs".to_owned(), json!(languages));
    }
    if let Some(padding) =
        tokenizer.and_then(|tokenizer| tokenizer.special_tokens().first().copied())
    {
        fields.insert("pad_token_id".to_owned(), padding.into());
    }
    if let Some(prediction) = prediction.filter(|&prediction| prediction != Prediction::Span) {
        let name = |class: usize| {
            labels.get(class).map_or_else(|| numbered(class), |&name| name.to_owned())
        };
        let names: Vec<_> = (0..prediction.outputs()).map(name).collect();
        let by_id = names.iter().enumerate().map(|(id, name)| (id.to_string(), json!(name)));
        let by_name = names.iter().enumerate().map(|(id, name)| (name.clone(), json!(id)));
        fields.insert("id2label".to_owned(), by_id.collect());
        fields.insert("label2id".to_owned(), by_name.collect());
        let problem = match prediction {
            Prediction::Value => "regression",
            _ => "single_label_classification",
        };
        fields.insert("problem_type".to_owned(), problem.into());
    }
    json::pretty(&Value::Object(fields))
}
