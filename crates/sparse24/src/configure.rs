//! The arguments that commands share: how a configuration is resolved.

use std::path::PathBuf;

use sparse24_run::config::Config;

use crate::failure::{Exit, Failure};

/// Preset, then file, then flags and `--set`.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct Configure {
    /// A named configuration, quickstart unless a file names another; `sparse24 presets` lists them
    #[arg(long)]
    preset: Option<String>,
    /// A TOML file laid over the preset
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One setting, e.g. `model.layers=6`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// A text file, a folder of text files, or prepared shards; the embedded corpus otherwise
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// The training method; `sparse24 presets --methods` lists them
    #[arg(long)]
    method: Option<String>,
    /// The device: cpu or cuda
    #[arg(long)]
    backend: Option<String>,
    /// Optimizer steps
    #[arg(long, allow_negative_numbers = true)]
    steps: Option<String>,
    /// Of everything random
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<String>,
    /// Steps between checkpoints
    #[arg(long, value_name = "STEPS", allow_negative_numbers = true)]
    checkpoint_every: Option<String>,
    /// What a loss or gradient that is not finite does: stop (the run ends, the last checkpoint
    /// stays) or skip (the step has no update)
    #[arg(long, value_name = "stop|skip")]
    on_nonfinite: Option<String>,
}

impl Configure {
    /// The resolved configuration.
    pub(crate) fn resolve(&self) -> Result<Config, Failure> {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let unreadable = |path: &PathBuf| {
            Failure::new(
                Exit::Usage,
                format!("--data {}: the name is not UTF-8; rename it", path.display()),
            )
        };
        let name = |path: &PathBuf| path.to_str().map(quoted).ok_or_else(|| unreadable(path));
        let data = self.data.as_ref().map(name).transpose()?;
        let flags = [
            ("data.path", data),
            ("method.name", self.method.as_deref().map(quoted)),
            ("backend.name", self.backend.as_deref().map(quoted)),
            ("steps", self.steps.clone()),
            ("seed", self.seed.clone()),
            ("run.checkpoint_every", self.checkpoint_every.clone()),
            ("run.on_nonfinite", self.on_nonfinite.as_deref().map(quoted)),
        ];
        let flags = flags.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        let settings: Vec<String> = self.settings.iter().cloned().chain(flags).collect();
        Ok(Config::resolve(self.preset.as_deref(), self.config.as_deref(), &settings)?)
    }
}
