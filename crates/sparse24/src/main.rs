//! The `sparse24` command: arguments and terminal output, one file for each subcommand. The
//! libraries do the work.

use std::process::ExitCode;

use clap::{Parser, Subcommand, error::ErrorKind};
use sparse24_run::run::Provenance;

mod bench;
mod choice;
mod completions;
mod config;
mod configure;
mod doctor;
mod estimate;
mod eval;
mod export;
mod failure;
mod finetune;
mod glue;
mod import;
mod lambda_search;
mod launch;
mod man;
mod output;
mod paper;
mod prepare;
mod presets;
mod progress;
mod prune;
mod ranks;
mod report;
mod resume;
mod runs;
mod sample;
mod signals;
mod structure;
mod study;
mod tensorboard;
mod threads;
mod train;
mod translate;
mod verify;
mod watch;
mod weights;

use failure::Result;

/// Pre-train transformers with 2:4 sparsity.
#[derive(Parser)]
#[command(name = "sparse24", version = version(), propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Version and commit.
fn version() -> &'static str {
    Provenance::build().leak().trim_start_matches("version ")
}

macro_rules! commands {
    ($($variant:ident $module:ident;)+) => {
        #[derive(Subcommand)]
        enum Command {
            $($variant($module::Args),)+
        }

        fn run(command: &Command) -> Result {
            match command {
                $(Command::$variant(args) => $module::run(args),)+
            }
        }
    };
}

commands! {
    Train train;
    Finetune finetune;
    Glue glue;
    Resume resume;
    Launch launch;
    Eval eval;
    Report report;
    Watch watch;
    Sample sample;
    Translate translate;
    LambdaSearch lambda_search;
    Study study;
    Paper paper;
    Prepare prepare;
    Prune prune;
    Verify verify;
    Presets presets;
    Config config;
    Import import;
    Export export;
    Estimate estimate;
    Doctor doctor;
    Bench bench;
    Completions completions;
    Man man;
}

fn main() -> ExitCode {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    let result = match Cli::try_parse() {
        Ok(cli) => run(&cli.command),
        Err(error) => match error.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
            _ => Err(error.into()),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.message().into_iter().for_each(output::note);
            failure.code()
        }
    }
}
