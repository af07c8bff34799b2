//! `sparse24 bench`: how fast the CUDA kernels are on this machine's GPU, and where the time of a
//! training step goes.
//!
//! Arguments and printing; cases, checks and clocks are `sparse24_cuda::bench`'s.

use std::ffi::OsString;

use regex::Regex;

use crate::failure::Failure;

#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod step;
#[cfg(feature = "cuda")]
mod table;

#[cfg(feature = "cuda")]
use sparse24_cuda::bench::Size;
#[cfg(feature = "cuda")]
use sparse24_train::backend::BackendSettings;
#[cfg(not(feature = "cuda"))]
type Size = String;

/// Verify and time the CUDA kernels on this machine's GPU, or profile a training step; exits 0 only
/// if all are right
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Only kernels with a match in their name; may be repeated
    #[arg(long, value_name = "REGEX")]
    kernel: Vec<Regex>,
    /// Only this size: gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m, a width, or ROWSxCOLUMNS; may
    /// be repeated
    #[arg(long, value_name = "SIZE")]
    size: Vec<Size>,
    /// Fewer timings: seconds instead of minutes, and a wider spread
    #[arg(long)]
    quick: bool,
    /// Name the cases and run none; needs no GPU
    #[arg(long)]
    list: bool,
    /// The number of the GPU, as its driver counts; of a step, that of its settings unless given
    #[arg(long, value_name = "NUMBER")]
    gpu: Option<usize>,
    /// Folders with CUDA's libraries, as the setting `backend.libraries`
    #[arg(long, value_name = "FOLDERS")]
    libraries: Option<OsString>,
    /// One JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Instead, where the time of a steady training step of this preset goes
    #[arg(long, value_name = "PRESET", conflicts_with_all = ["kernel", "size", "list"])]
    step: Option<String>,
    /// The training method of the step; `sparse24 presets --methods` lists them
    #[arg(long, requires = "step")]
    method: Option<String>,
    /// A setting of the step, e.g. `batch.size=16`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "step")]
    settings: Vec<String>,
}

#[cfg(feature = "cuda")]
impl Args {
    /// Settings, but for the arguments that say otherwise.
    fn over(&self, settings: BackendSettings) -> BackendSettings {
        let libraries = self
            .libraries
            .as_ref()
            .map_or(settings.libraries, |list| std::env::split_paths(list).collect());
        BackendSettings { gpu: self.gpu.unwrap_or(settings.gpu), libraries, ..settings }
    }
}

#[cfg(feature = "cuda")]
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.step {
        Some(preset) => step::run(args, preset),
        None => kernels::run(args),
    }
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn run(_: &Args) -> Result<(), Failure> {
    let sentence = "bench times the kernels of GPUs, and this build is without the feature `cuda`: build with it";
    Err(Failure::new(crate::failure::Exit::Usage, sentence))
}
