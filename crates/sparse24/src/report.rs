//! `sparse24 report`: one offline page of what happened in runs.

use std::path::PathBuf;

use sparse24_lab::report;

use crate::{failure::Failure, output::say};

/// Write one self-contained page of one or several runs, side by side; also of unfinished and
/// damaged ones
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run directories; a folder of lambda-search or study stands for its conclusions and a run of
    /// each arm
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page; RUN/report.html otherwise, of the first run
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let out = args.out.clone().unwrap_or_else(|| args.runs[0].join(report::FILE));
    report::write(&args.runs, &out)?;
    say!("{}", out.display());
    Ok(())
}
