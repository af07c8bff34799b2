//! `sparse24 resume`: continues a run that was interrupted.

use std::path::PathBuf;

use sparse24_train::session::{self, Session};

use crate::{failure::Failure, train};

/// Continue a run from its last checkpoint; it ends with the bits of an uninterrupted one
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The run directory
    run: PathBuf,
    /// The summary as one JSON object on standard output
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    // Opened for its thread count; the session reads it again under its lock.
    let config = session::run_config(&args.run)?;
    train::on_threads(&config, || train::drive(Session::resume(&args.run)?, args.json))
}
