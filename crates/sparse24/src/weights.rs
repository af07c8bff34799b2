//! Initial weights from a run, a checkpoint or a Hugging Face GPT-2, with the shape of their model.

use std::path::{Path, PathBuf};

use sparse24_run::{
    checkpoint::NamedTensor,
    config::Config,
    data::{Dataset, Tokenizer, TokenizerKind},
    interchange::{self, Gpt2Config},
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
}

impl Initial {
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        if !["config.toml", "manifest.json"].iter().any(|file| path.join(file).exists()) {
            return Self::read_gpt2(path);
        }
        let model = Model::read(path)?;
        let ModelSpec::Gpt2(spec) = model.recipe().model else {
            let problem = format!("{}: expected a GPT-2", path.display());
            return Err(Failure::new(Exit::Input, problem));
        };
        let kind = model.tokenizer.as_ref().map(Tokenizer::kind);
        let (path, tokenizer) = (path.to_owned(), model.tokenizer);
        Ok(Self { path, weights: model.checkpoint.weights, spec, tokenizer, kind })
    }

    /// A Hugging Face GPT-2 with the shape in its `config.json`; biases that are all zero are
    /// dropped.
    pub(crate) fn read_gpt2(path: &Path) -> Result<Self, Failure> {
        let shape = Gpt2Config::read(path)?;
        let mut weights = interchange::import(path, &shape.parameters(Bias::Present))?;
        let is_bias = |tensor: &NamedTensor| tensor.name.ends_with(".bias");
        let is_zero = |tensor: &NamedTensor| tensor.values.iter().all(|&value| value == 0.0);
        let mut bias = Bias::Present;
        if weights.iter().all(|tensor| !is_bias(tensor) || is_zero(tensor)) {
            weights.retain(|tensor| !is_bias(tensor));
            bias = Bias::Absent;
        }
        let kind = match shape.vocab_size {
            GPT2 | GPT2_PADDED => Some(TokenizerKind::Gpt2),
            256 => Some(TokenizerKind::Byte),
            _ => None,
        };
        let (path, spec) = (path.to_owned(), shape.spec(bias));
        Ok(Self { path, weights, spec, tokenizer: None, kind })
    }

    /// The settings of its shape, each `key=value`.
    pub(crate) fn settings(&self) -> Vec<String> {
        let mut settings = Config::shape(&self.spec);
        settings.extend(self.kind.map(|kind| format!("data.tokenizer={}", kind.name())));
        settings
    }

    /// Refuses a configuration of another shape, with all differences.
    pub(crate) fn check(&self, config: &Config) -> Result<(), Failure> {
        let ModelSpec::Gpt2(wanted) = config.recipe(self.spec.vocabulary)?.model else {
            return Err(self.refuse("expected model.kind = \"gpt2\""));
        };
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

    /// The weights, for data with the same tokens.
    pub(crate) fn for_data(self, dataset: &Dataset) -> Result<Vec<NamedTensor>, Failure> {
        let (tokens, vocabulary) = (dataset.vocabulary() as usize, self.spec.vocabulary);
        if tokens != vocabulary {
            return Err(self.refuse(&format!(
                "has a vocabulary of {vocabulary} tokens, the data one of {tokens}; use the \
                 tokenizer that goes with the weights"
            )));
        }
        if let (Some(tokenizer), Some(other)) = (&self.tokenizer, dataset.tokenizer())
            && tokenizer != other
        {
            let problem = "was trained with other characters than those of the data; use text \
                           with the same ones";
            return Err(self.refuse(problem));
        }
        Ok(self.weights)
    }

    fn refuse(&self, problem: &str) -> Failure {
        Failure::new(Exit::Input, format!("{}: {problem}", self.path.display()))
    }
}
