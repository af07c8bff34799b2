//! Developer tasks, run as `cargo xtask <task>`. They are not part of any release.
#![forbid(unsafe_code)]

use std::{
    path::Path,
    process::{Command, ExitCode},
};

mod gpu_bundle;
mod kernels;
mod tidy;

/// The error is one sentence for the developer.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const USAGE: &str = "\
usage: cargo xtask <task>

  tidy          check the conventions of this repository: layers, modules, sizes, widths, prose
  kernels [NAME...] [--arch ARCHITECTURE]... [--out DIR]
                compile CUDA kernels (needs NVRTC but no GPU) and check the machine code
  gpu-bundle [--arch ARCHITECTURE]... [--out DIR]
                pack tests, benchmarks and the command for a GPU host without Rust";

/// The workspace's root.
fn root() -> Result<&'static Path> {
    Ok(Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask is not in a workspace")?)
}

/// The standard output of a command that runs in `directory`.
fn output(command: &mut Command, directory: &Path) -> Result<String> {
    let output =
        command.current_dir(directory).output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        let cause = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{command:?} failed: {}", cause.trim()).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn run(arguments: &[String]) -> Result<ExitCode> {
    if arguments.iter().any(|argument| ["--help", "-h", "help"].contains(&argument.as_str())) {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    }
    match arguments.split_first().map(|(task, rest)| (task.as_str(), rest)) {
        Some(("tidy", [])) => tidy::run(),
        Some(("kernels", rest)) => kernels::run(rest),
        Some(("gpu-bundle", rest)) => gpu_bundle::run(rest),
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
