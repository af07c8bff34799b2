//! Initial weights from a run, a checkpoint or a Hugging Face GPT-2, with the shape of their model.

use std::path::{Path, PathBuf};

use sparse24_run::{
    checkpoint::NamedTensor,
    config::Config,
    data::{Dataset, Tokenizer, TokenizerKind},
    disk,
    interchange::{self, FolderTokenizer, Gpt2Config},
    run::Model,
};
use sparse24_train::{
    model::{Gpt2Spec, ModelSpec},
    nn::Bias,
};

use crate::failure::{Exit, Failure};

/// Vocabulary size of GPT-2.
const GPT2: usize = 50_257;
/// The same, padded to a multiple of 64 as in nanoGPT and llm.c. Any other size could be any
/// tokenizer.
const GPT2_PADDED: usize = 50_304;

/// A model to start from; linear layers are `[out, in]`.
pub(crate) struct Initial {
    path: PathBuf,
    pub(crate) weights: Vec<NamedTensor>,
    pub(crate) spec: Gpt2Spec,
    /// The run's, if it has one.
    tokenizer: Option<Tokenizer>,
    /// As far as it is known.
    pub(crate) kind: Option<TokenizerKind>,
    /// The tokenizer in a Hugging Face folder.
    found: Option<FolderTokenizer>,
    /// Biases of a folder that are all zero, left out of the weights.
    zero_biases: Vec<NamedTensor>,
}

impl Initial {
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        if !["config.toml", "manifest.json"].iter().any(|file| path.join(file).exists()) {
            return Self::read_gpt2(path, None);
        }
        let model = Model::read(path)?;
        let ModelSpec::Gpt2(spec) = model.recipe().model else {
            let problem = format!("{}: expected a GPT-2", path.display());
            return Err(Failure::new(Exit::Input, problem));
        };
        let kind = model.tokenizer.as_ref().map(Tokenizer::kind);
        let (path, tokenizer) = (path.to_owned(), model.tokenizer);
        let weights = model.checkpoint.weights;
        let zero_biases = Vec::new();
        Ok(Self { path, weights, spec, tokenizer, kind, found: None, zero_biases })
    }

    /// A Hugging Face GPT-2 with the shape in its `config.json`; biases that are all zero are left
    /// out. The tokenizer is the one that is named, or the folder's, or that of the vocabulary
    /// size.
    pub(crate) fn read_gpt2(path: &Path, named: Option<TokenizerKind>) -> Result<Self, Failure> {
        let shape = Gpt2Config::read(path)?;
        let mut weights = interchange::import(path, &shape.parameters(Bias::Present))?;
        let is_bias = |tensor: &NamedTensor| tensor.name.ends_with(".bias");
        let is_zero = |tensor: &NamedTensor| tensor.values.iter().all(|&value| value == 0.0);
        let (mut bias, mut zero_biases) = (Bias::Present, Vec::new());
        if weights.iter().all(|tensor| !is_bias(tensor) || is_zero(tensor)) {
            (zero_biases, weights) = weights.into_iter().partition(is_bias);
            bias = Bias::Absent;
        }
        let folder = if path.is_dir() { path } else { disk::parent(path) };
        let mut found = match named {
            Some(kind) => FolderTokenizer::Known(kind),
            None => interchange::folder_tokenizer(folder)?,
        };
        if let (FolderTokenizer::Known(kind), None) = (found, named)
            && Tokenizer::for_text(kind, "")?.vocabulary() as usize > shape.vocab_size
        {
            found = FolderTokenizer::Other;
        }
        let kind = match (found, shape.vocab_size) {
            (FolderTokenizer::Known(kind), _) => Some(kind),
            (FolderTokenizer::Absent, GPT2 | GPT2_PADDED) => Some(TokenizerKind::Gpt2),
            (FolderTokenizer::Absent, 256) => Some(TokenizerKind::Byte),
            _ => None,
        };
        let (path, spec) = (path.to_owned(), shape.spec(bias));
        Ok(Self { path, weights, spec, tokenizer: None, kind, found: Some(found), zero_biases })
    }

    /// Remarks for the user on the weights, and on the tokenizer that reads a text for them.
    pub(crate) fn remarks(&self, text: Option<&Tokenizer>) -> Vec<String> {
        let tokenizer = match (self.found, self.kind) {
            (Some(FolderTokenizer::Absent), Some(kind)) => {
                let (name, vocabulary) = (kind.name(), self.spec.vocabulary);
                Some(format!("tokenizer {name}, assumed from the vocabulary of {vocabulary}"))
            }
            (Some(FolderTokenizer::Other), None) => {
                let remark = "the folder's tokenizer is neither gpt2 nor byte, so the model has \
                              none: it reads token ids, not text";
                Some(remark.to_owned())
            }
            (Some(FolderTokenizer::Absent), None) => text.map(|tokenizer| {
                let name = tokenizer.kind().name();
                format!("the weights name no tokenizer, so the text is read as {name} ids")
            }),
            _ => None,
        };
        let has_no_biases = self.spec.bias == Bias::Absent && !self.zero_biases.is_empty();
        let biases = "all biases are zero, so the model has none (model.bias = false)";
        let biases = has_no_biases.then(|| biases.to_owned());
        tokenizer.into_iter().chain(biases).collect()
    }

    /// The settings of its shape, each `key=value`.
    pub(crate) fn settings(&self) -> Vec<String> {
        let mut settings = Config::shape(&self.spec);
        settings.extend(self.kind.map(|kind| format!("data.tokenizer={}", kind.name())));
        settings
    }

    /// Refuses a configuration of another shape, with all differences. Biases of zeros are weights
    /// where it has biases.
    pub(crate) fn check(&mut self, config: &Config) -> Result<(), Failure> {
        let ModelSpec::Gpt2(wanted) = config.recipe(self.spec.vocabulary)?.model else {
            return Err(self.refuse("expected model.kind = \"gpt2\""));
        };
        if wanted.bias == Bias::Present && !self.zero_biases.is_empty() {
            self.weights.append(&mut self.zero_biases);
            self.spec.bias = Bias::Present;
        }
        if wanted.d_ff != self.spec.d_ff && config.model.d_ff == self.spec.d_ff {
            return Err(self.refuse(&format!(
                "the method {} has a d_ff of {}, the initial weights have {}; choose another",
                config.method.name, wanted.d_ff, self.spec.d_ff
            )));
        }
        let mut pairs: Vec<_> =
            Config::shape(&wanted).into_iter().zip(Config::shape(&self.spec)).collect();
        pairs.extend(self.kind.map(|kind| {
            let setting = |kind: TokenizerKind| format!("data.tokenizer={:?}", kind.name());
            (setting(config.data.tokenizer), setting(kind))
        }));
        let differing = pairs.iter().filter(|(wanted, has)| wanted != has);
        let differing: Vec<_> = differing
            .map(|(wanted, has)| {
                let value = has.split_once('=').map_or("", |(_, value)| value);
                format!("{wanted}, the initial weights have {value}")
            })
            .collect();
        if differing.is_empty() {
            return Ok(());
        }
        Err(self.refuse(&format!("{}; leave these settings out", differing.join("; "))))
    }

    /// The weights, for data whose tokens they know.
    pub(crate) fn for_data(self, dataset: &Dataset) -> Result<Vec<NamedTensor>, Failure> {
        let (tokens, vocabulary) = (dataset.vocabulary() as usize, self.spec.vocabulary);
        if self.found == Some(FolderTokenizer::Other) && dataset.tokenizer().is_some() {
            let problem = "has a tokenizer that is neither gpt2 nor byte, so it cannot read text; \
                           name prepared shards of its token ids";
            return Err(self.refuse(problem));
        }
        if tokens > vocabulary {
            return Err(self.refuse(&format!(
                "has a vocabulary of {vocabulary} tokens, the data one of {tokens}; use the \
                 tokenizer that goes with the weights"
            )));
        }
        if let (Some(tokenizer), Some(other)) = (&self.tokenizer, dataset.tokenizer())
            && tokenizer != other
        {
            let problem = "was trained with another vocabulary than that of the data: encode the \
                           text with `sparse24 prepare --tokenizer`, naming the tokenizer.json of \
                           the run that the weights are from";
            return Err(self.refuse(problem));
        }
        Ok(self.weights)
    }

    fn refuse(&self, problem: &str) -> Failure {
        Failure::new(Exit::Input, format!("{}: {problem}", self.path.display()))
    }
}
