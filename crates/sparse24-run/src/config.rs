//! The configuration of a run: one TOML document, every key with a default, unknown keys refused
//! with the known ones.
//!
//! Layers, later ones win: the preset, a file, `--set key=value`. A resolved configuration names
//! every key, so a run directory explains itself. Deliberately absent: command-line arguments.

use std::{collections::BTreeMap, num::NonZeroU32, path::Path};

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::{Error, data::TokenizerKind, disk};
use sparse24_core::op::Activation;
use sparse24_train::{
    backend::{Arithmetic, BACKENDS, BackendEntry, BackendSettings, Launches},
    method::Method,
    model::{ActivationCheckpointing, Gpt2Spec, ModelSpec, Sparsify, gpt2},
    nn::{BatchShape, Bias},
    optim::AdamW,
    schedule::Schedule,
    trainer::Recipe,
};

mod departures;
mod method;
pub mod preset;
pub mod renamed;

pub use method::MethodConfig;

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The preset it began as; [`preset::IMPORTED`] for a model from elsewhere.
    pub preset: String,
    /// Of everything random.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u32,
    /// The model.
    pub model: ModelConfig,
    /// How it is trained.
    pub method: MethodConfig,
    /// AdamW and the learning rate.
    pub optimizer: OptimizerConfig,
    /// Tokens a step.
    pub batch: BatchConfig,
    /// The corpus.
    pub data: DataConfig,
    /// What is measured and saved, and when.
    pub run: RunConfig,
    /// Where it runs.
    pub backend: BackendConfig,
}

/// The model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The architecture, which decides the other keys of the section.
    #[serde(default)]
    pub kind: ModelKind,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of the residual stream; a multiple of 4 and of `heads`.
    pub d_model: usize,
    /// Width of the feed-forward network; a multiple of 4.
    pub d_ff: usize,
    /// Tokens per sequence.
    pub sequence_length: usize,
    /// Of the feed-forward blocks.
    pub activation: Activation,
    /// Biases of linear layers and norms.
    pub bias: bool,
    /// Probability of dropout.
    pub dropout: f32,
    /// Which linear layers may be pruned.
    pub sparsify: Sparsify,
    /// Activations that the backward pass recomputes instead of keeping; changes no result.
    pub activation_checkpointing: ActivationCheckpointing,
}

impl ModelConfig {
    /// The parameter whose rows are the vocabulary.
    #[must_use]
    pub fn token_table(&self) -> &'static str {
        match self.kind {
            ModelKind::Gpt2 => gpt2::TOKEN_TABLE,
        }
    }
}

/// A model architecture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// GPT-2: a decoder with pre-layer normalization and a tied head.
    #[default]
    Gpt2,
}

/// AdamW and the learning rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Peak learning rate.
    pub learning_rate: f32,
    /// Where the cosine ends.
    pub min_learning_rate: f32,
    /// Steps of linear warm-up.
    pub warmup_steps: u32,
    /// The step at which the cosine ends; 0 is the last step.
    pub decay_steps: u32,
    /// Adam's b1.
    pub beta1: f32,
    /// Adam's b2.
    pub beta2: f32,
    /// Adam's epsilon.
    pub epsilon: f32,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f32,
    /// Largest gradient norm; 0 disables clipping.
    pub max_grad_norm: f32,
}

/// Tokens a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Sequences per micro-batch.
    pub size: usize,
    /// Micro-batches per optimizer step.
    pub gradient_accumulation_steps: u32,
}

/// The corpus.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A text file, a folder of them, or prepared shards; empty is the embedded corpus.
    pub path: String,
    /// How text becomes tokens.
    pub tokenizer: TokenizerKind,
    /// Share of the text, at its end, that is the validation split.
    pub validation_share: f64,
}

/// What is measured and saved, and when; 0 is never.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Steps between evaluations on the held-out split; there is always one at the end.
    pub eval_every: u32,
    /// Steps between samples of the flip rate.
    pub flip_every: u32,
    /// Steps between readings of the instruments: the norm that masks keep, the gaps and flips of
    /// tiles, the noise of sampled gradients.
    #[serde(default)]
    pub instrument_every: u32,
    /// Steps between checkpoints; there is always one at the switch and at the end.
    pub checkpoint_every: u32,
    /// Checkpoints that are kept, besides the one at the switch.
    pub keep_last: usize,
    /// Checkpoints of the multiples of this are kept as well.
    pub keep_every: u32,
    /// What a loss or gradient that is not finite does.
    pub on_nonfinite: OnNonFinite,
    /// Steps that may be skipped in the whole run.
    pub skip_limit: u32,
    /// A loss so many standard deviations above the mean of the losses before it ends the run.
    pub spike_z: f32,
    /// How many losses before it.
    pub spike_window: usize,
    /// The directory of a dense run of the same schedule, whose flip rates this one's are compared
    /// with; empty is none.
    #[serde(default)]
    pub flip_reference: String,
}

/// What a loss or gradient that is not finite does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnNonFinite {
    /// It ends the run.
    Stop,
    /// Its step is done without an update.
    Skip,
}

/// Where it runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// `cpu` or `cuda`.
    pub name: String,
    /// Threads; 0 is one a core.
    pub threads: usize,
    /// Rounding of operands.
    pub arithmetic: Arithmetic,
    /// The number of the GPU, where the backend is one.
    pub gpu: usize,
    /// Whether steps on a GPU are captured as CUDA graphs and replayed; changes no result.
    pub cuda_graphs: bool,
    /// Folders with CUDA's libraries, separated as in `PATH`, tried after those of
    /// `SPARSE24_CUDA_LIBRARIES`.
    pub libraries: String,
}

impl BackendConfig {
    /// How the backend is opened.
    #[must_use]
    pub fn settings(&self) -> BackendSettings {
        let Self { arithmetic, gpu, cuda_graphs, .. } = *self;
        let launches = if cuda_graphs { Launches::Captured } else { Launches::Eager };
        let folders =
            std::env::split_paths(&self.libraries).filter(|folder| !folder.as_os_str().is_empty());
        BackendSettings { arithmetic, gpu, launches, libraries: folders.collect() }
    }
}

impl Config {
    /// A preset (that which the document names, or else [`preset::DEFAULT`], unless one is given),
    /// overlaid with a TOML document and then with `key=value` settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown preset or key (with the known ones), a value of the wrong
    /// type, a document that names another preset than the one given or is no TOML (with the line),
    /// or an impossible whole; [`Error::Io`] for the document.
    pub fn resolve(
        preset: Option<&str>,
        document: Option<&Path>,
        settings: &[String],
    ) -> Result<Self, Error> {
        let in_document = |error: Error| match (document, error) {
            (Some(path), Error::Setting { key, problem }) => {
                Error::setting(format!("{}: {key}", path.display()), problem)
            }
            (_, other) => other,
        };
        let table = match document {
            None => table_of(&preset::find(preset.unwrap_or(preset::DEFAULT))?),
            Some(path) => read_table(path, DOCUMENT)
                .and_then(|document| on_preset(preset, document))
                .map_err(in_document)?,
        };
        let table = settings.iter().try_fold(table, |table, setting| apply(table, setting))?;
        let config = Self::from_table(table)?;
        // Presets are possible: without settings it is the document that is not.
        config
            .check()
            .map_err(|error| if settings.is_empty() { in_document(error) } else { error })?;
        Ok(config)
    }

    /// A resolved configuration, as a run directory holds it.
    ///
    /// # Errors
    /// [`Error::File`] for a document that is no such configuration or an impossible one,
    /// [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let read = || {
            let mut table = read_table(path, DOCUMENT)?;
            renamed::update(&mut table);
            // For its messages alone: a resolved configuration leaves no key to the preset.
            overlay(&mut table_of(&preset::PRESETS[0].config()), table.clone(), "")?;
            let config = Self::from_table(table)?;
            config.check()?;
            Ok(config)
        };
        read().map_err(|error: Error| match error {
            Error::Setting { .. } => Error::file(path, error.to_string()),
            other => other,
        })
    }

    /// The document that resolves to this configuration.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is a TOML table")
    }

    /// A document, laid on the preset that it names or else on [`preset::DEFAULT`], and then
    /// settings; as [`Config::resolve`] does it.
    pub fn of_document(document: Table, settings: &[String]) -> Result<Self, Error> {
        settings
            .iter()
            .try_fold(on_preset(None, document)?, |table, setting| apply(table, setting))
            .and_then(Self::checked)
    }

    /// This configuration with a document laid over it.
    pub fn with(&self, document: Table) -> Result<Self, Error> {
        let mut table = table_of(self);
        overlay(&mut table, document, "")?;
        Self::checked(table)
    }

    fn checked(table: Table) -> Result<Self, Error> {
        let config = Self::from_table(table)?;
        config.check()?;
        Ok(config)
    }

    fn from_table(table: Table) -> Result<Self, Error> {
        Value::Table(table).try_into().map_err(|error: toml::de::Error| {
            // The library tells the key in its last line alone.
            let text = error.to_string();
            let key = text
                .lines()
                .last()
                .and_then(|line| line.strip_prefix("in `")?.strip_suffix('`'))
                .unwrap_or(ROOT);
            // What is found, and of a choice also what is known, stands between backquotes.
            let words: Vec<&str> = error.message().split('`').skip(1).step_by(2).collect();
            match (error.message(), words.as_slice()) {
                (message, [found, known @ ..]) if message.starts_with("unknown variant") => {
                    unknown(key, found, known.iter().copied())
                }
                (message, [found]) if message.ends_with("expected u32") => {
                    out_of_range(key, u32::MAX.into(), found)
                }
                (message, _) => Error::setting(key, message),
            }
        })
    }

    /// Refuses what cannot be trained.
    ///
    /// # Errors
    /// [`Error::Setting`] names the first key that is wrong.
    pub fn check(&self) -> Result<(), Error> {
        let refuse = |key: &str, problem: String| Err(Error::setting(key, problem));
        const MOST: usize = 1 << 24;
        let Self { model, optimizer, batch, run, .. } = self;
        let positive = [
            ("steps", self.steps as usize),
            ("model.layers", model.layers),
            ("model.heads", model.heads),
            ("model.d_model", model.d_model),
            ("model.d_ff", model.d_ff),
            ("model.sequence_length", model.sequence_length),
            ("batch.size", batch.size),
            ("batch.gradient_accumulation_steps", batch.gradient_accumulation_steps as usize),
            ("run.keep_last", run.keep_last),
            ("run.spike_window", run.spike_window),
        ];
        if let Some((key, _)) = positive.into_iter().find(|&(_, value)| value == 0) {
            return refuse(key, "expected at least 1, found 0".to_owned());
        }
        if let Some((key, value)) = positive.into_iter().skip(1).find(|&(_, value)| value > MOST) {
            return refuse(key, format!("expected at most {MOST}, found {value}"));
        }
        if self.backend.threads > 4096 {
            return refuse(
                "backend.threads",
                format!("expected at most 4096, 0 for one a core, found {}", self.backend.threads),
            );
        }
        if !model.d_model.is_multiple_of(4) {
            let problem = format!(
                "expected a multiple of 4, for 4x4 tiles, and of model.heads {}, found {}",
                model.heads, model.d_model
            );
            return refuse("model.d_model", problem);
        }
        if !model.d_model.is_multiple_of(model.heads) {
            let problem = format!(
                "expected a divisor of model.d_model {}, found {}",
                model.d_model, model.heads
            );
            return refuse("model.heads", problem);
        }
        if !model.d_ff.is_multiple_of(4) {
            return refuse(
                "model.d_ff",
                format!("expected a multiple of 4, for 4x4 tiles, found {}", model.d_ff),
            );
        }
        let shares = [
            ("model.dropout", model.dropout),
            ("optimizer.beta1", optimizer.beta1),
            ("optimizer.beta2", optimizer.beta2),
        ];
        if let Some((key, value)) =
            shares.into_iter().find(|(_, value)| !(0.0..1.0).contains(value))
        {
            return refuse(key, format!("expected a number in [0, 1), found {value}"));
        }
        let magnitudes = [
            ("method.lambda", self.method.lambda),
            ("optimizer.learning_rate", optimizer.learning_rate),
            ("optimizer.min_learning_rate", optimizer.min_learning_rate),
            ("optimizer.weight_decay", optimizer.weight_decay),
            ("optimizer.max_grad_norm", optimizer.max_grad_norm),
            ("run.spike_z", run.spike_z),
        ];
        if let Some((key, value)) =
            magnitudes.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0))
        {
            return refuse(key, format!("expected a finite number of at least 0, found {value}"));
        }
        // Adam divides 0 by it where a gradient was always 0.
        if !(optimizer.epsilon.is_finite() && optimizer.epsilon > 0.0) {
            return refuse(
                "optimizer.epsilon",
                format!("expected a finite number above 0, found {}", optimizer.epsilon),
            );
        }
        if (1..=optimizer.warmup_steps).contains(&optimizer.decay_steps) {
            let OptimizerConfig { warmup_steps, decay_steps, .. } = optimizer;
            let problem = format!(
                "expected more than optimizer.warmup_steps {warmup_steps}, or 0 for the last step, found {decay_steps}"
            );
            return refuse("optimizer.decay_steps", problem);
        }
        if !(self.data.validation_share > 0.0 && self.data.validation_share < 1.0) {
            let problem = format!(
                "expected the share to hold out, above 0 and below 1, found {}",
                self.data.validation_share
            );
            return refuse("data.validation_share", problem);
        }
        let backend = self.backend_entry()?;
        self.method_value()?.check(self.steps)?;
        // No backend depends on the vocabulary, which the corpus has yet to tell.
        Ok(self.recipe(1)?.check(&(backend.capabilities)())?)
    }

    /// Refuses to train a preset of a large corpus on the embedded text, which would be no more
    /// than days of memorising it.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty `data.path` where the preset has [`preset::Corpus::Named`].
    pub fn check_corpus(&self) -> Result<(), Error> {
        if self.data.path.is_empty() && preset::corpus(&self.preset) == preset::Corpus::Named {
            let problem = format!(
                "the preset {:?} is for a large corpus and not for the embedded text; name one with --data",
                self.preset
            );
            return Err(Error::setting("data.path", problem));
        }
        Ok(())
    }

    /// What can be trained but is perhaps not meant: a clause for who begins the run.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        let (warmup, steps) = (self.optimizer.warmup_steps, self.steps);
        (warmup >= steps).then(|| format!("warm-up (optimizer.warmup_steps = {warmup}) does not end within the run (steps = {steps})"))
    }

    /// The backend that it names.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown name.
    pub fn backend_entry(&self) -> Result<&'static BackendEntry, Error> {
        let name = &self.backend.name;
        let entry = BACKENDS.iter().find(|entry| entry.name == name);
        entry.ok_or_else(|| unknown("backend.name", name, BACKENDS.iter().map(|entry| entry.name)))
    }

    /// The method as a value.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown name or choice.
    pub fn method_value(&self) -> Result<Method, Error> {
        self.method.value()
    }

    /// All that determines the run, for a vocabulary.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown method or an impossible whole.
    pub fn recipe(&self, vocabulary: usize) -> Result<Recipe, Error> {
        let Self { model, optimizer, batch, .. } = self;
        let method = self.method_value()?;
        // Down to whole tiles, and at least one.
        let narrowed = model.d_ff as u64 * u64::from(method.width.numerator())
            / u64::from(method.width.denominator());
        let d_ff = (narrowed as usize / 4 * 4).max(4);
        let model_spec = match model.kind {
            ModelKind::Gpt2 => ModelSpec::Gpt2(Gpt2Spec {
                layers: model.layers,
                heads: model.heads,
                d_model: model.d_model,
                d_ff,
                sequence_length: model.sequence_length,
                vocabulary,
                activation: model.activation,
                bias: if model.bias { Bias::Present } else { Bias::Absent },
                sparsify: model.sparsify,
            }),
        };
        Ok(Recipe {
            model: model_spec,
            method,
            steps: self.steps,
            batch: BatchShape { size: batch.size, sequence_length: model.sequence_length },
            checkpointing: model.activation_checkpointing,
            gradient_accumulation_steps: NonZeroU32::new(batch.gradient_accumulation_steps)
                .ok_or_else(|| {
                    Error::setting(
                        "batch.gradient_accumulation_steps",
                        "expected at least 1, found 0",
                    )
                })?,
            dropout: model.dropout,
            optimizer: AdamW {
                beta1: optimizer.beta1,
                beta2: optimizer.beta2,
                epsilon: optimizer.epsilon,
                clip: if optimizer.max_grad_norm == 0.0 {
                    f32::INFINITY
                } else {
                    optimizer.max_grad_norm
                },
            },
            weight_decay: optimizer.weight_decay,
            schedule: Schedule {
                peak: optimizer.learning_rate,
                floor: optimizer.min_learning_rate,
                warmup_steps: optimizer.warmup_steps,
                decay_steps: if optimizer.decay_steps == 0 {
                    self.steps
                } else {
                    optimizer.decay_steps
                },
            },
            seed: self.seed,
        })
    }
}

/// What an unknown key at the top is part of.
const ROOT: &str = "configuration";

fn out_of_range(key: &str, most: u64, found: &str) -> Error {
    Error::setting(key, format!("expected at most {most}, found {found}"))
}

/// "X is not known; did you mean Y?", where one is near enough to be a slip: a third of the letters
/// at most.
pub fn unknown<'a>(key: &str, found: &str, known: impl Iterator<Item = &'a str> + Clone) -> Error {
    /// Takes memory for every pair of letters, and no key is that long.
    const LONGEST: usize = 64;
    let distance = |name: &&str| strsim::damerau_levenshtein(found, name);
    let near = |name: &&str| found.len() <= LONGEST && 3 * distance(name) <= found.chars().count();
    let nearest = known.clone().filter(near).min_by_key(distance);
    let all = known.collect::<Vec<_>>().join(", ");
    let advice = nearest.map_or_else(String::new, |nearest| format!("; did you mean {nearest:?}?"));
    Error::setting(key, format!("{found:?} is not known{advice} (known: {all})"))
}

/// The keys of a document, each with its section, and their values as TOML.
pub fn dotted(document: Table) -> BTreeMap<String, String> {
    fn flatten(table: Table, prefix: &str, into: &mut BTreeMap<String, String>) {
        for (key, value) in table {
            match value {
                Value::Table(section) => flatten(section, &format!("{prefix}{key}."), into),
                value => drop(into.insert(format!("{prefix}{key}"), value.to_string())),
            }
        }
    }
    let mut settings = BTreeMap::new();
    flatten(document, "", &mut settings);
    settings
}

/// The TOML table of a configuration.
pub fn table_of(config: &Config) -> Table {
    Table::try_from(config).expect("a configuration is a TOML table")
}

fn named_preset(name: &str) -> Result<Config, Error> {
    if name == preset::IMPORTED { Ok(preset::imported()) } else { preset::find(name) }
}

/// A document laid on the preset that it names, else on this one.
fn on_preset(preset: Option<&str>, document: Table) -> Result<Table, Error> {
    let named = document.get("preset").and_then(Value::as_str);
    if let (Some(named), Some(preset)) = (named, preset)
        && named != preset
    {
        return Err(Error::setting(
            "preset",
            format!(
                "found {named:?} here and {preset:?} for --preset, expected one of the two alone"
            ),
        ));
    }
    let mut table = table_of(&named_preset(named.or(preset).unwrap_or(preset::DEFAULT))?);
    overlay(&mut table, document, "")?;
    // Here, so that what is refused is known to stand in the document.
    Config::from_table(table.clone())?;
    Ok(table)
}

/// In bytes, some fifty configurations; parsing takes a hundred times as much memory.
const LONGEST_DOCUMENT: u64 = 1 << 16;

/// What is expected of a configuration's file.
const DOCUMENT: &str = "a TOML file; `sparse24 config` prints one";

/// The document in a file, of which `expected` tells where there is none.
pub fn read_table(path: &Path, expected: &str) -> Result<Table, Error> {
    let refuse = |line: usize, problem: &str| {
        Error::setting(format!("line {line}"), problem.replace('\n', ", "))
    };
    let bytes = disk::read_small(path, LONGEST_DOCUMENT).map_err(|e| e.expecting(expected))?;
    let line = |at: usize| 1 + bytes.iter().take(at).filter(|&&byte| byte == b'\n').count();
    let text = str::from_utf8(&bytes)
        .map_err(|error| refuse(line(error.valid_up_to()), "is not UTF-8 text"))?;
    text.parse::<Table>()
        .map_err(|error| refuse(line(error.span().map_or(0, |span| span.start)), error.message()))
}

/// Lays `over` on `base`, whose keys are all the known ones.
fn overlay(base: &mut Table, over: Table, prefix: &str) -> Result<(), Error> {
    for (key, value) in over {
        let dotted = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        let known: Vec<String> = base.keys().cloned().collect();
        let Some(slot) = base.get_mut(&key) else {
            if let Some(refusal) = renamed::refusal(&dotted) {
                return Err(refusal);
            }
            return Err(unknown(
                if prefix.is_empty() { ROOT } else { prefix },
                &key,
                known.iter().map(String::as_str),
            ));
        };
        match (slot, value) {
            (Value::Table(base), Value::Table(over)) => overlay(base, over, &dotted)?,
            (slot, value) => *slot = converted(&dotted, slot, value)?,
        }
    }
    Ok(())
}

/// The value in the type of the one it replaces; a whole number may stand for a float.
fn converted(key: &str, known: &Value, value: Value) -> Result<Value, Error> {
    match (known, value) {
        (Value::Float(_), Value::Integer(whole)) => Ok(Value::Float(whole as f64)),
        (Value::Integer(_), Value::Integer(negative @ ..0)) => Err(Error::setting(
            key,
            format!("expected a whole number of at least 0, found {negative}"),
        )),
        // A number that TOML cannot hold.
        (Value::Integer(_), Value::String(digits))
            if digits.bytes().all(|b| b.is_ascii_digit()) && digits.len() >= 19 =>
        {
            Err(out_of_range(key, i64::MAX as u64, &digits))
        }
        (known, value) if known.same_type(&value) => Ok(value),
        (known, value) => {
            Err(Error::setting(key, format!("expected {}, found {value}", described(known))))
        }
    }
}

fn described(value: &Value) -> &'static str {
    match value {
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Table(_) => "a section",
        Value::Array(_) => "a list of strings",
        _ => "a string",
    }
}

/// Applies `a.b=value`; the value is TOML, or a string as it stands where the key holds one.
fn apply(mut table: Table, setting: &str) -> Result<Table, Error> {
    let Some((key, text)) = setting.split_once('=') else {
        return Err(Error::setting(setting, "expected KEY=VALUE, found no ="));
    };
    let (key, text) = (key.trim(), text.trim());
    if key == "preset" {
        return Err(Error::setting(
            key,
            "a preset is what settings are laid on, choose it before them (--preset)",
        ));
    }
    // Sections do not nest: of more dots than one, all but the last are part of a name that is not
    // known.
    let (section, leaf) =
        key.rsplit_once('.').map_or((None, key), |(section, leaf)| (Some(section), leaf));
    let known = section.map_or(Some(&table), |section| table.get(section)?.as_table());
    let wants_string = known.and_then(|known| known.get(leaf)).is_some_and(Value::is_str);
    let verbatim = || Value::String(text.to_owned());
    let value = text
        .parse()
        .ok()
        .filter(|value: &Value| !wants_string || value.is_str())
        .unwrap_or_else(verbatim);
    let over = [(leaf.to_owned(), value)].into_iter().collect();
    let over = match section {
        None => over,
        Some(section) => [(section.to_owned(), Value::Table(over))].into_iter().collect(),
    };
    overlay(&mut table, over, "")?;
    Ok(table)
}
