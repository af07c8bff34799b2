//! `sparse24 bench`: the speed of the GPU kernels, or a profile of a training step.

use regex::Regex;

use crate::failure::{Exit, Failure, Result};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod cuda {
    use crate::failure::{Exit, Failure, Result};

    pub(super) type Size = String;

    pub(super) fn run(_: &super::Args) -> Result {
        let problem = "bench measures GPU kernels, but this build lacks the feature `cuda`: \
                       rebuild with it";
        Err(Failure::new(Exit::Usage, problem))
    }
}

/// Verify and time the operations of training on an NVIDIA GPU, or profile a training step
///
/// Exits with 0 only if every result is correct.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run only kernels whose name matches; may be repeated
    #[arg(long, value_name = "REGEX")]
    kernel: Vec<Regex>,
    /// Run only this size: gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m, a d_model, or ROWSxCOLUMNS;
    /// may be repeated
    #[arg(long, value_name = "SIZE")]
    size: Vec<cuda::Size>,
    /// Take fewer samples, at the cost of a wider spread
    #[arg(long)]
    quick: bool,
    /// List the cases without running them; needs no GPU
    #[arg(long)]
    list: bool,
    /// Index of the GPU in the driver's order; with --step, overrides `backend.gpu`
    #[arg(long, value_name = "NUMBER")]
    gpu: Option<usize>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Profile a steady training step of this preset instead of single kernels
    #[arg(long, value_name = "PRESET", conflicts_with_all = ["kernel", "size", "list"])]
    step: Option<String>,
    /// Training method of the step; `sparse24 presets --methods` lists them
    #[arg(long, requires = "step")]
    method: Option<String>,
    /// A setting of the step, e.g. `model.layers=6`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "step")]
    settings: Vec<String>,
    /// Compute the step's sparse products as on GPUs other than Hopper
    #[arg(long, requires = "step")]
    without_wgmma: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let is_other = |set: &&String| {
        set.strip_prefix("backend.name=").is_some_and(|name| name.trim_matches('"') != "cuda")
    };
    if let Some(set) = args.settings.iter().find(is_other) {
        let problem = format!("--set {set}: bench measures the backend cuda alone");
        return Err(Failure::new(Exit::Usage, problem));
    }
    cuda::run(args)
}
