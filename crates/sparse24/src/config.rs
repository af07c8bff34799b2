//! `sparse24 config`: the resolved configuration, every key named.

use crate::{configure::Configure, failure::Failure};

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
        println!("{}", serde_json::to_string_pretty(&config).expect("a configuration is plain values"));
    } else {
        print!("{}", config.to_toml());
    }
    Ok(())
}
