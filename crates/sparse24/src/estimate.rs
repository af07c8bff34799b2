//! `sparse24 estimate`: what a run costs, before it starts.

use serde::Serialize;
use sparse24_run::{
    config::{Config, ModelKind},
    machine::{self, Memory},
    processor,
    run::{check_tensors, host_bytes, open_data},
};
use sparse24_train::estimate::{Estimate, estimate};

use crate::{
    configure::Configure,
    failure::Result,
    output::{counted, note, print_json, say},
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
    host_bytes: u64,
    /// Memory of this machine.
    memory: Option<Memory>,
    steps: u32,
    #[serde(flatten)]
    time: Option<Time>,
}

#[derive(Serialize)]
struct Time {
    gflops_measured: f64,
    seconds_per_step: f64,
    seconds: f64,
}

/// The time on this machine's processor, where the backend is the CPU.
impl Time {
    fn measure(config: &Config, estimate: &Estimate, steps: u32) -> Result<Option<Self>> {
        if config.backend.name != "cpu" {
            return Ok(None);
        }
        let flops = processor::flops_per_second(config.model.d_model, config.model.d_ff)?;
        let seconds_per_step = estimate.flops_per_step * OVERHEAD / flops;
        let seconds = seconds_per_step * f64::from(steps);
        Ok(Some(Self { gflops_measured: flops / 1e9, seconds_per_step, seconds }))
    }
}

/// Time of a step over the time of its products, measured on the preset shakespeare-char-cpu
/// (docs/performance.md).
const OVERHEAD: f64 = 1.4;

pub(crate) fn run(args: &Args) -> Result {
    let config = args.configure.resolve()?;
    // Pieces found in the embedded text would be too few, and it has no images.
    let is_deit = config.model.kind == ModelKind::Deit;
    let is_nominal = config.data.path.is_empty() && (config.data.tokenizer.has_pieces() || is_deit);
    let vocabulary = if is_nominal {
        config.usual_vocabulary()
    } else {
        let data = open_data(&config)?;
        config.model.vocabulary(data.vocabulary(), data.tokenizer())
    };
    let recipe = config.recipe(vocabulary)?;
    let backend = config.backend_entry()?;
    let estimate = estimate(&recipe, backend)?;
    if !check_tensors(&config, &recipe)? {
        note("no GPU adapter was found, so tensor sizes were not checked");
    }
    let (device_bytes, steps) = (estimate.device_bytes(), recipe.steps);
    let placement = (backend.placement)(config.backend.gpu);
    let (host_bytes, memory) = (host_bytes(&estimate, placement), machine::memory());
    let problem = memory.as_ref().and_then(|memory| memory.refuses(host_bytes, 1));
    // Where memory is short, measuring would end the process.
    let time = match problem {
        Some(_) => None,
        None => Time::measure(&config, &estimate, recipe.steps)?,
    };
    let report = Report { estimate, device_bytes, host_bytes, memory, steps, time };
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
        "  masks and pruned operands {}, activations {}, scratch {}",
        mib(estimate.sparse_bytes),
        mib(estimate.activation_bytes),
        mib(estimate.scratch_bytes)
    );
    if estimate.overhead_bytes > 0 {
        say!("  plus context and library workspaces, about {}", mib(estimate.overhead_bytes));
    }
    say!("checkpoint   {}", mib(estimate.checkpoint_bytes));
    if let Some(memory) = &report.memory {
        let available = mib(memory.available);
        say!(
            "main memory  {} with the copy for a checkpoint; {available} available",
            mib(host_bytes)
        );
        if let Some(problem) = problem {
            say!("             too little: the run {problem}");
        }
    }
    say!(
        "per step     {} tokens, {:.3} GFLOP, {:.0} % of it with a 2:4 operand",
        estimate.tokens_per_step,
        estimate.flops_per_step / 1e9,
        100.0 * estimate.sparse_share
    );
    let [sparse, dense] = recipe.method.sparse_phase().product_words();
    if !sparse.is_empty() && !dense.is_empty() {
        say!("             a 2:4 operand in {sparse}; dense in {dense}");
    }
    let Some(Time { gflops_measured, seconds_per_step, seconds }) = report.time else {
        return Ok(());
    };
    say!(
        "time         {} per step, {} for {}",
        duration(seconds_per_step),
        duration(seconds),
        counted(recipe.steps as usize, "step")
    );
    say!(
        "             {OVERHEAD} times that of the products at {gflops_measured:.0} GFLOP/s, \
         measured just now on this machine"
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
