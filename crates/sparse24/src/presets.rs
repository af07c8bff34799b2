//! `sparse24 presets`: the tables of named configurations and of methods.

use serde::Serialize;
use sparse24_run::config::{Config, preset::PRESETS};
use sparse24_train::method::{
    self,
    words::{Choice, DecayPlace},
};

use crate::{failure::Failure, output::say};

/// List the presets, what they train and where their numbers come from; or the training methods
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The training methods instead, each as a composition of choices that can also be set alone
    #[arg(long)]
    methods: bool,
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

/// A row of the table of methods, in the words of a configuration.
#[derive(Serialize)]
struct MethodRow {
    name: &'static str,
    forward: &'static str,
    dgrad: &'static str,
    wgrad: &'static str,
    refresh: String,
    decay: &'static str,
    /// The feed-forward width, as a share of the model's.
    width: String,
    phases: Vec<String>,
    source: &'static str,
}

impl MethodRow {
    fn of(preset: &method::Preset) -> Self {
        let method = (preset.build)(0.0);
        let sparse = method.sparse_phase();
        Self {
            name: preset.name,
            forward: sparse.forward.word(),
            dgrad: sparse.dgrad.word(),
            wgrad: sparse.wgrad.word(),
            refresh: method.refresh_words(),
            decay: DecayPlace::of_decay(method.decay).word(),
            width: method.width.to_string(),
            phases: method.phase_words(),
            source: preset.source,
        }
    }
}

fn methods(args: &Args) -> Result<(), Failure> {
    let rows: Vec<MethodRow> = method::PRESETS.iter().map(MethodRow::of).collect();
    if args.json {
        say!("{}", serde_json::to_string_pretty(&rows).expect("methods are plain values"));
        return Ok(());
    }
    say!(
        "{:<12} {:<15} {:<11} {:<6} {:<15} {:<13} phases",
        "method",
        "forward",
        "dgrad",
        "wgrad",
        "refresh",
        "decay"
    );
    for MethodRow { name, forward, dgrad, wgrad, refresh, decay, width, phases, source } in rows {
        let refresh = if refresh.is_empty() { "-" } else { &refresh };
        let narrowed = if width == "1" {
            String::new()
        } else {
            format!(", d_ff times {width} (method.d_ff_ratio)")
        };
        let phases = phases.join(" ");
        say!(
            "{name:<12} {forward:<15} {dgrad:<11} {wgrad:<6} {refresh:<15} {decay:<13} {phases}{narrowed}"
        );
        say!("{:<12} {source}\n", "");
    }
    say!(
        "Train with one: `sparse24 train --method NAME`. Every choice can be set alone, such as --set method.decay=on-weights; forward, dgrad, wgrad and"
    );
    say!(
        "decay are those of phases that are not dense. A list of phases: --set 'method.phases=[\"dense:1/6\", \"sparse\"]'."
    );
    Ok(())
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.methods {
        return methods(args);
    }
    if args.json {
        let rows: Vec<Row> = PRESETS
            .iter()
            .map(|preset| Row {
                name: preset.name,
                summary: preset.summary,
                source: preset.source,
                config: preset.config(),
            })
            .collect();
        say!("{}", serde_json::to_string_pretty(&rows).expect("presets are plain values"));
        return Ok(());
    }
    for preset in PRESETS {
        say!("{:<22} {}", preset.name, preset.summary);
        say!("{:<22} {}\n", "", preset.source);
    }
    say!(
        "Use one with `sparse24 train --preset NAME`; see all of its settings with `sparse24 config --preset NAME`."
    );
    Ok(())
}
