//! `sparse24 completions`: the completions of a shell, made from the definitions of the arguments.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{Cli, failure::Result, output};

/// Print the completions for a shell
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Shell that will read them
    shell: Shell,
}

pub(crate) fn run(args: &Args) -> Result {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sparse24", &mut script);
    output::write(format_args!("{}", String::from_utf8_lossy(&script)))
}
