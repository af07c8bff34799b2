//! `sparse24 resume`: continues a run that was interrupted.

use std::path::PathBuf;

use sparse24_run::run::{Damaged, Resume, facts};

use crate::{
    configure::by_key,
    failure::Result,
    ranks::Ranks,
    signals,
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
    /// Key or section of the configuration that may differ from the checkpoint's; `data.path`
    /// allows other data
    #[arg(long, value_name = "KEY")]
    allow: Vec<String>,
    /// A setting that changes from here on, e.g. `steps=2000`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    #[command(flatten)]
    reporting: Reporting,
    #[command(flatten)]
    ranks: Ranks,
}

pub(crate) fn run(args: &Args) -> Result {
    signals::load()?;
    // Only rank 0 needs the run directory.
    args.ranks.join(&facts(by_key(&args.settings)), |member| {
        if !member.leads() {
            return member.follow(0);
        }
        let damaged = if args.fall_back { Damaged::FallBack } else { Damaged::Refuse };
        let (allow, settings) = (args.allow.clone(), args.settings.clone());
        let how = Resume { damaged, allow, settings, ..Resume::default() };
        train::resume(&args.run, &how, &args.reporting, member)
    })
}
