//! Where the time of a steady training step goes, by kind of work: the trainer as it is, on random tokens.
//!
//! Steps are timed without a profile first. Then a few run under one, which takes longer, since each launch is queued between events instead of
//! replayed with others: shares are of those steps. What no span covers is the GPU waiting, for the host or between two launches.

use std::{collections::BTreeMap, time::Instant};

use serde::Serialize;
use sparse24_cuda::profile::{Kind, Profile, Span, Work};
use sparse24_train::{
    Error,
    backend::{BackendSettings, cuda::CudaBackend},
    config::Config,
    data::TokenizerKind,
    model::gpt2::Gpt2Shape,
    trainer::{Batches, FlipSampling, Recipe, Trainer},
};

use super::Args;
use crate::{
    failure::Failure,
    output::{note, say},
};

/// Steps before any is timed: memory, plans and kernels come in them.
const FIRST: usize = 3;

/// A profiled training step.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    preset: String,
    method: String,
    tokens_per_step: u64,
    /// Of the phase that the steps were in.
    phase: String,
    /// Milliseconds of a step, median of so many.
    step_ms: f64,
    steps: usize,
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
    let settings: Vec<String> = args.settings.iter().cloned().chain(method).collect();
    let config = Config::resolve(Some(preset), None, &settings)?;
    let vocabulary = match config.data.tokenizer {
        TokenizerKind::Byte => 256,
        // As many characters as tinyshakespeare has.
        TokenizerKind::Character => 65,
        TokenizerKind::Gpt2 => 50257,
    };
    let recipe = config.recipe(vocabulary)?;
    let backend = CudaBackend::open(BackendSettings { gpu: args.gpu, ..config.backend.settings() })?;
    let profile = backend.profile();
    let mut trainer = Trainer::new(Box::new(backend), recipe.clone())?;
    let batches = Random { tokens: recipe.batch.sequences * recipe.batch.context, vocabulary: vocabulary as u32 };
    let (timed, profiled) = if args.quick { (3, 1) } else { (10, 3) };
    note(format_args!("{} steps of {} tokens to warm up, {timed} timed, {profiled} profiled", FIRST, recipe.tokens_per_step()));
    steady(&mut trainer, &batches, FIRST, None)?;
    let (times, _) = steady(&mut trainer, &batches, timed, None)?;
    let (under, spans) = steady(&mut trainer, &batches, profiled, Some(&profile))?;
    let (step_ms, profiled_step_ms) = (times[times.len() / 2], under.iter().sum::<f64>() / profiled as f64);
    let kinds = kinds(&spans, &recipe.model, profiled as f64, profiled_step_ms);
    let covered_ms = kinds.iter().map(|part| part.ms).sum();
    let report = Report {
        device: trainer.backend().device().description,
        preset: config.preset.clone(),
        method: config.method.name.clone(),
        tokens_per_step: recipe.tokens_per_step(),
        phase: trainer.phase().kind().to_string(),
        step_ms,
        steps: timed,
        tokens_per_s: recipe.tokens_per_step() as f64 / step_ms * 1e3,
        profiled_step_ms,
        profiled_steps: profiled,
        covered_ms,
        gap_ms: profiled_step_ms - covered_ms,
        kinds,
        bytes_held: trainer.backend().memory().iter().map(|(_, bytes)| bytes).sum(),
    };
    if args.json {
        say!("{}", serde_json::to_string_pretty(&report).expect("plain values"));
        return Ok(());
    }
    table(&report, &recipe)
}

/// Milliseconds of so many steps, the shortest first, and what a profile saw of them.
fn steady(trainer: &mut Trainer, batches: &Random, steps: usize, profile: Option<&Profile>) -> Result<(Vec<f64>, Vec<Span>), Error> {
    let (mut times, mut spans) = (Vec::new(), Vec::new());
    while times.len() < steps {
        let (refresh, step) = (trainer.recipe().method.refresh, trainer.step() + 1);
        profile.iter().for_each(|profile| profile.start());
        let began = Instant::now();
        trainer.train_step(batches, FlipSampling::Skip)?;
        let time = began.elapsed().as_secs_f64() * 1e3;
        let seen = profile.map_or_else(|| Ok(Vec::new()), Profile::finish)?;
        // Steps that refresh masks cost more, and come seldom where not each of them does.
        if !refresh.is_due(step) || refresh.is_due(step + 1) {
            times.push(time);
            spans.extend(seen);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((times, spans))
}

fn table(report: &Report, recipe: &Recipe) -> Result<(), Failure> {
    let Report { device, preset, method, phase, step_ms, steps, profiled_step_ms: whole, covered_ms, gap_ms, .. } = report;
    say!("{device}");
    say!(
        "{preset}, {method} ({phase} phase), {} x {} sequences of {}, {:.1} GiB held by buffers",
        recipe.accumulation,
        recipe.batch.sequences,
        recipe.batch.context,
        report.bytes_held as f64 / f64::from(1 << 30)
    );
    say!("a step {step_ms:.2} ms (median of {steps}), {:.0} tokens/s", report.tokens_per_s);
    say!("under the profile, each launch queued between events, {whole:.2} ms (mean of {}):\n", report.profiled_steps);
    say!("{:<44} {:>10} {:>7} {:>9}", "kind of work", "ms a step", "%", "launches");
    for kind in &report.kinds {
        say!("{:<44} {:>10.3} {:>7.1} {:>9.0}", kind.name, kind.ms, kind.percent, kind.launches);
        for part in &kind.parts {
            say!("  {:<42} {:>10.3} {:>7.1} {:>9.0}", part.name, part.ms, part.percent, part.launches);
        }
    }
    say!("{:<44} {covered_ms:>10.3} {:>7.1}", "all of these", 100.0 * covered_ms / whole);
    say!("{:<44} {gap_ms:>10.3} {:>7.1}", "not covered: the GPU waits", 100.0 * gap_ms / whole);
    Ok(())
}

/// Sums by kind, the largest first, and within products and kernels of several names by what they are.
fn kinds(spans: &[Span], model: &Gpt2Shape, steps: f64, step_ms: f64) -> Vec<Part> {
    let mut sums: BTreeMap<Kind, BTreeMap<String, (f64, usize)>> = BTreeMap::new();
    for span in spans {
        let sum = sums.entry(span.work.kind()).or_default().entry(name(span.work, model)).or_default();
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

/// What a span is called within its kind: the role of a dense product, or a kernel without the tile that it was made for.
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
    use sparse24_train::config::preset;

    use super::*;

    #[test]
    fn spans_become_kinds_with_shares_of_a_step() {
        let model = preset::find("gpt2-124m").expect("it exists").recipe(50257).expect("possible").model;
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
        let told: Vec<(&str, f64, f64)> = kinds.iter().map(|part| (part.name.as_str(), part.ms, part.launches)).collect();
        assert_eq!(told, [("dense products", 7.0, 1.5), ("norm", 1.5, 1.5), ("copies and fills", 0.25, 0.5)]);
        assert_eq!(kinds[0].percent, 70.0);
        let parts: Vec<&str> = kinds[0].parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(parts, ["head, wgrad", "attention in, forward", "dgrad, 5x7"]);
        assert_eq!(kinds[1].parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>(), ["norm_forward", "norm_backward"]);
        assert!(kinds[2].parts.is_empty());
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
