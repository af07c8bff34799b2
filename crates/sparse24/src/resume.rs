//! `sparse24 resume`: continues a run that was interrupted.

use std::path::PathBuf;

use sparse24_run::run::{Damaged, Resume, Run, run_config};

use crate::{failure::Failure, signals::Signals, train};

/// Continue a run from its last checkpoint; it ends with the bits of an uninterrupted one
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The run directory
    run: PathBuf,
    /// If the newest checkpoint is damaged, remove it and continue from the one before it
    #[arg(long)]
    fall_back: bool,
    /// A key or section of the configuration that may differ from the checkpoint's; `data` also
    /// allows other data
    #[arg(long, value_name = "KEY")]
    allow: Vec<String>,
    #[command(flatten)]
    telling: train::Telling,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    // Opened for its thread count; the run reads it again under its lock.
    let config = run_config(&args.run)?;
    let damaged = if args.fall_back { Damaged::FallBack } else { Damaged::Refuse };
    let how = Resume { damaged, allow: args.allow.clone() };
    train::on_threads(&config, || {
        train::drive(Run::resume(&args.run, &how)?, &args.telling, Signals::take()?)
    })
}
