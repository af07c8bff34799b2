//! `cargo xtask crash [RUNS]`: runs the crash harness in `crates/sparse24/tests/crash` with more
//! kills than CI has time for.

use std::process::{Command, ExitCode};

use crate::{Result, root};

/// The number of runs that `docs/reliability.md` reports.
const RUNS: usize = 1000;

pub(crate) fn run(arguments: &[String]) -> Result<ExitCode> {
    let runs = match arguments {
        [] => RUNS,
        [runs] => runs
            .parse()
            .map_err(|_| format!("expected a number of runs to kill, found {runs:?}"))?,
        _ => return Err("expected one argument, the number of runs to kill".into()),
    };
    let status = Command::new(env!("CARGO"))
        .args(["test", "--release", "-p", "sparse24", "--test", "crash", "--", "--nocapture"])
        .env("SPARSE24_CRASHES", runs.to_string())
        .current_dir(root()?)
        .status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
