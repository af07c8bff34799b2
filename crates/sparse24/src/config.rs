//! `sparse24 config`: prints the resolved configuration.

use crate::{
    configure::Configure,
    failure::Result,
    output::{self, print_json},
};

/// Print the resolved configuration as TOML, with every key (method.lambda only if it is used)
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// Print JSON instead of TOML
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result {
    let config = args.configure.resolve()?;
    if args.json {
        print_json(&config)
    } else {
        let toml = config.to_toml();
        // A lambda without effect would remain when the method in this text is changed.
        let keeps = |line: &&str| config.lambda().is_some() || !line.starts_with("lambda = ");
        let kept: String = toml.split_inclusive('\n').filter(keeps).collect();
        output::write_made(&kept)
    }
}
