//! `sparse24 presets`: the table of named configurations.

use serde::Serialize;
use sparse24_train::config::{Config, preset::PRESETS};

use crate::{failure::Failure, output::say};

/// List the presets, what they train and where their numbers come from
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// One JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    summary: &'static str,
    source: &'static str,
    config: Config,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.json {
        let rows: Vec<Row> = PRESETS
            .iter()
            .map(|preset| Row { name: preset.name, summary: preset.summary, source: preset.source, config: preset.config() })
            .collect();
        say!("{}", serde_json::to_string_pretty(&rows).expect("presets are plain values"));
        return Ok(());
    }
    for preset in PRESETS {
        say!("{:<22} {}", preset.name, preset.summary);
        say!("{:<22} {}\n", "", preset.source);
    }
    say!("Use one with `sparse24 train --preset NAME`; see all of its settings with `sparse24 config --preset NAME`.");
    Ok(())
}
