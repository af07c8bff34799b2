//! Initial weights from a run, a checkpoint or a Hugging Face folder, with their model's shape.

use std::path::{Path, PathBuf};

use sparse24_run::{
    Error,
    checkpoint::NamedTensor,
    config::Config,
    data::{Tokenizer, TokenizerKind},
    disk,
    interchange::{self, FolderModel, FolderTokenizer, Format},
    run::{Model, RunData},
    task::{Labels, Task},
};
use sparse24_train::{
    model::ModelSpec,
    nn::{Bias, Prediction},
};

use crate::{
    configure::quote,
    failure::{Exit, Failure, Result},
};

/// Vocabulary size of GPT-2.
const GPT2: usize = 50_257;
/// The same, padded to a multiple of 64 as in nanoGPT and llm.c. Any other size could be any
/// tokenizer.
const GPT2_PADDED: usize = 50_304;

/// A model to start from; linear layers are `[out, in]`.
pub(crate) struct Initial {
    path: PathBuf,
    pub(crate) weights: Vec<NamedTensor>,
    pub(crate) spec: ModelSpec,
    /// The names of the classes of its head, if it has any.
    pub(crate) labels: Vec<String>,
    /// The languages of a folder that translates; else empty.
    languages: [String; 2],
    /// As far as it is known.
    pub(crate) tokenizer: Option<Tokenizer>,
    /// The tokenizer in a Hugging Face folder.
    found: Option<FolderTokenizer>,
    /// Biases of a folder that are all zero, left out of the weights.
    zero_biases: Vec<NamedTensor>,
    /// Parts that the model does not have.
    dropped: Vec<String>,
}

/// The head that a model is to have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Head {
    /// The one that it was pre-trained with.
    Pretrained,
    /// That of this task.
    Task(&'static Task),
    /// A new one: what the weights have is left out.
    New,
}

/// The beginnings of the names of heads of fine-tuned models.
pub(crate) const TASK_HEADS: [&str; 3] = ["classifier.", "score.", "qa_outputs."];

/// Whether a path is a run or a checkpoint, and not a Hugging Face folder.
pub(crate) fn is_run(path: &Path) -> bool {
    ["config.toml", "manifest.json"].iter().any(|file| path.join(file).exists())
}

/// The ids of a model that text may have: all but BERT's mask token, where the tokenizer has none.
pub(crate) fn room_for_text(spec: &ModelSpec, tokenizer: Option<&Tokenizer>) -> usize {
    let has_mask = tokenizer.is_some_and(|tokenizer| !tokenizer.special_tokens().is_empty());
    spec.vocabulary() - usize::from(matches!(spec, ModelSpec::Bert(_)) && !has_mask)
}

impl Initial {
    /// A model to pre-train further.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        if !is_run(path) {
            return Self::import(path, None, Head::Pretrained);
        }
        let model = Model::read(path)?;
        let spec = model.recipe().model.clone();
        if spec.prediction().is_some() && !matches!(spec, ModelSpec::Gpt2(_) | ModelSpec::Deit(_)) {
            let problem = "is fine-tuned and has no head for masked tokens; `finetune --init-from` \
                           adds a new one for another task";
            return Err(Failure::new(Exit::Input, format!("{}: {problem}", path.display())));
        }
        let (path, tokenizer) = (path.to_owned(), model.tokenizer);
        let mut weights = model.checkpoint.weights;
        let mut dropped = Vec::new();
        if spec.prediction().is_some() && !matches!(spec, ModelSpec::Deit(_)) {
            let is_head = |name: &str| {
                name.starts_with("pooler.") || TASK_HEADS.iter().any(|head| name.starts_with(head))
            };
            weights.retain(|weight| !is_head(&weight.name));
            dropped.push("the head of its task".to_owned());
        }
        let (spec, zero_biases) = (spec.predicting(None), Vec::new());
        let reads_text = !matches!(spec, ModelSpec::Deit(_) | ModelSpec::Transformer(_));
        let found = (tokenizer.is_none() && reads_text).then_some(FolderTokenizer::Absent);
        Ok(Self {
            path,
            weights,
            spec,
            labels: Vec::new(),
            languages: [model.config.data.source, model.config.data.target],
            tokenizer,
            found,
            zero_biases,
            dropped,
        })
    }

    /// The model of a Hugging Face folder with the shape in its `config.json`; a GPT-2's biases
    /// that are all zero are left out. The tokenizer is the one that is named, or the folder's, or
    /// that of the vocabulary size.
    pub(crate) fn import(path: &Path, named: Option<TokenizerKind>, head: Head) -> Result<Self> {
        let FolderModel { spec, labels, languages } = FolderModel::read(path)?;
        let folder = if path.is_dir() { path } else { disk::parent(path) };
        let prediction = match head {
            Head::Pretrained
                if matches!(spec, ModelSpec::Bert(_)) && spec.prediction().is_some() =>
            {
                let problem = "is fine-tuned and has no head for masked tokens; `import --task \
                               NAME` keeps its own, `finetune --init-from` adds a new one";
                return Err(Failure::new(Exit::Input, format!("{}: {problem}", path.display())));
            }
            Head::Pretrained => None,
            Head::New => Some(Prediction::Value),
            Head::Task(task) => {
                Some(head_of(task, spec.prediction(), &labels).map_err(|found| {
                    let problem = format!("{}: {found}", path.display());
                    Failure::new(Exit::Input, problem)
                })?)
            }
        };
        let mut spec = spec.predicting(prediction);
        let mut expected = interchange::shapes(&spec)?;
        if matches!(head, Head::New) {
            let is_head = |name: &str| TASK_HEADS.iter().any(|head| name.starts_with(head));
            expected.retain(|(name, _)| !is_head(name));
        }
        let imported = interchange::import(path, Format::of(&spec)?, &expected)?;
        let (mut weights, dropped) = (imported.weights, imported.dropped);
        let dropped = dropped.into_iter().map(str::to_owned).collect();
        let is_bias = |tensor: &NamedTensor| tensor.name.ends_with(".bias");
        let is_zero = |tensor: &NamedTensor| tensor.values.iter().all(|&value| value == 0.0);
        let mut zero_biases = Vec::new();
        if let ModelSpec::Gpt2(spec) = &mut spec
            && weights.iter().all(|tensor| !is_bias(tensor) || is_zero(tensor))
        {
            (zero_biases, weights) = weights.into_iter().partition(is_bias);
            spec.bias = Bias::Absent;
        }
        let found = match named {
            Some(kind) => FolderTokenizer::Known(Tokenizer::for_text(kind, "")?),
            None => interchange::folder_tokenizer(folder, &spec)?,
        };
        let tokenizer = match (&found, room_for_text(&spec, None)) {
            _ if matches!(spec, ModelSpec::Deit(_)) => None,
            (FolderTokenizer::Known(tokenizer), _) => Some(tokenizer.clone()),
            _ if matches!(spec, ModelSpec::Transformer(_)) => None,
            (FolderTokenizer::Absent, GPT2 | GPT2_PADDED) => {
                Some(Tokenizer::for_text(TokenizerKind::Gpt2, "")?)
            }
            (FolderTokenizer::Absent, 256) => Some(Tokenizer::Byte),
            _ => None,
        };
        let (path, found) = (path.to_owned(), Some(found));
        Ok(Self { path, weights, spec, labels, languages, tokenizer, found, zero_biases, dropped })
    }

    /// Remarks for the user on the weights, and on the tokenizer that reads a text for them.
    pub(crate) fn remarks(&self, text: Option<&Tokenizer>) -> Vec<String> {
        let tokenizer = match (&self.found, &self.tokenizer) {
            (Some(FolderTokenizer::Absent), Some(tokenizer)) => {
                let vocabulary = room_for_text(&self.spec, None);
                let name = tokenizer.kind().name();
                Some(format!("tokenizer {name}, assumed from the vocabulary of {vocabulary}"))
            }
            (Some(FolderTokenizer::Known(own)), _)
                if own.kind() == TokenizerKind::WordPiece
                    && (own.vocabulary() as usize) < self.spec.vocabulary() =>
            {
                let (pieces, ids) = (own.vocabulary(), self.spec.vocabulary());
                Some(format!(
                    "the folder's vocabulary has {pieces} pieces, but the model has {ids} ids: \
                     check that they belong together, unless the model's table is padded"
                ))
            }
            (Some(FolderTokenizer::Other(reason)), None) => {
                let masks = match self.spec {
                    ModelSpec::Bert(_) => ", the last of which it takes for its mask",
                    _ => "",
                };
                Some(format!(
                    "the folder's tokenizer is not supported ({reason}), so the model has \
                     none: it reads token ids, not text{masks}"
                ))
            }
            (Some(FolderTokenizer::Absent), None)
                if matches!(self.spec, ModelSpec::Transformer(_)) && text.is_none() =>
            {
                let problem = "the folder has no vocab-src.json and vocab-tgt.json, so the model \
                               reads token ids, not text";
                Some(problem.to_owned())
            }
            (Some(FolderTokenizer::Absent), None) => text.map(|tokenizer| {
                let name = tokenizer.kind().name();
                format!("the weights name no tokenizer, so the text is read as {name} ids")
            }),
            _ => None,
        };
        let is_unbiased = self.spec.extents().bias == Bias::Absent;
        let has_no_biases = is_unbiased && !self.zero_biases.is_empty();
        let biases = "all biases are zero, so the model has none (model.bias = false)";
        let biases = has_no_biases.then(|| biases.to_owned());
        let dropped = self.dropped.join(", ");
        let dropped = (!dropped.is_empty())
            .then(|| format!("left out {dropped}, which the model does not have"));
        let guess = self.tokenizer.as_ref().and_then(Tokenizer::remark);
        tokenizer.into_iter().chain(guess).chain(biases).chain(dropped).collect()
    }

    /// Why the tokenizer in its folder cannot be used, if there is one.
    pub(crate) fn other_tokenizer(&self) -> Option<String> {
        let Some(FolderTokenizer::Other(reason)) = &self.found else { return None };
        Some(format!("has a tokenizer that is not supported ({reason})"))
    }

    /// The settings of its shape, each `key=value`.
    pub(crate) fn settings(&self) -> Vec<String> {
        let mut settings = Config::shape(&self.spec);
        let tokenizer = self.tokenizer.iter().map(|tokenizer| tokenizer.kind().name());
        settings.extend(tokenizer.map(|name| format!("data.tokenizer={name}")));
        if matches!(self.spec, ModelSpec::Transformer(_)) && self.tokenizer.is_none() {
            settings.push("data.tokenizer=dictionary".to_owned());
        } else if self.other_tokenizer().is_some() {
            // Shards that name no tokenizer are read as ids, without one.
            settings.push("data.tokenizer=char".to_owned());
        }
        let languages = ["source", "target"].into_iter().zip(&self.languages);
        let named = languages.filter(|(_, language)| !language.is_empty());
        settings.extend(named.map(|(key, language)| format!("data.{key}={}", quote(language))));
        settings
    }

    /// Refuses a configuration of another shape, with all differences. Biases of zeros are weights
    /// where it has biases.
    pub(crate) fn check(&mut self, config: &Config) -> Result {
        let wanted = config.recipe(self.spec.vocabulary())?.model;
        if let (Bias::Present, ModelSpec::Gpt2(spec)) = (wanted.extents().bias, &mut self.spec)
            && !self.zero_biases.is_empty()
        {
            self.weights.append(&mut self.zero_biases);
            spec.bias = Bias::Present;
        }
        match contradiction(config, &self.spec, self.tokenizer.as_ref())? {
            Some(problem) => Err(self.refuse(&problem)),
            None => Ok(()),
        }
    }

    /// The weights, for data whose tokens they know; for images of other classes without the head.
    pub(crate) fn for_data(
        mut self,
        config: &Config,
        dataset: &RunData,
    ) -> Result<Vec<NamedTensor>> {
        if let (ModelSpec::Deit(spec), RunData::Images(images)) = (&self.spec, dataset) {
            if spec.classes != images.classes().len() {
                self.weights.retain(|weight| !weight.name.starts_with("head."));
            }
            return Ok(self.weights);
        }
        let vocabulary = self.spec.vocabulary();
        let tokens = config.model.vocabulary(dataset.vocabulary(), dataset.tokenizer());
        let other = self.other_tokenizer();
        if let (Some(other), ModelSpec::Bert(_)) = (&other, &self.spec) {
            let advice = "its mask token is not known, and it cannot be pre-trained further";
            return Err(self.refuse(&format!("{other}, so {advice}")));
        }
        let translates = matches!(self.spec, ModelSpec::Transformer(_));
        if let (Some(other), Some(_)) = (other, dataset.tokenizer()) {
            let advice = match translates {
                true => "its ids are not known",
                false => {
                    "the model cannot read text; set data.path to a folder of token ids (train.bin \
                     and val.bin, no tokenizer.json) and data.tokenizer=char"
                }
            };
            return Err(self.refuse(&format!("{other}, so {advice}")));
        }
        let is_trained = |tokenizer: &Tokenizer| match tokenizer.kind() {
            TokenizerKind::WordPiece => !Path::new(&config.data.path).is_dir(),
            kind => kind == TokenizerKind::Bpe,
        };
        if self.tokenizer.is_none() && dataset.tokenizer().is_some_and(is_trained) {
            let (lacks, advice) = match self.spec {
                ModelSpec::Transformer(_) => (
                    "vocab-src.json and vocab-tgt.json",
                    "set data.tokenizer = \"dictionary\", with dictionaries beside the data",
                ),
                _ => ("tokenizer", "`sparse24 prepare --tokenizer FILE` takes theirs"),
            };
            return Err(self.refuse(&format!(
                "has no {lacks}, and a vocabulary that is trained on the data is not that of the \
                 weights; {advice}"
            )));
        }
        let has_mask = self.tokenizer.as_ref().is_some_and(|own| !own.special_tokens().is_empty());
        if has_mask && dataset.tokenizer().is_none() {
            let problem = "has a tokenizer with special tokens, which these shards do not name: \
                           encode the text with `sparse24 prepare --tokenizer`, naming the \
                           tokenizer of the weights";
            return Err(self.refuse(problem));
        }
        if tokens > vocabulary {
            return Err(self.refuse(&format!(
                "has a vocabulary of {vocabulary} tokens, but the data has {tokens}; use the \
                 tokenizer that goes with the weights"
            )));
        }
        if let (Some(tokenizer), Some(other)) = (&self.tokenizer, dataset.tokenizer())
            && tokenizer != other
        {
            let problem = "was trained with a vocabulary other than the data's: encode the text \
                           with `sparse24 prepare --tokenizer`, naming the tokenizer.json of the \
                           run that the weights are from";
            return Err(self.refuse(problem));
        }
        Ok(self.weights)
    }

    fn refuse(&self, problem: &str) -> Failure {
        Failure::new(Exit::Input, format!("{}: {problem}", self.path.display()))
    }
}

/// How a configuration contradicts a model to start from, if it does: all differences of shape, and
/// of the tokenizer, if it is known.
pub(crate) fn contradiction(
    config: &Config,
    spec: &ModelSpec,
    tokenizer: Option<&Tokenizer>,
) -> Result<Option<String>, Error> {
    let wanted = config.recipe(spec.vocabulary())?.model;
    let [narrowed, d_ff] = [&wanted, spec].map(|model| model.extents().d_ff);
    if narrowed != d_ff && config.model.d_ff == d_ff {
        return Ok(Some(format!(
            "the method {} has a d_ff of {narrowed}, but the initial weights have {d_ff}; choose \
             another",
            config.method.name
        )));
    }
    let mut pairs: Vec<_> = Config::shape(&wanted).into_iter().zip(Config::shape(spec)).collect();
    pairs.extend(tokenizer.map(|tokenizer| {
        let setting = |kind: TokenizerKind| format!("data.tokenizer={:?}", kind.name());
        (setting(config.data.tokenizer), setting(tokenizer.kind()))
    }));
    let differing = pairs.iter().filter(|(wanted, has)| wanted != has);
    let differing: Vec<_> = differing
        .map(|(wanted, has)| {
            let value = has.split_once('=').map_or("", |(_, value)| value);
            format!("{wanted}, but the initial weights have {value}")
        })
        .collect();
    let problem = format!("{}; use settings and data that fit the weights", differing.join("; "));
    Ok((!differing.is_empty()).then_some(problem))
}

/// The prediction of a task, if the head of a folder is for one like it.
fn head_of(
    task: &Task,
    found: Option<Prediction>,
    labels: &[String],
) -> Result<Prediction, String> {
    let name = task.name;
    let expected = match task.labels {
        Labels::Value => "a number".to_owned(),
        Labels::Named(names) => format!("{} classes", names.len()),
        Labels::Found => "classes".to_owned(),
        Labels::Span => "a span".to_owned(),
    };
    let refuse = |has: String| Err(format!("has {has}, the task {name} expects {expected}"));
    match (task.labels, found) {
        (_, None) => {
            refuse("no head for one class or number of a sequence, or for a span".to_owned())
        }
        (Labels::Value, Some(prediction @ Prediction::Value))
        | (Labels::Span, Some(prediction @ Prediction::Span)) => Ok(prediction),
        (Labels::Found, Some(prediction @ Prediction::Class(_))) => Ok(prediction),
        (Labels::Named(names), Some(Prediction::Class(classes))) if classes == names.len() => {
            let place =
                |label: &str| names.iter().position(|name| name.eq_ignore_ascii_case(label));
            let moved = labels
                .iter()
                .enumerate()
                .find(|(at, label)| place(label).is_some_and(|place| place != *at));
            match moved {
                None => Ok(Prediction::Class(classes)),
                Some((at, label)) => Err(format!(
                    "its class {at} is {label:?}, but that of the task {name} is {:?}; order the \
                     rows of the head and id2label like the task",
                    names[at]
                )),
            }
        }
        (_, Some(Prediction::Value)) => refuse("a head for a number".to_owned()),
        (_, Some(Prediction::Span)) => refuse("a head for a span".to_owned()),
        (_, Some(Prediction::Class(classes))) => refuse(format!("a head for {classes} classes")),
    }
}
