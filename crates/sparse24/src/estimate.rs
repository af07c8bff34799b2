//! `sparse24 estimate`: what a run costs, before it runs.

use std::time::{Duration, Instant};

use ndarray::Array2;
use serde::Serialize;
use sparse24_core::op::Accumulate;
use sparse24_cpu::gemm::matmul;
use sparse24_train::{
    estimate::{Estimate, estimate},
    run::open_dataset,
};

use crate::{
    configure::Configure,
    failure::{Exit, Failure},
    output::{counted, say},
};

/// Parameters, memory, floating-point operations and time of a configuration
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// One JSON object
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

/// A step over its products, as measured on the shakespeare-char-cpu preset (docs/performance.md).
const OVERHEAD: f64 = 1.4;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = args.configure.resolve()?;
    if config.backend.name != "cpu" {
        let counted = "memory and time are counted for the CPU alone; name that: --backend cpu";
        return Err(Failure::new(
            Exit::Usage,
            format!("backend.name: found {:?}, but {counted}", config.backend.name),
        ));
    }
    let recipe = config.recipe(open_dataset(&config)?.vocabulary() as usize)?;
    let estimate = estimate(&recipe);
    let flops = products_per_second(recipe.model.width, recipe.model.ffn_width)?;
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
        say!("{}", serde_json::to_string_pretty(&report).expect("plain numbers"));
        return Ok(());
    }
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    say!("parameters   {} ({} of them sparsifiable)", estimate.parameters, estimate.sparsifiable);
    say!("memory       {} in all", mib(report.device_bytes));
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
        human(seconds_per_step),
        human(report.seconds),
        counted(recipe.steps as usize, "step")
    );
    say!(
        "             from {:.0} GFLOP/s measured just now on this machine, times {OVERHEAD} for all that is no product",
        report.gflops_measured
    );
    Ok(())
}

/// FLOP/s of a `[512, width] x [width, ffn]` product (of a large part of it, if it is larger), the
/// best of a quarter second.
fn products_per_second(width: usize, ffn: usize) -> Result<f64, Failure> {
    const TOKENS: usize = 512;
    // A product this large is as fast as one that is larger.
    let (width, ffn) = (width.min(2048), ffn.min(8192));
    let (x, w) = (Array2::<f32>::ones((TOKENS, width)), Array2::<f32>::ones((ffn, width)));
    let mut z = Array2::zeros((TOKENS, ffn));
    let flops = 2.0 * (TOKENS * width * ffn) as f64;
    let (began, mut best) = (Instant::now(), Duration::MAX);
    while began.elapsed() < Duration::from_millis(250) {
        let start = Instant::now();
        matmul(x.view(), w.t(), z.view_mut(), Accumulate::Overwrite)
            .map_err(sparse24_train::Error::from)?;
        best = best.min(start.elapsed());
    }
    Ok(flops / best.as_secs_f64())
}

fn human(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}
