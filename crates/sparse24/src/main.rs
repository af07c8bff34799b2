//! The command `sparse24`: arguments and terminal; the work is done in the libraries. One file a subcommand.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod failure;

use failure::Failure;

/// Pre-train transformers with 2:4 sparsity.
#[derive(Parser)]
#[command(name = "sparse24", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {}

fn run(command: &Command) -> Result<(), Failure> {
    match *command {}
}

fn main() -> ExitCode {
    match run(&Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.code()
        }
    }
}
