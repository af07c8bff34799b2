//! The configuration of a run: one TOML document. Every key has a default; unknown keys are errors.
//!
//! Later layers win: the preset, a file, `--set key=value`. A resolved configuration names every
//! key, so a run directory explains itself.

use std::{
    collections::BTreeMap,
    num::NonZeroU32,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::{
    Error, Result,
    data::{self, TokenizerKind},
    images::{Augmentation, ImageSource},
    task::{self, Layout, TASKS, Task, TaskSource},
    translation::PairSource,
};
use sparse24_train::{
    backend::{Arithmetic, BackendSettings, Exchange, Launches},
    model::{Extents, ModelSpec},
    nn::Bias,
};

mod check;
mod document;
mod method;
mod model;
mod optimizer;
pub mod preset;
pub mod renamed;
mod run;
mod unknown;

pub use document::{dotted, meant, read_table, table_of};
pub use method::MethodConfig;
pub use model::{ModelConfig, ModelKind};
pub use optimizer::{OptimizerConfig, OptimizerName};
pub use run::{OnNonFinite, RunConfig};
pub use unknown::unknown;

use document::{DOCUMENT, apply, check_whole_numbers, from_table, on_preset, overlay};

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The preset under the other settings; [`preset::IMPORTED`] for an imported model.
    pub preset: String,
    /// Seed for all random draws.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u32,
    /// The model.
    pub model: ModelConfig,
    /// The training method.
    pub method: MethodConfig,
    /// The optimizer and the learning rate.
    pub optimizer: OptimizerConfig,
    /// Sequences per step.
    pub batch: BatchConfig,
    /// The corpus.
    pub data: DataConfig,
    /// The variation of training images.
    #[serde(default)]
    pub augmentation: Augmentation,
    /// The task of a fine-tuning.
    #[serde(default)]
    pub task: TaskConfig,
    /// When to measure and save, and when to stop early.
    pub run: RunConfig,
    /// The device.
    pub backend: BackendConfig,
}

/// Sequences per step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Sequences per micro-batch.
    pub size: usize,
    /// Micro-batches per optimizer step, or of the first step.
    pub gradient_accumulation_steps: u32,
    /// Micro-batches per optimizer step at the end of the run, to which they grow linearly; 0 is as
    /// many as at its start.
    #[serde(default)]
    pub final_gradient_accumulation_steps: u32,
    /// Equal parts of the micro-batches of a step, a power of two, whose gradients are summed as a
    /// binary tree: as many ranks, or fewer, give the same bits. A run that starts on several ranks
    /// has at least as many.
    #[serde(default = "one")]
    pub replicas: NonZeroU32,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

/// The corpus.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A text file, a folder of them, or prepared shards; of a Transformer, a folder of sentence
    /// pairs. Empty is the embedded corpus.
    pub path: String,
    /// How text becomes tokens.
    pub tokenizer: TokenizerKind,
    /// Share of the text, at its end, that is the validation split.
    pub validation_share: f64,
    /// Language of the sources of a Transformer, as their files end.
    #[serde(default)]
    pub source: String,
    /// Language of the targets.
    #[serde(default)]
    pub target: String,
    /// The most tokens of a Transformer's vocabulary, if it is trained; 0 is 32768.
    #[serde(default)]
    pub vocabulary: u32,
}

/// The task of a fine-tuning.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskConfig {
    /// A task of [`task::TASKS`]; empty for pre-training.
    pub name: String,
    /// Outputs per example: the classes, or 1 for a number.
    pub outputs: usize,
    /// Names of the classes in order, for a task that finds them in its training split; empty for
    /// other tasks, and in runs that do not know them.
    #[serde(default)]
    pub classes: Vec<String>,
    /// Tokens per example; longer ones are cut. 0 is the model's sequence length.
    pub max_length: usize,
    /// Tokens between the beginnings of the windows of a text that is longer than an example; 0 for
    /// tasks without windows.
    #[serde(default)]
    pub stride: usize,
}

/// The device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// `cpu`, `cuda` or `wgpu`.
    pub name: String,
    /// CPU threads of a run, unless its caller is on a rayon pool, which it then uses; 0 is one per
    /// core.
    pub threads: usize,
    /// Rounding of operands.
    pub arithmetic: Arithmetic,
    /// Number of the GPU.
    pub gpu: usize,
    /// Whether steps on a GPU are captured as CUDA graphs and replayed; changes no result.
    pub cuda_graphs: bool,
    /// How gradients travel between the GPUs of several ranks; changes no result.
    #[serde(default)]
    pub exchange: Exchange,
}

/// Keys that decide no bit of a model or of its metrics: a resume may change them, and checkpoints
/// do not record them.
pub const NEUTRAL: [&str; 17] = [
    "preset",
    "model.activation_checkpointing",
    "data.path",
    "run.instrument_every",
    "run.checkpoint_every",
    "run.keep_last",
    "run.keep_every",
    "run.keep_best",
    "run.on_nonfinite",
    "run.skip_limit",
    "run.spike_z",
    "run.spike_window",
    "run.flip_reference",
    "backend.threads",
    "backend.gpu",
    "backend.cuda_graphs",
    "backend.exchange",
];

/// Values that checkpoints leave out: they mean what a configuration without the key means.
pub(crate) const UNSET: [(&str, &str); 36] = [
    ("task.name", "\"\""),
    ("task.outputs", "0"),
    ("task.classes", "[]"),
    ("task.max_length", "0"),
    ("task.stride", "0"),
    ("optimizer.name", "\"adamw\""),
    ("optimizer.schedule", "\"cosine\""),
    ("optimizer.warmup_learning_rate", "0.0"),
    ("optimizer.momentum", "0.9"),
    ("optimizer.no_weight_decay", "\"vectors\""),
    ("batch.final_gradient_accumulation_steps", "0"),
    ("batch.replicas", "1"),
    ("optimizer.cooldown_steps", "0"),
    ("optimizer.ema_decay", "0.0"),
    ("run.eval_tokens", "0"),
    ("model.kind", "\"gpt2\""),
    ("model.image_size", "0"),
    ("model.patch_size", "0"),
    ("model.drop_path", "0.0"),
    ("model.label_smoothing", "0.0"),
    ("data.source", "\"\""),
    ("data.target", "\"\""),
    ("data.vocabulary", "0"),
    ("augmentation.repeats", "0"),
    ("augmentation.flip", "0.0"),
    ("augmentation.rand_augment", "0.0"),
    ("augmentation.rand_augment_deviation", "0.0"),
    ("augmentation.random_erasing", "0.0"),
    ("augmentation.mixup", "0.0"),
    ("augmentation.cutmix", "0.0"),
    ("method.decay", "\"\""),
    ("method.forward", "\"\""),
    ("method.dgrad", "\"\""),
    ("method.wgrad", "\"\""),
    ("method.phases", "[]"),
    ("method.d_ff_ratio", "\"1/2\""),
];

/// How to get back the configuration of a run.
pub(crate) const RESTORE: &str = "start the first command of its provenance.json with another \
    --out, stop it, and copy config.toml from there; a resume then names each difference from the \
    checkpoint";

/// Whether one of these `KEY=VALUE` settings sets a key.
#[must_use]
pub fn sets(settings: &[String], key: &str) -> bool {
    settings.iter().any(|setting| key_of(setting) == key)
}

/// The key of a `KEY=VALUE`.
pub(crate) fn key_of(setting: &str) -> &str {
    setting.split('=').next().unwrap_or_default().trim()
}

fn has(document: &Table, section: &str, key: &str) -> bool {
    document.get(section).and_then(Value::as_table).is_some_and(|table| table.contains_key(key))
}

impl BackendConfig {
    /// The arguments for opening the backend.
    #[must_use]
    pub fn settings(&self) -> BackendSettings {
        let Self { arithmetic, gpu, cuda_graphs, exchange, .. } = *self;
        let launches = if cuda_graphs { Launches::Captured } else { Launches::Eager };
        BackendSettings { arithmetic, gpu, launches, exchange }
    }
}

/// The preset [`preset::DEFAULT`].
impl Default for Config {
    fn default() -> Self {
        preset::find(preset::DEFAULT).expect("the default is a preset")
    }
}

impl Config {
    /// Resolves a configuration: a preset, overlaid with a TOML document and then with `key=value`
    /// settings. Without `preset`, it is the one that the document names, or [`preset::DEFAULT`].
    /// The tokenizer is that of prepared data, unless the document or a setting names one. Another
    /// method than that of the layer below comes with its own lambda, unless one is set.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown preset or key (with the known ones), a value of the wrong
    /// type, a document that is not TOML (with the line) or names another preset than `preset`, or
    /// settings that cannot be trained together; [`Error::Io`] for the document.
    pub fn resolve(
        preset: Option<&str>,
        document: Option<&Path>,
        settings: &[String],
    ) -> Result<Self> {
        Self::resolve_over(preset, &[], document, settings)
    }

    /// Like [`Config::resolve`], with settings `given` between the preset and the document: those
    /// of a model to start from.
    ///
    /// # Errors
    /// Like [`Config::resolve`].
    pub fn resolve_over(
        preset: Option<&str>,
        given: &[String],
        document: Option<&Path>,
        settings: &[String],
    ) -> Result<Self> {
        let in_document = |error: Error| match (document, error) {
            (Some(path), Error::Setting { key, problem }) => {
                Error::setting(format!("{}: {key}", path.display()), problem)
            }
            (_, other) => other,
        };
        let mut names_tokenizer = sets(settings, "data.tokenizer");
        let below = match document {
            None => preset::find(preset.unwrap_or(preset::DEFAULT))?.under(Table::new(), given)?,
            Some(path) => read_table(path, DOCUMENT)
                .and_then(|document| {
                    names_tokenizer |= has(&document, "data", "tokenizer");
                    on_preset(preset, given, document)
                })
                .map_err(in_document)?,
        };
        let config = below.under(Table::new(), settings)?.for_data(names_tokenizer);
        // Presets are valid, so without settings the document is at fault.
        config
            .check()
            .map_err(|error| if settings.is_empty() { in_document(error) } else { error })?;
        Ok(config)
    }

    /// Reads the resolved configuration of a run directory, which an earlier version may have
    /// written.
    ///
    /// # Errors
    /// [`Error::File`] for a document that is not a whole configuration or cannot be trained;
    /// [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self> {
        let read = || {
            let mut table = read_table(path, DOCUMENT)?;
            renamed::update(&mut table);
            // Only for its messages: a whole configuration leaves no key to the preset.
            overlay(&mut table_of(&preset::PRESETS[0].config()), table.clone(), "")?;
            Self::checked(table)
        };
        read().map_err(|error: Error| match error {
            Error::Setting { problem, .. } if problem.starts_with("missing field") => {
                Error::file(path, format!("is incomplete, perhaps cut off: {problem}; {RESTORE}"))
            }
            Error::Setting { .. } => Error::file(path, error.to_string()),
            other => other,
        })
    }

    /// The task, if it is a fine-tuning.
    ///
    /// # Errors
    /// [`Error::Setting`] for an unknown one.
    pub fn task(&self) -> Result<Option<&'static Task>> {
        let name = &self.task.name;
        if name.is_empty() {
            return Ok(None);
        }
        let names = TASKS.iter().map(|task| task.name);
        task::find(name).map(Some).ok_or_else(|| unknown("task.name", name, names))
    }

    /// The examples of the task, if it is a fine-tuning.
    ///
    /// # Errors
    /// Like [`Config::task`].
    pub fn task_source(&self) -> Result<Option<TaskSource>> {
        let layout = match self.model.kind {
            ModelKind::Gpt2 => Layout::Gpt2,
            ModelKind::CrammedBert => Layout::CrammedBert,
            // The others have no task of texts, which the check refuses.
            _ => Layout::Bert,
        };
        let source = |task| {
            let folder = PathBuf::from(&self.data.path);
            let (max_length, stride) = (self.batch_length(), self.task.stride);
            let classes = self.task.classes.clone();
            TaskSource { task, folder, layout, classes, max_length, stride }
        };
        Ok(self.task()?.map(source))
    }

    /// The images of a DeiT.
    pub(crate) fn image_source(&self) -> Option<ImageSource> {
        let ModelConfig { kind, image_size: size, patch_size: patch, .. } = self.model;
        let (folder, augmentation) = (PathBuf::from(&self.data.path), self.augmentation);
        (kind == ModelKind::Deit).then_some(ImageSource { folder, size, patch, augmentation })
    }

    /// Token ids of the model, or the classes of ImageNet, for data that are not read.
    #[must_use]
    pub fn usual_vocabulary(&self) -> usize {
        if self.model.kind == ModelKind::Deit {
            return 1000;
        }
        let DataConfig { tokenizer, vocabulary, .. } = self.data;
        let usual = match vocabulary {
            0 => tokenizer.usual_vocabulary(),
            most => most,
        };
        self.model.with_mask(usual, tokenizer == TokenizerKind::WordPiece)
    }

    /// The sentence pairs of a Transformer.
    #[must_use]
    pub fn pair_source(&self) -> Option<PairSource> {
        let DataConfig { path, tokenizer: kind, source, target, vocabulary, .. } = &self.data;
        let source = || PairSource {
            folder: path.into(),
            languages: [source.clone(), target.clone()],
            kind: *kind,
            vocabulary: *vocabulary,
            longest: self.model.sequence_length,
        };
        (self.model.kind == ModelKind::Transformer).then(source)
    }

    /// Tokens per sequence of a batch.
    #[must_use]
    pub fn batch_length(&self) -> usize {
        match self.task.max_length {
            0 => self.model.sequence_length,
            length => length,
        }
    }

    /// The document that resolves to this configuration.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a configuration is a TOML table")
    }

    /// Resolves a parsed document and settings, like [`Config::resolve`].
    pub fn of_document(document: Table, settings: &[String]) -> Result<Self> {
        on_preset(None, &[], document)?.with_settings(settings)
    }

    /// Like [`Config::of_document`], with the tokenizer of prepared data unless one is named.
    ///
    /// # Errors
    /// Like [`Config::resolve`].
    pub fn of_base(document: Table, settings: &[String]) -> Result<Self> {
        let names = sets(settings, "data.tokenizer") || has(&document, "data", "tokenizer");
        Ok(Self::of_document(document, settings)?.for_data(names))
    }

    /// With the tokenizer of prepared data, unless the user names one.
    fn for_data(mut self, names_tokenizer: bool) -> Self {
        let path = Path::new(&self.data.path);
        let own = if names_tokenizer { None } else { data::tokenizer_of(path) };
        self.data.tokenizer = own.unwrap_or(self.data.tokenizer);
        self
    }

    /// This configuration with other settings, each `key=value`.
    ///
    /// # Errors
    /// Like [`Config::resolve`].
    pub fn with_settings(&self, settings: &[String]) -> Result<Self> {
        let config = self.under(Table::new(), settings)?;
        config.check().map(|()| config)
    }

    /// The settings, each `key=value`, of a model of this shape.
    #[must_use]
    pub fn shape(model: &ModelSpec) -> Vec<String> {
        let Extents { layers, heads, d_model, d_ff, longest, activation, bias } = model.extents();
        let word = |value: Result<Value, _>| value.expect("a choice is a word").to_string();
        let settings = [
            ("kind", word(Value::try_from(ModelKind::of(model)))),
            ("layers", layers.to_string()),
            ("heads", heads.to_string()),
            ("d_model", d_model.to_string()),
            ("d_ff", d_ff.to_string()),
            ("sequence_length", longest.to_string()),
            ("activation", word(Value::try_from(activation))),
            ("bias", (bias == Bias::Present).to_string()),
        ];
        let images = match model {
            ModelSpec::Deit(spec) => vec![
                ("image_size", spec.image_size.to_string()),
                ("patch_size", spec.patch_size.to_string()),
            ],
            _ => Vec::new(),
        };
        let settings = settings.into_iter().chain(images);
        settings.map(|(key, value)| format!("model.{key}={value}")).collect()
    }

    /// This configuration, overlaid with a document.
    pub fn with(&self, document: Table) -> Result<Self> {
        let config = self.under(document, &[])?;
        config.check().map(|()| config)
    }

    /// The configuration of a checkpoint, which recorded [`Self::decisive`]; neutral settings are
    /// this one's.
    pub(crate) fn recorded(&self, saved: Table) -> Result<Self> {
        let unset = UNSET.map(|(key, value)| format!("{key}={value}"));
        self.under(Table::new(), &unset)?.with(saved)
    }

    /// A layer over this configuration, unchecked: a document and settings. Another method brings
    /// its own lambda, unless the layer sets one or this one's is not its method's own; images and
    /// patches of another size bring the sequence length of a DeiT, unless the layer sets one.
    fn under(&self, document: Table, settings: &[String]) -> Result<Self> {
        check_whole_numbers(self)?;
        let sets_lambda = has(&document, "method", "lambda") || sets(settings, "method.lambda");
        let sets_length =
            has(&document, "model", "sequence_length") || sets(settings, "model.sequence_length");
        let mut table = table_of(self);
        overlay(&mut table, document, "")?;
        let table = settings.iter().try_fold(table, |table, setting| apply(table, setting))?;
        let mut above: Self = from_table(table)?;
        if above.model.kind == ModelKind::Deit && !sets_length {
            let side = above.model.image_size.checked_div(above.model.patch_size).unwrap_or(0);
            above.model.sequence_length = side.saturating_mul(side).saturating_add(1);
        }
        let is_other = above.method.name != self.method.name;
        if is_other && !sets_lambda && preset::own_lambda(self) == Some(self.method.lambda) {
            above.method.lambda = preset::own_lambda(&above).unwrap_or(self.method.lambda);
        }
        Ok(above)
    }

    fn checked(table: Table) -> Result<Self> {
        let config: Self = from_table(table)?;
        config.check()?;
        Ok(config)
    }

    /// The settings that make this configuration of its preset, each as `--set` takes it.
    ///
    /// # Panics
    /// Like [`table_of`].
    #[must_use]
    pub fn overrides(&self) -> Vec<String> {
        let preset = preset::named(&self.preset).map(|preset| dotted(table_of(&preset)));
        let (preset, settings) = (preset.unwrap_or_default(), dotted(table_of(self)));
        let has_own = preset::own_lambda(self) == Some(self.method.lambda);
        let differing = settings.iter().filter(|(key, value)| {
            preset.get(*key) != Some(value) && !(has_own && *key == "method.lambda")
        });
        differing.map(|(key, value)| format!("{key}={value}")).collect()
    }

    /// The settings that decide the bits of the model or of its metrics: dotted keys and TOML
    /// values. Runs with equal decisive settings and data end with equal bits.
    ///
    /// # Panics
    /// Like [`table_of`].
    #[must_use]
    pub fn decisive(&self) -> BTreeMap<String, String> {
        let mut settings = dotted(table_of(self));
        settings.retain(|key, value| {
            !NEUTRAL.contains(&key.as_str()) && !UNSET.contains(&(key.as_str(), value.as_str()))
        });
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_with_its_overrides_is_the_configuration() {
        let settings = [
            "data.path=\"a b\"",
            "data.validation_share=0.25",
            "method.name=\"sr-ste\"",
            "model.bias=true",
            "optimizer.learning_rate=0.0003",
            "seed=9",
            "steps=7",
        ]
        .map(str::to_owned);
        let preset = Some("shakespeare-char");
        let config = Config::resolve(preset, None, &settings).unwrap();
        assert_eq!(config.overrides(), settings);
        assert_eq!(Config::resolve(preset, None, &[]).unwrap().overrides(), [""; 0]);
    }

    #[test]
    fn settings_that_are_probably_unintended_have_a_remark() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["train.bin", "val.bin"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let shards = format!("data.path={}", folder.path().display());
        for (settings, expected) in [
            (["optimizer.warmup_steps=100", "steps=100"], "warm-up (optimizer.warmup_steps = 100)"),
            (["method.name=dense", "method.lambda=1.0"], "method.lambda has no effect"),
            ([&shards, "data.validation_share=0.2"], "data.validation_share has no effect"),
            (["data.path=.", "data.validation_share=0.2"], ""),
            (["optimizer.schedule=wsd", "optimizer.cooldown_steps=1901"], "than the 1900 steps"),
            (["optimizer.schedule=wsd", "optimizer.cooldown_steps=1900"], ""),
            (["optimizer.learning_rate=1e-3", "optimizer.min_learning_rate=2e-3"], "rises after"),
        ] {
            let settings = settings.map(str::to_owned);
            let config = Config::resolve(Some("shakespeare-char-cpu"), None, &settings).unwrap();
            let remarks = config.remarks().join("; ");
            assert!(remarks.contains(expected), "{settings:?}: {remarks}");
            assert_eq!(remarks.is_empty(), expected.is_empty(), "{settings:?}: {remarks}");
        }
    }
}
