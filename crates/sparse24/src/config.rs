//! `sparse24 config`: prints the resolved configuration.

use crate::{
    configure::Configure,
    failure::Failure,
    output::{self, print_json},
};

/// Print the resolved configuration as TOML, with every key
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// Print JSON instead of TOML
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = args.configure.resolve()?;
    if args.json {
        print_json(&config)
    } else {
        output::write(format_args!("{}", config.to_toml()))
    }
}
