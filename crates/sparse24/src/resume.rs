//! `sparse24 resume`: continues a run that was interrupted.

use std::path::PathBuf;

use sparse24_run::run::{Damaged, Resume, Run, run_config};

use crate::{
    failure::Failure,
    output::note_outside,
    signals::Signals,
    train::{self, Reporting},
};

/// Continue a run from its last checkpoint, to the same bits as an uninterrupted run
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Run directory
    run: PathBuf,
    /// Set damaged checkpoints aside and continue from the newest undamaged one
    #[arg(long)]
    fall_back: bool,
    /// Key or section of the configuration that may differ from the checkpoint's; `data` also
    /// allows other data
    #[arg(long, value_name = "KEY")]
    allow: Vec<String>,
    /// A setting that changes from here on, e.g. `steps=2000`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    #[command(flatten)]
    reporting: Reporting,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    // For the thread count; the run reads its configuration again under its lock.
    let config = run_config(&args.run)?.with_settings(&args.settings)?;
    let damaged = if args.fall_back { Damaged::FallBack } else { Damaged::Refuse };
    let (allow, settings) = (args.allow.clone(), args.settings.clone());
    let how = Resume { damaged, allow, settings };
    train::on_threads(&config, || {
        let run = Run::resume_announced(&args.run, &how, |config| {
            note_outside("data.path", &config.data.path);
            note_outside("run.flip_reference", &config.run.flip_reference);
        });
        train::drive(run?, &args.reporting, Signals::take()?)
    })
}
