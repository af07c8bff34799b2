//! `sparse24 estimate`: what a run costs, before it starts.

use serde::Serialize;
use sparse24_run::{processor, run::open_dataset};
use sparse24_train::estimate::{Estimate, estimate};

use crate::{
    configure::Configure,
    failure::{Exit, Failure},
    output::{counted, print_json, say},
};

/// Estimate parameters, memory, floating-point operations and time of a configuration
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    estimate: Estimate,
    device_bytes: u64,
    steps: u32,
    gflops_measured: f64,
    seconds_per_step: f64,
    seconds: f64,
}

/// Time of a step over the time of its products, measured on the preset shakespeare-char-cpu
/// (docs/performance.md).
const OVERHEAD: f64 = 1.4;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = args.configure.resolve()?;
    if config.backend.name != "cpu" {
        let problem = format!(
            "backend.name: found {:?}, but only the CPU can be estimated; add --backend cpu",
            config.backend.name
        );
        return Err(Failure::new(Exit::Usage, problem));
    }
    let recipe = config.recipe(open_dataset(&config)?.vocabulary() as usize)?;
    let estimate = estimate(&recipe);
    let flops = processor::flops_per_second(recipe.model.width, recipe.model.ffn_width)?;
    let seconds_per_step = estimate.flops_per_step * OVERHEAD / flops;
    let report = Report {
        estimate,
        device_bytes: estimate.device_bytes(),
        steps: recipe.steps,
        gflops_measured: flops / 1e9,
        seconds_per_step,
        seconds: seconds_per_step * f64::from(recipe.steps),
    };
    if args.json {
        return print_json(&report);
    }
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    say!("parameters   {} ({} of them sparsifiable)", estimate.parameters, estimate.sparsifiable);
    say!("memory       {} in total", mib(report.device_bytes));
    say!(
        "  weights {}, gradients {}, moments {}",
        mib(estimate.weight_bytes),
        mib(estimate.gradient_bytes),
        mib(estimate.moment_bytes)
    );
    say!(
        "  masks and pruned operands {}, activations {}",
        mib(estimate.sparse_bytes),
        mib(estimate.activation_bytes)
    );
    say!("checkpoint   {}", mib(estimate.checkpoint_bytes));
    say!(
        "a step       {} tokens, {:.3} GFLOP, {:.0} % of it 2:4",
        estimate.tokens_per_step,
        estimate.flops_per_step / 1e9,
        100.0 * estimate.sparse_share
    );
    say!(
        "time         {} a step, {} for {}",
        duration(seconds_per_step),
        duration(report.seconds),
        counted(recipe.steps as usize, "step")
    );
    say!(
        "             from {:.0} GFLOP/s, measured now on this machine; {OVERHEAD} times the \
         products' time covers everything else",
        report.gflops_measured
    );
    Ok(())
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}
