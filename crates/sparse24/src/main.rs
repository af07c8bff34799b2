//! The command `sparse24`: arguments and terminal; the work is done in the libraries. One file a
//! subcommand.

use std::process::ExitCode;

use clap::{Parser, Subcommand, error::ErrorKind};

mod bench;
mod config;
mod configure;
mod doctor;
mod estimate;
mod eval;
mod export;
mod failure;
mod import;
mod lambda_search;
mod output;
mod prepare;
mod presets;
mod progress;
mod prune;
mod report;
mod resume;
mod runs;
mod sample;
mod signals;
mod structure;
mod study;
mod tensorboard;
mod train;
mod verify;
mod weights;

use failure::Failure;

/// Pre-train transformers with 2:4 sparsity.
#[derive(Parser)]
#[command(name = "sparse24", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(train::Args),
    Resume(resume::Args),
    Eval(eval::Args),
    Report(report::Args),
    Sample(sample::Args),
    LambdaSearch(lambda_search::Args),
    Study(study::Args),
    Prepare(prepare::Args),
    Prune(prune::Args),
    Verify(verify::Args),
    Presets(presets::Args),
    Config(config::Args),
    Import(import::Args),
    Export(export::Args),
    Estimate(estimate::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Train(args) => train::run(args),
        Command::Resume(args) => resume::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Report(args) => report::run(args),
        Command::Sample(args) => sample::run(args),
        Command::LambdaSearch(args) => lambda_search::run(args),
        Command::Study(args) => study::run(args),
        Command::Prepare(args) => prepare::run(args),
        Command::Prune(args) => prune::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Presets(args) => presets::run(args),
        Command::Config(args) => config::run(args),
        Command::Import(args) => import::run(args),
        Command::Export(args) => export::run(args),
        Command::Estimate(args) => estimate::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => bench::run(args),
    }
}

fn main() -> ExitCode {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    let done = match Cli::try_parse() {
        Ok(cli) => run(&cli.command),
        Err(error)
            if matches!(
                error.kind(),
                DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand
            ) =>
        {
            error.exit()
        }
        Err(error) => Err(error.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.tell();
            failure.code()
        }
    }
}
