//! Arguments and output of `bench`. The cases, checks and timing are in `sparse24_cuda::bench`.

use sparse24_train::backend::BackendSettings;

use super::Args;
use crate::failure::Failure;

mod kernels;
mod step;
mod table;

pub(super) use sparse24_cuda::bench::Size;

impl Args {
    /// The settings, overridden by `--gpu` and `--libraries` where given.
    fn override_settings(&self, settings: BackendSettings) -> BackendSettings {
        let libraries = self
            .libraries
            .as_ref()
            .map_or(settings.libraries, |list| std::env::split_paths(list).collect());
        BackendSettings { gpu: self.gpu.unwrap_or(settings.gpu), libraries, ..settings }
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    match &args.step {
        Some(preset) => step::run(args, preset),
        None => kernels::run(args),
    }
}
