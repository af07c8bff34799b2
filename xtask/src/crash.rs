//! `cargo xtask crash [RUNS]`: the crash harness of the command, for longer than CI has. What it
//! kills and how is `crates/sparse24/tests/crash`.

use std::{
    path::Path,
    process::{Command, ExitCode},
};

use crate::Result;

/// What reliability is promised for.
const RUNS: usize = 1000;

/// Builds the command and its harness, and lets the harness print what it did.
pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let runs = match arguments {
        [] => RUNS,
        [runs] => {
            runs.parse().map_err(|_| format!("expected how many runs to kill, found {runs:?}"))?
        }
        _ => return Err("expected one number, how many runs to kill".into()),
    };
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no workspace")?;
    let status = Command::new(env!("CARGO"))
        .args(["test", "--release", "-p", "sparse24", "--test", "crash", "--", "--nocapture"])
        .env("SPARSE24_CRASHES", runs.to_string())
        .current_dir(root)
        .status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
