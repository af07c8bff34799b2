//! `config.json`: the model of a folder.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    CONFIG,
    export::Description,
    format::{FORMATS, Format},
};
use crate::{
    Error,
    config::{MOST, MOST_LAYERS},
    disk, json,
    tensors::shards::check_inside,
};
use sparse24_core::op::Activation;
use sparse24_train::{
    model::ModelSpec,
    nn::{Prediction, Role},
};

/// Hugging Face's names of activations; an export uses the first of several.
const ACTIVATIONS: [(&str, Activation); 3] = [
    ("gelu_new", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu", Activation::GeluErf),
];

/// The model that the `config.json` of a folder describes.
#[derive(Debug, Clone, PartialEq)]
pub struct FolderModel {
    /// Its shape, with biases, and with its prediction if it has a head for one class or one number
    /// per sequence, or for a span.
    pub spec: ModelSpec,
    /// Names of the classes that it predicts.
    pub labels: Vec<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with model_type")]
struct Kind {
    model_type: String,
}

/// The head of a model.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Head {
    architectures: Option<Vec<String>>,
    id2label: Option<BTreeMap<usize, String>>,
    num_labels: Option<usize>,
    problem_type: Option<String>,
}

impl FolderModel {
    /// Reads `config.json` in a folder, or beside a weights file.
    ///
    /// # Errors
    /// [`Error::File`] names the key and what was expected: another model, an activation other than
    /// GELU, an untied head, another epsilon, impossible lengths. [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let expected = "a folder with config.json and model.safetensors, or the latter with the \
            former beside it";
        fs::metadata(path).map_err(|e| Error::io("read", path, e).expecting(expected))?;
        let path = &if path.is_dir() { path.join(CONFIG) } else { path.with_file_name(CONFIG) };
        if path.is_symlink() {
            check_inside(path)?;
        }
        let text = disk::read_small(path, 1 << 20)
            .map_err(|e| e.expecting("that of a Hugging Face model"))?;
        let Kind { model_type } = parse(path, "model", &text)?;
        let Some(format) = FORMATS.iter().find(|format| format.name == model_type) else {
            let names: Vec<_> = FORMATS.iter().map(|format| format!("{:?}", format.name)).collect();
            let names = names.join(" or ");
            return Err(Error::file(
                path,
                format!("model_type is {model_type:?}, expected {names}"),
            ));
        };
        let spec = (format.read)(path, &text)?;
        let head: Head = parse(path, format.title, &text)?;
        let (prediction, labels) = head.prediction(path, format)?;
        Ok(Self { spec: spec.predicting(prediction), labels })
    }
}

impl Head {
    /// The prediction, and the names of its classes. Heads for several labels or
    /// numbers of one sequence have none here.
    fn prediction(
        self,
        path: &Path,
        format: &Format,
    ) -> Result<(Option<Prediction>, Vec<String>), Error> {
        let [_, sequence, span] =
            format.classes.map(|class| self.architectures.iter().flatten().any(|c| c == class));
        if !sequence {
            return Ok((span.then_some(Prediction::Span), Vec::new()));
        }
        let names = self.id2label.unwrap_or_default();
        if !names.keys().copied().eq(0..names.len()) {
            let problem = "id2label: expected the classes from 0 on";
            return Err(Error::file(path, problem));
        }
        // Hugging Face's default is two.
        let count = if names.is_empty() { self.num_labels.unwrap_or(2) } else { names.len() };
        if !(1..=MOST).contains(&count) {
            return Err(Error::file(path, format!("num_labels is {count}, expected 1..={MOST}")));
        }
        let prediction = match (count, self.problem_type.as_deref()) {
            (1, None | Some("regression")) => Some(Prediction::Value),
            (2.., None | Some("single_label_classification")) => Some(Prediction::Class(count)),
            _ => None,
        };
        Ok((prediction, names.into_values().collect()))
    }
}

/// The name and shape of every parameter of a model; vectors have one length.
///
/// # Errors
/// [`Error::Train`] for a sparsifiable shape that does not consist of 4x4 tiles.
pub fn shapes(model: &ModelSpec) -> Result<Vec<(String, Vec<usize>)>, Error> {
    let shape = |[rows, columns]: [usize; 2], role| {
        if matches!(role, Role::Gain | Role::Bias) { vec![columns] } else { vec![rows, columns] }
    };
    let parameters = model.parameters()?.into_iter();
    Ok(parameters.map(|spec| (spec.name, shape(spec.shape, spec.role))).collect())
}

/// Hugging Face's name of the activation of a model.
pub(super) fn activation_name(format: &Format, model: &ModelSpec) -> Result<&'static str, Error> {
    let activation = model.extents().activation;
    let named = ACTIVATIONS.iter().find(|(_, named)| *named == activation);
    let problem = || {
        format!(
            "no Hugging Face model has {}'s layers with a gated feed-forward, expected gelu or \
                gelu-erf; the checkpoint's model.safetensors holds the weights",
            format.title
        )
    };
    Ok(named.ok_or_else(|| Error::setting("model.activation", problem()))?.0)
}

/// Parses the fields that `T` has.
pub(super) fn parse<'a, T: Deserialize<'a>>(
    path: &Path,
    title: &str,
    text: &'a [u8],
) -> Result<T, Error> {
    serde_json::from_slice(text)
        .map_err(|e| Error::file(path, format!("not a {title} configuration: {e}")))
}

/// Refuses a setting with another value than those admitted. An absent one has the default, which
/// is admitted.
pub(super) fn admit(
    path: &Path,
    key: &str,
    found: Option<&Value>,
    admitted: &[Value],
) -> Result<(), Error> {
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
) -> Result<Activation, Error> {
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
    pub(super) fn check(self, path: &Path) -> Result<(), Error> {
        let Self { layers, heads, d_model, others } = self;
        let lengths = [heads, d_model].into_iter().chain(others);
        let bounded = lengths.map(|(key, length)| (key, length, MOST));
        for (key, length, most) in bounded.chain([(layers.0, layers.1, MOST_LAYERS)]) {
            if !(1..=most).contains(&length) {
                let problem = format!("{key} is {length}, expected 1..={most}");
                return Err(Error::file(path, problem));
            }
        }
        if !d_model.1.is_multiple_of(heads.1) {
            let ((key, found), (by, heads)) = (d_model, heads);
            let problem = format!("{key} is {found}, expected a multiple of {by} = {heads}");
            return Err(Error::file(path, problem));
        }
        Ok(())
    }
}

/// The object of a `json!`.
pub(super) fn object(value: Value) -> Map<String, Value> {
    let Value::Object(fields) = value else { unreachable!("not an object") };
    fields
}

/// The file that `from_pretrained` reads; `end` is the token that ends a text.
pub(super) fn to_json(
    format: &Format,
    Description { spec, labels, .. }: &Description<'_>,
    dtype: &str,
    end: Option<u32>,
) -> Vec<u8> {
    let prediction = spec.prediction();
    let mut fields = (format.fields)(spec, end);
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
    if let Some(prediction) = prediction.filter(|&prediction| prediction != Prediction::Span) {
        let name = |class: usize| {
            labels.get(class).map_or_else(|| format!("LABEL_{class}"), |&name| name.to_owned())
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
