//! `sparse24 man`: the manual, made from the definitions of the arguments.

use std::{fs, path::PathBuf};

use clap::CommandFactory;

use crate::{
    Cli,
    failure::{Exit, Failure, Result},
    output::say,
};

/// Write the manual: sparse24.1, and a page for each command
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Folder for the pages, e.g. ~/.local/share/man/man1
    folder: PathBuf,
}

pub(crate) fn run(Args { folder }: &Args) -> Result {
    fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), folder))
        .map_err(|error| {
            Failure::new(Exit::Io, format!("cannot write to {}: {error}", folder.display()))
        })?;
    say!("{}", folder.join("sparse24.1").display());
    Ok(())
}
