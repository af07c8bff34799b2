//! `sparse24 presets`: lists the named configurations, or the training methods.

use serde::Serialize;
use sparse24_run::config::{Config, preset::PRESETS};
use sparse24_train::{
    method::{
        self,
        words::{Choice, DecayPlace},
    },
    optim::MaskedDecay,
};

use crate::{
    failure::Result,
    output::{print_json, say},
};

/// List the presets with what they train and the source of their numbers, or the training methods
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// List the training methods, each as a combination of choices that can also be set separately
    #[arg(long)]
    methods: bool,
    /// Print one JSON array
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

/// A training method in the words of a configuration.
#[derive(Serialize)]
struct MethodRow {
    name: &'static str,
    forward: &'static str,
    dgrad: &'static str,
    wgrad: &'static str,
    refresh: String,
    decay: &'static str,
    /// The factor of masked decay where neither the user nor the preset has one.
    lambda: Option<f32>,
    /// d_ff as a share of the configured one.
    width: String,
    phases: Vec<String>,
    source: &'static str,
}

impl MethodRow {
    fn of(preset: &method::Preset) -> Self {
        let method = preset.method(preset.lambda);
        let sparse = method.sparse_phase();
        Self {
            name: preset.name,
            forward: sparse.forward.word(),
            dgrad: sparse.dgrad.word(),
            wgrad: sparse.wgrad.word(),
            refresh: method.refresh_words(),
            decay: DecayPlace::of_decay(method.decay).word(),
            lambda: (method.decay != MaskedDecay::None).then_some(preset.lambda),
            width: method.width.to_string(),
            phases: method.phase_words(),
            source: preset.source,
        }
    }
}

fn list_methods(args: &Args) -> Result {
    let rows: Vec<MethodRow> = method::PRESETS.iter().map(MethodRow::of).collect();
    if args.json {
        return print_json(&rows);
    }
    say!(
        "method       forward         dgrad       wgrad  refresh         decay         lambda  \
         phases"
    );
    for row in rows {
        let MethodRow {
            name,
            forward,
            dgrad,
            wgrad,
            refresh,
            decay,
            lambda,
            width,
            phases,
            source,
        } = row;
        let lambda = lambda.map_or_else(|| "-".to_owned(), |lambda| format!("{lambda:e}"));
        let refresh = if refresh.is_empty() { "-" } else { &refresh };
        let narrowed = if width == "1" {
            String::new()
        } else {
            format!(", d_ff times {width} (method.d_ff_ratio)")
        };
        say!(
            "{name:<12} {forward:<15} {dgrad:<11} {wgrad:<6} {refresh:<15} {decay:<13} \
             {lambda:<7} {}{narrowed}",
            phases.join(" ")
        );
        say!("{:<12} {source}", "");
        say!("");
    }
    say!("To train with a method: `sparse24 train --method NAME`.");
    say!("Each preset has a lambda for its default method, fst; --lambda sets another.");
    say!(
        "Each choice can also be set separately, e.g. --set method.decay=on-weights; forward, \
         dgrad, wgrad and decay apply to phases that are not dense."
    );
    say!("Phases are a list: --set 'method.phases=[\"dense:1/6\", \"sparse\"]'.");
    Ok(())
}

pub(crate) fn run(args: &Args) -> Result {
    if args.methods {
        return list_methods(args);
    }
    if args.json {
        let row = |preset: &sparse24_run::config::preset::Preset| Row {
            name: preset.name,
            summary: preset.summary,
            source: preset.source,
            config: preset.config(),
        };
        return print_json(&PRESETS.iter().map(row).collect::<Vec<_>>());
    }
    for preset in PRESETS {
        say!("{:<22} {}", preset.name, preset.summary);
        say!("{:<22} {}", "", preset.source);
        say!("");
    }
    say!(
        "To train with a preset: `sparse24 train --preset NAME`; to see its settings: \
         `sparse24 config --preset NAME`."
    );
    Ok(())
}
