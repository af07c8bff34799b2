//! Arguments and output of `bench`. The cases, checks and timing are in `sparse24_cuda::bench`.

use sparse24_train::backend::BackendSettings;

use super::Args;
use crate::failure::Result;

mod kernels;
mod layers;
mod operations;
mod step;
mod table;

pub(super) use sparse24_cuda::bench::Size;

impl Args {
    /// The settings, overridden by `--gpu` where given.
    fn override_settings(&self, settings: BackendSettings) -> BackendSettings {
        BackendSettings { gpu: self.gpu.unwrap_or(settings.gpu), ..settings }
    }
}

pub(super) fn run(args: &Args) -> Result {
    match &args.step {
        Some(preset) => step::run(args, preset),
        None => kernels::run(args),
    }
}
