//! `sparse24 config`: the resolved configuration, every key named.

use crate::{
    configure::Configure,
    failure::Failure,
    output::{self, say},
};

/// Print the resolved configuration as TOML, without running it
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    configure: Configure,
    /// JSON instead of TOML
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = args.configure.resolve()?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&config).expect("a configuration is plain values"));
    } else {
        output::write(format_args!("{}", config.to_toml()))?;
    }
    Ok(())
}
