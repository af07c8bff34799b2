//! Where the time of a steady training step goes, by kind of work: the trainer as it is, on random
//! tokens.
//!
//! Steps are timed without a profile first, those that refresh masks apart: they come as often as
//! the configuration says, and far more often while they are timed. Then a few of the others run
//! under a profile, which takes longer, since each launch is queued between events instead of
//! replayed with others: shares are of those steps. What no span covers is the GPU waiting, for the
//! host or between two launches.

use std::{collections::BTreeMap, num::NonZeroU32, time::Instant};

use serde::Serialize;
use sparse24_core::phase::Refresh;
use sparse24_cuda::profile::{Kind, Profile, Span, Work};
use sparse24_run::{Error, config::Config, data::TokenizerKind};
use sparse24_train::{
    backend::cuda::CudaBackend,
    method::PhaseKind,
    model::gpt2::Gpt2Shape,
    trainer::{Batches, FlipSampling, Recipe, Trainer},
};

use super::Args;
use crate::{
    failure::{Exit, Failure},
    output::{note, say},
    signals::Signals,
};

/// Steps of a kind before any is timed: memory, plans, kernels and recordings come in them.
const FIRST: usize = 3;
/// While steps are timed, one of so many refreshes masks.
const REFRESHING: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

/// A profiled training step.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    preset: String,
    method: String,
    tokens_per_step: u64,
    /// Of the phase that the steps were in.
    phase: String,
    /// Milliseconds of a step that keeps its masks, median of so many.
    step_ms: f64,
    steps: usize,
    /// Of one that refreshes them, where only some do.
    refresh: Option<RefreshTime>,
    /// Of both kinds, as often as they come.
    tokens_per_s: f64,
    /// The mean of those under the profile.
    profiled_step_ms: f64,
    profiled_steps: usize,
    /// Sum of all spans of such a step, in milliseconds.
    covered_ms: f64,
    /// What of it no span covers.
    gap_ms: f64,
    kinds: Vec<Part>,
    bytes_held: usize,
}

/// A step that refreshes masks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct RefreshTime {
    /// Of so many steps one refreshes them.
    interval: u32,
    /// Milliseconds, median of so many.
    step_ms: f64,
    steps: usize,
}

/// Milliseconds of a step.
#[derive(Debug, PartialEq, Serialize)]
struct Part {
    name: String,
    ms: f64,
    /// Of the step under the profile.
    percent: f64,
    launches: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<Part>,
}

pub(super) fn run(args: &Args, preset: &str) -> Result<(), Failure> {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let method = args.method.iter().map(|method| format!("method.name={}", quoted(method)));
    let backend = std::iter::once("backend.name=cuda".to_owned());
    let settings: Vec<String> =
        args.settings.iter().cloned().chain(method).chain(backend).collect();
    let config = Config::resolve(Some(preset), None, &settings)?;
    let vocabulary = match config.data.tokenizer {
        TokenizerKind::Byte => 256,
        // As many characters as tinyshakespeare has.
        TokenizerKind::Character => 65,
        TokenizerKind::Gpt2 => 50257,
    };
    let mut recipe = config.recipe(vocabulary)?;
    let interval = often(&mut recipe);
    let signals = Signals::take()?;
    let backend = CudaBackend::open(args.over(config.backend.settings()))?;
    let profile = backend.profile();
    let mut trainer = Trainer::new(Box::new(backend), recipe.clone())?;
    trainer.interrupt_on(signals.any());
    let report =
        measured(&mut trainer, &profile, &config, interval, args).map_err(|error| match error {
            Error::Interrupted => Failure::new(
                signals.received().unwrap_or(Exit::Interrupted),
                "interrupted before the steps were timed",
            ),
            error => error.into(),
        })?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&report).expect("plain values"));
        return Ok(());
    }
    table(&report, &recipe)
}

/// Has masks refreshed often, where not every step does it anyway, and says how many steps were
/// between.
fn often(recipe: &mut Recipe) -> Option<NonZeroU32> {
    // A phase that prunes nothing has no masks, whatever the method says of them.
    let prunes =
        recipe.method.phases.first().is_some_and(|phase| phase.kind() == PhaseKind::Sparse);
    match &mut recipe.method.refresh {
        Refresh::Every(interval) if prunes && interval.get() > 1 => {
            Some(std::mem::replace(interval, REFRESHING.min(*interval)))
        }
        _ => None,
    }
}

fn measured(
    trainer: &mut Trainer,
    profile: &Profile,
    config: &Config,
    interval: Option<NonZeroU32>,
    args: &Args,
) -> Result<Report, Error> {
    let recipe = trainer.recipe().clone();
    let vocabulary = recipe.model.vocabulary;
    let batches = Random {
        tokens: recipe.batch.sequences * recipe.batch.context,
        vocabulary: vocabulary as u32,
    };
    let (timed, profiled) = if args.quick { (3, 1) } else { (10, 3) };
    let first = if interval.is_some() { FIRST * REFRESHING.get() as usize } else { FIRST };
    note(format_args!(
        "{first} steps of {} tokens to warm up, {timed} timed, {profiled} profiled",
        recipe.tokens_per_step()
    ));
    for _ in 0..first {
        trainer.train_step(&batches, FlipSampling::Skip)?;
    }
    let Steady { mut keeping, mut refreshing, .. } = steady(trainer, &batches, timed, None)?;
    let Steady { keeping: under, spans, .. } = steady(trainer, &batches, profiled, Some(profile))?;
    let (step_ms, profiled_step_ms) =
        (median(&mut keeping), under.iter().sum::<f64>() / profiled as f64);
    let refresh = interval.map(|interval| RefreshTime {
        interval: interval.get(),
        steps: refreshing.len(),
        step_ms: median(&mut refreshing),
    });
    let kinds = kinds(&spans, &recipe.model, profiled as f64, profiled_step_ms);
    let covered_ms = kinds.iter().map(|part| part.ms).sum();
    Ok(Report {
        device: trainer.backend().device().description,
        preset: config.preset.clone(),
        method: config.method.name.clone(),
        tokens_per_step: recipe.tokens_per_step(),
        phase: trainer.phase().kind().to_string(),
        step_ms,
        steps: timed,
        refresh,
        tokens_per_s: recipe.tokens_per_step() as f64 / mean(step_ms, refresh) * 1e3,
        profiled_step_ms,
        profiled_steps: profiled,
        covered_ms,
        gap_ms: profiled_step_ms - covered_ms,
        kinds,
        bytes_held: trainer.backend().memory().iter().map(|(_, bytes)| bytes).sum(),
    })
}

/// Milliseconds of a step where one of so many refreshes masks.
fn mean(step_ms: f64, refresh: Option<RefreshTime>) -> f64 {
    refresh.map_or(step_ms, |refresh| {
        (f64::from(refresh.interval - 1) * step_ms + refresh.step_ms) / f64::from(refresh.interval)
    })
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Milliseconds of steps.
#[derive(Default)]
struct Steady {
    keeping: Vec<f64>,
    /// Those that refresh masks, where most do not.
    refreshing: Vec<f64>,
    /// What a profile saw of those that keep them.
    spans: Vec<Span>,
}

/// So many steps that keep their masks, or that refresh them like all others, and those between.
fn steady(
    trainer: &mut Trainer,
    batches: &Random,
    steps: usize,
    profile: Option<&Profile>,
) -> Result<Steady, Error> {
    let mut steady = Steady::default();
    while steady.keeping.len() < steps {
        let (refresh, step) = (trainer.recipe().method.refresh, trainer.step() + 1);
        profile.iter().for_each(|profile| profile.start());
        let began = Instant::now();
        trainer.train_step(batches, FlipSampling::Skip)?;
        let time = began.elapsed().as_secs_f64() * 1e3;
        let seen = profile.map_or_else(|| Ok(Vec::new()), Profile::finish)?;
        if !refresh.is_due(step) || refresh.is_due(step + 1) {
            steady.keeping.push(time);
            steady.spans.extend(seen);
        } else {
            steady.refreshing.push(time);
        }
    }
    Ok(steady)
}

fn table(report: &Report, recipe: &Recipe) -> Result<(), Failure> {
    let Report {
        device,
        preset,
        method,
        phase,
        step_ms,
        steps,
        profiled_step_ms: whole,
        covered_ms,
        gap_ms,
        ..
    } = report;
    say!("{device}");
    say!(
        "{preset}, {method} ({phase} phase), {} x {} sequences of {}, {:.1} GiB held by buffers",
        recipe.accumulation,
        recipe.batch.sequences,
        recipe.batch.context,
        report.bytes_held as f64 / f64::from(1 << 30)
    );
    let refreshed = report.refresh.map(|RefreshTime { interval, step_ms, steps }| {
        format!(", one that refreshes masks, 1 of {interval}, {step_ms:.2} ms (median of {steps})")
    });
    say!(
        "a step {step_ms:.2} ms (median of {steps}){}: {:.0} tokens/s",
        refreshed.unwrap_or_default(),
        report.tokens_per_s
    );
    say!(
        "under the profile, each launch queued between events, {whole:.2} ms (mean of {}):\n",
        report.profiled_steps
    );
    say!("{:<44} {:>10} {:>7} {:>9}", "kind of work", "ms a step", "%", "launches");
    for kind in &report.kinds {
        say!("{:<44} {:>10.3} {:>7.1} {:>9.0}", kind.name, kind.ms, kind.percent, kind.launches);
        for part in &kind.parts {
            say!(
                "  {:<42} {:>10.3} {:>7.1} {:>9.0}",
                part.name,
                part.ms,
                part.percent,
                part.launches
            );
        }
    }
    say!("{:<44} {covered_ms:>10.3} {:>7.1}", "all of these", 100.0 * covered_ms / whole);
    say!("{:<44} {gap_ms:>10.3} {:>7.1}", "not covered: the GPU waits", 100.0 * gap_ms / whole);
    Ok(())
}

/// Sums by kind, the largest first, and within products and kernels of several names by what they
/// are.
fn kinds(spans: &[Span], model: &Gpt2Shape, steps: f64, step_ms: f64) -> Vec<Part> {
    let mut sums: BTreeMap<Kind, BTreeMap<String, (f64, usize)>> = BTreeMap::new();
    for span in spans {
        let sum =
            sums.entry(span.work.kind()).or_default().entry(name(span.work, model)).or_default();
        *sum = (sum.0 + f64::from(span.ms), sum.1 + 1);
    }
    let part = |name: String, (ms, launches): (f64, usize), parts| {
        let ms = ms / steps;
        Part { name, ms, percent: 100.0 * ms / step_ms, launches: launches as f64 / steps, parts }
    };
    let sorted = |mut parts: Vec<Part>| {
        parts.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        parts
    };
    let kind = |(kind, sums): (Kind, BTreeMap<String, (f64, usize)>)| {
        let whole = sums.values().fold((0.0, 0), |whole, sum| (whole.0 + sum.0, whole.1 + sum.1));
        let several = sums.len() > 1;
        let parts = sums.into_iter().map(|(name, sum)| part(name, sum, Vec::new())).collect();
        part(kind.name().to_owned(), whole, if several { sorted(parts) } else { Vec::new() })
    };
    sorted(sums.into_iter().map(kind).collect())
}

/// What a span is called within its kind: the role of a dense product, or a kernel without the tile
/// that it was made for.
fn name(work: Work, model: &Gpt2Shape) -> String {
    match work {
        Work::Copy => "copies and fills".to_owned(),
        Work::Kernel(entry) => match entry.split_once(|c: char| c.is_ascii_digit()) {
            // `spmm24` itself ends in digits.
            _ if entry.starts_with("spmm24_straight") => "wgrad".to_owned(),
            _ if entry.starts_with("spmm24_transposed") => "forward and dgrad".to_owned(),
            _ if entry.starts_with("spmm24") => entry.to_owned(),
            Some((stem, _)) => stem.trim_end_matches('_').to_owned(),
            None => entry.to_owned(),
        },
        Work::Product { pass, weight: [r, q], .. } => {
            let (d, hidden) = (model.width, model.ffn_width);
            let role = match [r, q] {
                shape if shape == [3 * d, d] => "attention in",
                shape if shape == [d, d] => "attention out",
                shape if shape == [hidden * model.activation.width(), d] => "up",
                shape if shape == [d, hidden] => "down",
                [rows, columns] if rows >= model.vocabulary && columns == d => "head",
                _ => return format!("{pass}, {r}x{q}"),
            };
            format!("{role}, {pass}")
        }
    }
}

/// Tokens without a corpus.
struct Random {
    tokens: usize,
    vocabulary: u32,
}

impl Batches for Random {
    fn fill(&self, step: u32, micro_step: u32, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
        let mut word = step.wrapping_mul(104_729).wrapping_add(micro_step);
        let mut draw = || {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((u64::from(word) * u64::from(self.vocabulary)) >> 32) as u32
        };
        inputs.clear();
        inputs.extend((0..self.tokens).map(|_| draw()));
        targets.clear();
        targets.extend_from_slice(&inputs[1..]);
        targets.push(draw());
    }
}

#[cfg(test)]
mod tests {
    use sparse24_run::config::preset;

    use super::*;

    #[test]
    fn spans_become_kinds_with_shares_of_a_step() {
        let model =
            preset::find("gpt2-124m").expect("it exists").recipe(50257).expect("possible").model;
        let span = |work, ms| Span { work, ms };
        let product = |pass, weight| Work::Product { pass, tokens: 8, weight };
        let spans = [
            span(Work::Kernel("norm_forward_1"), 1.0),
            span(Work::Kernel("norm_backward_2"), 1.0),
            span(Work::Kernel("norm_forward_1"), 1.0),
            span(product("forward", [2304, 768]), 4.0),
            span(product("wgrad", [50304, 768]), 8.0),
            span(product("dgrad", [5, 7]), 2.0),
            span(Work::Copy, 0.5),
        ];
        let kinds = kinds(&spans, &model, 2.0, 10.0);
        let told: Vec<(&str, f64, f64)> =
            kinds.iter().map(|part| (part.name.as_str(), part.ms, part.launches)).collect();
        assert_eq!(
            told,
            [("dense products", 7.0, 1.5), ("norm", 1.5, 1.5), ("copies and fills", 0.25, 0.5)]
        );
        assert_eq!(kinds[0].percent, 70.0);
        let parts: Vec<&str> = kinds[0].parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(parts, ["head, wgrad", "attention in, forward", "dgrad, 5x7"]);
        assert_eq!(
            kinds[1].parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>(),
            ["norm_forward", "norm_backward"]
        );
        assert!(kinds[2].parts.is_empty());
    }

    /// On the CPU, since a trainer is a trainer.
    fn trainer(method: &str) -> (Trainer, Random, Option<NonZeroU32>) {
        let settings = ["layers=1", "heads=2", "d_model=16", "d_ff=32", "sequence_length=8"]
            .map(|setting| format!("model.{setting}"));
        let others =
            [format!("method.name={method}"), "batch.size=2".to_owned(), "steps=100".to_owned()];
        let config = Config::resolve(Some("quickstart"), None, &[&settings[..], &others].concat())
            .expect("possible");
        let mut recipe = config.recipe(65).expect("possible");
        let interval = often(&mut recipe);
        let backend = (config.backend_entry().expect("the CPU").open)(config.backend.settings())
            .expect("opened");
        let batches =
            Random { tokens: recipe.batch.sequences * recipe.batch.context, vocabulary: 65 };
        (Trainer::new(backend, recipe).expect("room"), batches, interval)
    }

    #[test]
    fn steps_that_refresh_masks_are_timed_apart_and_counted_as_often_as_they_come() {
        let (mut fst, batches, interval) = trainer("fst");
        let configured =
            preset::find("quickstart").expect("it exists").method_value().expect("known").refresh;
        assert_eq!(interval.map(Refresh::Every), Some(configured));
        let Steady { keeping, refreshing, .. } =
            steady(&mut fst, &batches, 5, None).expect("finite");
        assert_eq!(
            (keeping.len(), refreshing.len(), fst.step()),
            (5, 2, 7),
            "steps 3 and 6 refresh"
        );
        let (mut dense, batches, interval) = trainer("dense");
        let Steady { keeping, refreshing, .. } =
            steady(&mut dense, &batches, 5, None).expect("finite");
        assert_eq!((keeping.len(), refreshing.len(), interval), (5, 0, None));
        assert_eq!(mean(10.0, Some(RefreshTime { interval: 40, step_ms: 50.0, steps: 5 })), 11.0);
        assert_eq!(mean(10.0, None), 10.0);
    }

    #[test]
    fn a_signal_ends_the_steps() {
        let (mut trainer, batches, _) = trainer("fst");
        trainer.interrupt_on(std::sync::Arc::new(true.into()));
        assert!(matches!(steady(&mut trainer, &batches, 5, None), Err(Error::Interrupted)));
    }

    #[test]
    fn random_tokens_are_of_the_vocabulary_and_targets_follow_inputs() {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        let batches = Random { tokens: 1000, vocabulary: 65 };
        batches.fill(3, 1, &mut inputs, &mut targets);
        assert_eq!((inputs.len(), &inputs[1..]), (1000, &targets[..999]));
        assert!(inputs.iter().chain(&targets).all(|&token| token < 65));
        assert!((0..65).all(|token| inputs.contains(&token)), "every token is drawn");
    }
}
