//! Developer tasks, run as `cargo xtask <task>`. They are not part of any release.
#![forbid(unsafe_code)]

use std::{
    path::Path,
    process::{Command, ExitCode},
};

use clap::Parser;
use kernels::Selection;

mod gpu_bundle;
mod kernels;
mod tidy;
mod web;

/// The error is one sentence for the developer.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
enum Task {
    /// Check the conventions of this repository: layers, modules, sizes, widths, prose
    Tidy,
    /// Compile CUDA kernels (needs NVRTC but no GPU) and check the machine code
    Kernels(Selection),
    /// Pack tests, benchmarks and the command for a GPU host without Rust
    GpuBundle(Selection),
    /// Build the page of sparse24-web, target/web/index.html (needs wasm-bindgen)
    Web,
}

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

fn main() -> ExitCode {
    let ended = match Task::parse() {
        Task::Tidy => tidy::run(),
        Task::Kernels(selection) => kernels::build(&selection),
        Task::GpuBundle(selection) => gpu_bundle::run(selection),
        Task::Web => web::build(),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::from(2)
    })
}
