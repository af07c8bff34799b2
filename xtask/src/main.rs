//! Developer tasks, run as `cargo xtask <task>`. Nothing here is built for, or shipped to, users.
#![forbid(unsafe_code)]

use std::{
    path::Path,
    process::{Command, ExitCode},
};

mod crash;
mod figure;
mod gpu_bundle;
mod kernels;
mod tidy;

/// A failure is one sentence for the developer.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const USAGE: &str = "\
usage: cargo xtask <task>

  tidy                            check layering, file heads, names, sizes and the other rules of xtask/src/tidy
  figure RUN_DIR... --out FILE    draw loss and flip rate of one or more run directories as an SVG
  crash [RUNS]                    kill so many runs (1000), resume them, and compare their ends; then all other tests of crashes and faults
  kernels [NAME...] [--arch ARCHITECTURE]... [--out DIR]
                                  compile CUDA kernels, without a GPU, and check what the compiler made of them
  gpu-bundle [--arch ARCHITECTURE]... [--out DIR]
                                  pack tests and the command for GPU hosts without Rust";

/// What a command prints, run in a folder.
fn output(command: &mut Command, directory: &Path) -> Result<String> {
    let output =
        command.current_dir(directory).output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "{command:?} failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )
        .into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn run(arguments: &[String]) -> Result<ExitCode> {
    if arguments.iter().any(|argument| ["--help", "-h", "help"].contains(&argument.as_str())) {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    }
    match arguments.split_first() {
        Some((task, [])) if task == "tidy" => tidy::run(),
        Some((task, rest)) if task == "figure" => figure::run(rest),
        Some((task, rest)) if task == "crash" => crash::run(rest),
        Some((task, rest)) if task == "kernels" => kernels::run(rest),
        Some((task, rest)) if task == "gpu-bundle" => gpu_bundle::run(rest),
        _ => Err(USAGE.into()),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    run(&arguments).unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::from(2)
    })
}
