//! The arguments that several commands share: how a configuration is resolved, and on which backend
//! a model is computed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use sparse24_run::{
    ErrorKind,
    config::{self, Config, dotted, read_table},
    run::Model,
};
use sparse24_train::trainer::Trainer;

use crate::failure::{Exit, Failure, Result};

/// Resolved in this order: preset, file, `--set`, flags.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct Configure {
    /// Named configuration to start from [default: the file's, or quickstart]; `sparse24 presets`
    /// lists them
    #[arg(long)]
    preset: Option<String>,
    /// TOML file with settings that override the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, e.g. `model.layers=6`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Text file, folder of text files or token shards; or a folder of images (DeiT), of sentence
    /// pairs (Transformer) or of a task's files [default: the embedded corpus]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Training method; `sparse24 presets --methods` lists them
    #[arg(long)]
    method: Option<String>,
    /// Backend: cpu, cuda or wgpu
    #[arg(long)]
    backend: Option<String>,
    /// Number of optimizer steps
    #[arg(long, allow_negative_numbers = true)]
    steps: Option<String>,
    /// Seed for all random draws
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<String>,
    /// Steps between checkpoints
    #[arg(long, value_name = "STEPS", allow_negative_numbers = true)]
    checkpoint_every: Option<String>,
    /// Reaction to a loss or gradient that is not finite: stop the run and keep its last
    /// checkpoint, or skip the update of that step
    #[arg(long, value_name = "stop|skip")]
    on_nonfinite: Option<String>,
}

pub(crate) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The value of `--data` as a setting.
pub(crate) fn quoted_path(path: &Path) -> Result<String> {
    path.to_str().map(quote).ok_or_else(|| {
        let problem = format!("--data {}: the name is not UTF-8; rename it", path.display());
        Failure::new(Exit::Usage, problem)
    })
}

impl Configure {
    /// The data that the user names.
    pub(crate) fn data(&self) -> Option<&Path> {
        self.data.as_deref()
    }

    /// Whether the user sets this key by `--set`.
    pub(crate) fn sets(&self, key: &str) -> bool {
        config::sets(&self.settings, key)
    }

    pub(crate) fn has_seed(&self) -> bool {
        self.seed.is_some()
    }

    /// These arguments with other data and another seed.
    pub(crate) fn with(&self, data: PathBuf, seed: u64) -> Self {
        Self { data: Some(data), seed: Some(seed.to_string()), ..self.clone() }
    }

    pub(crate) fn resolve(&self) -> Result<Config> {
        self.resolve_over(&[])
    }

    /// With settings `given` that the user's own come after.
    pub(crate) fn resolve_over(&self, given: &[String]) -> Result<Config> {
        self.resolve_on(None, given)
    }

    /// The same, on `preset` if the user names none.
    pub(crate) fn resolve_on(&self, preset: Option<&str>, given: &[String]) -> Result<Config> {
        let (preset, file) = (self.preset.as_deref().or(preset), self.config.as_deref());
        Ok(Config::resolve_over(preset, given, file, &self.own_settings()?)?)
    }

    /// The keys that the user sets: in the file, by `--set` and by flags.
    pub(crate) fn keys(&self) -> Result<BTreeSet<String>> {
        let file =
            self.config.as_deref().map(|path| read_table(path, "a TOML file")).transpose()?;
        let own = self.asked()?;
        Ok(dotted(file.unwrap_or_default()).into_iter().chain(own).map(|(key, _)| key).collect())
    }

    /// The settings from `--set` and from flags, as a map from key to value.
    pub(crate) fn asked(&self) -> Result<BTreeMap<String, String>> {
        Ok(by_key(&self.own_settings()?))
    }

    /// Each `--set`, then flags as settings.
    fn own_settings(&self) -> Result<Vec<String>> {
        let flags = [
            ("data.path", self.data.as_deref().map(quoted_path).transpose()?),
            ("method.name", self.method.as_deref().map(quote)),
            ("backend.name", self.backend.as_deref().map(quote)),
            ("steps", self.steps.clone()),
            ("seed", self.seed.clone()),
            ("run.checkpoint_every", self.checkpoint_every.clone()),
            ("run.on_nonfinite", self.on_nonfinite.as_deref().map(quote)),
        ];
        let flags = flags.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        Ok(self.settings.iter().cloned().chain(flags).collect())
    }
}

/// Splits each `KEY=VALUE`; the last value of a key counts.
pub(crate) fn by_key(settings: &[String]) -> BTreeMap<String, String> {
    let pairs = settings.iter().filter_map(|setting| setting.split_once('='));
    pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned())).collect()
}

/// The backend of a model that is not trained.
#[derive(clap::Args, Debug)]
pub(crate) struct Computing {
    /// Backend: cpu, cuda or wgpu, on GPU 0 and in native arithmetic [default: the run's settings]
    #[arg(long)]
    backend: Option<String>,
    /// One setting of the backend, e.g. `backend.gpu=1`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

impl Computing {
    /// Chooses the backend of a model; a setting that does not concern the backend is refused.
    pub(crate) fn choose(&self, mut model: Model) -> Result<Model> {
        if let Some(other) = self.settings.iter().find(|set| !set.starts_with("backend.")) {
            let problem = format!("--set: expected a setting of the backend, found {other}");
            return Err(Failure::new(Exit::Usage, problem));
        }
        let mut settings = Vec::new();
        if let Some(name) = &self.backend {
            settings = ["gpu=0", "arithmetic=native", "exchange=auto"]
                .map(|default| format!("backend.{default}"))
                .into();
            settings.push(format!("backend.name={}", quote(name)));
        }
        settings.extend_from_slice(&self.settings);
        model.config = model.config.with_settings(&settings)?;
        Ok(model)
    }
}

/// Loads a model on its backend.
pub(crate) fn load(model: Model) -> Result<Trainer> {
    let advice = match &*model.config.backend.name {
        "cpu" => "",
        _ => "; or use the CPU, with --backend cpu",
    };
    model.into_trainer().map_err(|error| match error.kind() {
        ErrorKind::Device => Failure::new(Exit::Device, format!("{error}{advice}")),
        _ => error.into(),
    })
}
