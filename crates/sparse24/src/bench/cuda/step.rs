//! `sparse24 bench --step`: where the time of a steady training step goes, on random tokens, which
//! a BERT masks as in training.
//!
//! Steps are first timed without a profile. Steps that refresh masks are timed separately, and made
//! more frequent than in a real run. Then some of the others run under a profile. That takes
//! longer, since each launch is queued between events instead of replayed in a graph: shares refer
//! to those steps. Time outside all spans is the GPU waiting for the host or between launches.

use std::{collections::BTreeMap, num::NonZeroU32, time::Instant};

use serde::Serialize;
use sparse24_core::phase::Refresh;
use sparse24_cuda::profile::{Kind, Profile, Span, Work};
use sparse24_run::{
    Error,
    config::Config,
    run::{Batches, masked_lm},
};
use sparse24_train::{
    backend::{cuda::CudaBackend, op::HeadLoss},
    method::PhaseKind,
    model::ModelSpec,
    objective::{Batch, DataError, Objective},
    trainer::{FlipSampling, Recipe, Trainer},
};

use super::Args;
use crate::{
    failure::{Exit, Failure, Result},
    output::{note, print_json, say},
    signals::Signals,
};

/// Untimed steps of each kind: they allocate memory, choose plans, compile kernels and capture
/// graphs.
const WARM_UP: usize = 3;
/// While steps are timed, one in this many refreshes masks.
const REFRESH_INTERVAL: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    preset: String,
    method: String,
    tokens_per_step: u64,
    /// The phase of all timed steps.
    phase: String,
    /// Median over `steps` steps that keep their masks, in milliseconds.
    step_ms: f64,
    steps: usize,
    /// Steps that refresh masks, if only some do.
    refresh: Option<RefreshTime>,
    /// Weighted by the frequency of both kinds of steps in a real run.
    tokens_per_s: f64,
    /// Mean over `profiled_steps` steps.
    profiled_step_ms: f64,
    profiled_steps: usize,
    /// Sum of all spans of a profiled step, in milliseconds.
    covered_ms: f64,
    /// Time of a profiled step outside all spans.
    gap_ms: f64,
    kinds: Vec<Part>,
    bytes_held: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct RefreshTime {
    /// In a real run, one step in this many refreshes masks.
    interval: u32,
    /// Median over `steps` steps, in milliseconds.
    step_ms: f64,
    steps: usize,
}

/// The part of a profiled step that is spent on one kind of work.
#[derive(Debug, PartialEq, Serialize)]
struct Part {
    name: String,
    ms: f64,
    percent: f64,
    launches: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<Part>,
}

pub(super) fn run(args: &Args, preset: &str) -> Result {
    let mut settings = args.settings.clone();
    let method = args.method.as_deref().map(serde_json::Value::from);
    settings.extend(method.map(|method| format!("method.name={method}")));
    settings.push("backend.name=cuda".to_owned());
    let config = Config::resolve(Some(preset), None, &settings)?;
    let mut recipe = config.recipe(config.usual_vocabulary())?;
    let interval = refresh_often(&mut recipe);
    let signals = Signals::take()?;
    let mut backend = CudaBackend::open(args.override_settings(config.backend.settings()))?;
    if args.without_wgmma {
        backend.gpu().leave_wgmma_out();
    }
    let profile = backend.profile();
    let mut trainer = Trainer::new(Box::new(backend), recipe.clone())?;
    trainer.interrupt_on(signals.any());
    let report = measure(&mut trainer, &profile, &config, interval, args.quick);
    let report = report.map_err(|error| match error {
        Error::Interrupted => Failure::new(
            signals.received().unwrap_or(Exit::Interrupted),
            "interrupted before all steps were timed",
        ),
        error => error.into(),
    })?;
    if args.json { print_json(&report) } else { print_table(&report, &recipe) }
}

/// Makes mask refreshes frequent, unless every step refreshes anyway. Returns the configured
/// interval.
fn refresh_often(recipe: &mut Recipe) -> Option<NonZeroU32> {
    // A phase that prunes nothing has no masks, whatever the method's interval is.
    let prunes =
        recipe.method.phases.first().is_some_and(|phase| phase.kind() == PhaseKind::Sparse);
    match &mut recipe.method.refresh {
        Refresh::Every(interval) if prunes && interval.get() > 1 => {
            Some(std::mem::replace(interval, REFRESH_INTERVAL.min(*interval)))
        }
        _ => None,
    }
}

fn measure(
    trainer: &mut Trainer,
    profile: &Profile,
    config: &Config,
    interval: Option<NonZeroU32>,
    is_quick: bool,
) -> Result<Report, Error> {
    let recipe = trainer.recipe().clone();
    let batches = batches(&recipe);
    let (timed, profiled) = if is_quick { (3, 1) } else { (10, 3) };
    let warm_up = WARM_UP * interval.map_or(1, |_| REFRESH_INTERVAL.get() as usize);
    note(format_args!(
        "{warm_up} steps of {} tokens to warm up, {timed} timed, {profiled} profiled",
        recipe.tokens_of(1)
    ));
    for _ in 0..warm_up {
        trainer.train_step(&batches, FlipSampling::Skip)?;
    }
    let Times { mut keeping, mut refreshing, .. } = time_steps(trainer, &batches, timed, None)?;
    let step_ms = median(&mut keeping);
    let refresh = interval.map(|interval| RefreshTime {
        interval: interval.get(),
        steps: refreshing.len(),
        step_ms: median(&mut refreshing),
    });
    let Times { keeping, spans, .. } = time_steps(trainer, &batches, profiled, Some(profile))?;
    let profiled_step_ms = keeping.iter().sum::<f64>() / profiled as f64;
    let parameters = trainer.parameters().iter().map(|parameter| &parameter.spec);
    let parameters: Vec<_> = parameters.map(|spec| (spec.name.as_str(), spec.shape)).collect();
    let kinds = kinds(&spans, &parameters, profiled as f64, profiled_step_ms);
    let covered_ms = kinds.iter().map(|part| part.ms).sum();
    Ok(Report {
        device: trainer.backend().device().description,
        preset: config.preset.clone(),
        method: config.method.name.clone(),
        tokens_per_step: recipe.tokens_of(1),
        phase: trainer.phase().kind().to_string(),
        step_ms,
        steps: timed,
        refresh,
        tokens_per_s: recipe.tokens_of(1) as f64 / mean(step_ms, refresh) * 1e3,
        profiled_step_ms,
        profiled_steps: profiled,
        covered_ms,
        gap_ms: profiled_step_ms - covered_ms,
        kinds,
        bytes_held: trainer.backend().memory().iter().map(|(_, bytes)| bytes).sum(),
    })
}

/// Mean milliseconds of a step of a real run.
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
struct Times {
    /// Steps that keep their masks, or all steps if every step refreshes them.
    keeping: Vec<f64>,
    refreshing: Vec<f64>,
    /// Profile of the steps in `keeping`.
    spans: Vec<Span>,
}

/// Runs until `steps` steps are in [`Times::keeping`].
fn time_steps(
    trainer: &mut Trainer,
    batches: &dyn Objective,
    steps: usize,
    profile: Option<&Profile>,
) -> Result<Times, Error> {
    let mut times = Times::default();
    while times.keeping.len() < steps {
        let (refresh, step) = (trainer.recipe().method.refresh, trainer.step() + 1);
        profile.iter().for_each(|profile| profile.start());
        let started = Instant::now();
        trainer.train_step(batches, FlipSampling::Skip)?;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        let spans = profile.map_or_else(|| Ok(Vec::new()), Profile::finish)?;
        if !refresh.is_due(step) || refresh.is_due(step + 1) {
            times.keeping.push(ms);
            times.spans.extend(spans);
        } else {
            times.refreshing.push(ms);
        }
    }
    Ok(times)
}

fn print_table(report: &Report, recipe: &Recipe) -> Result {
    let Report { device, preset, method, phase, step_ms, steps, covered_ms, gap_ms, .. } = report;
    let whole = report.profiled_step_ms;
    say!("{device}");
    say!(
        "{preset}, {method} ({phase} phase), {} x {} sequences of {}, {:.1} GiB held by buffers",
        recipe.gradient_accumulation.first,
        recipe.batch.size,
        recipe.batch.sequence_length,
        report.bytes_held as f64 / f64::from(1 << 30)
    );
    let refresh = report.refresh.map(|RefreshTime { interval, step_ms, steps }| {
        format!("; 1 in {interval} refreshes masks, {step_ms:.2} ms (median of {steps})")
    });
    say!(
        "a step {step_ms:.2} ms (median of {steps}){}: {:.0} tokens/s",
        refresh.unwrap_or_default(),
        report.tokens_per_s
    );
    say!(
        "profiled, each launch queued between events: {whole:.2} ms (mean of {}):",
        report.profiled_steps
    );
    say!("");
    say!("{:<44} {:>10} {:>7} {:>9}", "kind of work", "ms a step", "%", "launches");
    for kind in &report.kinds {
        let indented = kind.parts.iter().map(|part| (format!("  {}", part.name), part));
        for (name, part) in std::iter::once((kind.name.clone(), kind)).chain(indented) {
            let Part { ms, percent, launches, .. } = part;
            say!("{name:<44} {ms:>10.3} {percent:>7.1} {launches:>9.0}");
        }
    }
    say!("{:<44} {covered_ms:>10.3} {:>7.1}", "all of these", 100.0 * covered_ms / whole);
    say!("{:<44} {gap_ms:>10.3} {:>7.1}", "not covered: the GPU waits", 100.0 * gap_ms / whole);
    Ok(())
}

/// Sums spans by kind and, within a kind, by name; the largest sums come first.
fn kinds(spans: &[Span], parameters: &[(&str, [usize; 2])], steps: f64, step_ms: f64) -> Vec<Part> {
    let mut sums: BTreeMap<Kind, BTreeMap<String, (f64, usize)>> = BTreeMap::new();
    for span in spans {
        let kind = sums.entry(span.work.kind()).or_default();
        let sum = kind.entry(name(span.work, parameters)).or_default();
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
        let has_parts = sums.len() > 1;
        let parts = sums.into_iter().map(|(name, sum)| part(name, sum, Vec::new())).collect();
        part(kind.name().to_owned(), whole, if has_parts { sorted(parts) } else { Vec::new() })
    };
    sorted(sums.into_iter().map(kind).collect())
}

/// The name of work within its kind: a kernel without the sizes of its tile, or a product by its
/// parameter without the layer, e.g. `attn.c_attn, forward`.
fn name(work: Work, parameters: &[(&str, [usize; 2])]) -> String {
    let is_number = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
    // The name without the words up to the number of a layer.
    let within_layer = |name: &str| {
        let words: Vec<_> = name.trim_end_matches(".weight").split('.').collect();
        let layer = words.iter().position(|word| is_number(word));
        (layer.is_some(), words[layer.map_or(0, |at| at + 1)..].join("."))
    };
    match work {
        Work::Copy => Kind::Copy.name().to_owned(),
        Work::Kernel(entry) => {
            entry.split('_').take_while(|word| !is_number(word)).collect::<Vec<_>>().join("_")
        }
        Work::Product { pass, weight: [r, q], .. }
        | Work::SparseProduct { pass, weight: [r, q] } => {
            // The head multiplies by more rows than its parameter has: padding to 128.
            let fits = |&&(_, [rows, columns]): &&(&str, [usize; 2])| {
                columns == q && rows <= r && r < rows + 128
            };
            // Of equal shapes that of a layer, as there are more.
            let parameter = parameters
                .iter()
                .filter(fits)
                .map(|&(name, [rows, _])| (rows, within_layer(name)))
                .max_by_key(|&(rows, (is_in_layer, _))| (rows, is_in_layer));
            let name = parameter.map_or_else(|| format!("{r}x{q}"), |(_, (_, name))| name);
            format!("{name}, {pass}")
        }
    }
}

/// The batches of training, on random tokens.
fn batches(recipe: &Recipe) -> Batches<RandomTokens> {
    let masked = masked_lm(recipe, None);
    let vocabulary = masked.as_ref().map_or(recipe.model.vocabulary() as u32, |it| it.vocabulary);
    let pixels = match &recipe.model {
        ModelSpec::Deit(spec) => recipe.batch.size * 3 * spec.image_size * spec.image_size,
        _ => 0,
    };
    let translates = matches!(recipe.model, ModelSpec::Transformer(_));
    let sequence_length = recipe.batch.sequence_length;
    let tokens = recipe.batch.tokens();
    let windows = RandomTokens { tokens, vocabulary, pixels, translates, sequence_length };
    Batches { windows, masked, sequence_length }
}

/// Random tokens, with a random source for a model that translates, or random images and classes.
struct RandomTokens {
    tokens: usize,
    vocabulary: u32,
    pixels: usize,
    translates: bool,
    sequence_length: usize,
}

impl Objective for RandomTokens {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let mut word = step.wrapping_mul(104_729).wrapping_add(micro_step);
        let mut draw = || {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((u64::from(word) * u64::from(self.vocabulary)) >> 32) as u32
        };
        let pixels = std::mem::take(&mut batch.pixels);
        batch.clear();
        if self.pixels > 0 {
            // Drawn once: images are read ahead in training, so that a step does not wait for them.
            batch.pixels = pixels;
            let value = |word: u32| word as f32 / self.vocabulary as f32 - 0.5;
            batch.pixels.resize_with(self.pixels, || value(draw()));
            batch.targets.resize(self.tokens, HeadLoss::IGNORE);
            batch.targets.iter_mut().step_by(self.sequence_length).for_each(|it| *it = draw());
            batch.counted = self.tokens / self.sequence_length;
            return Ok(());
        }
        batch.tokens.extend((0..self.tokens).map(|_| draw()));
        if self.translates {
            batch.source.extend((0..self.tokens).map(|_| draw()));
            batch.lengths.resize(self.tokens / self.sequence_length, self.sequence_length as u32);
        }
        batch.targets.extend_from_slice(&batch.tokens[1..]);
        batch.targets.push(draw());
        batch.counted = batch.targets.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_become_kinds_with_shares_of_a_step() {
        let parameters = [
            ("wte.weight", [50257, 768]),
            ("wpe.weight", [1024, 768]),
            ("h.0.attn.c_attn.weight", [2304, 768]),
            ("h.1.attn.c_attn.weight", [2304, 768]),
            ("encoder.layer.10.attention.output.dense.weight", [768, 768]),
            ("cls.predictions.transform.dense.weight", [768, 768]),
        ];
        let product = |pass, weight| Work::Product { pass, tokens: 8, weight };
        let spans = [
            (Work::Kernel("norm_forward_1"), 1.0),
            (Work::Kernel("norm_backward_2"), 1.0),
            (Work::Kernel("norm_forward_1"), 1.0),
            (product("forward", [2304, 768]), 4.0),
            (product("wgrad", [50304, 768]), 8.0),
            (product("dgrad", [5, 7]), 2.0),
            (product("dgrad", [768, 768]), 1.0),
            (Work::SparseProduct { pass: "dgrad", weight: [2304, 768] }, 0.25),
            (Work::SparseProduct { pass: "forward", weight: [2304, 768] }, 0.5),
            (Work::Copy, 0.5),
        ]
        .map(|(work, ms)| Span { work, ms });
        let kinds = kinds(&spans, &parameters, 2.0, 10.0);
        let found: Vec<(&str, f64, f64)> =
            kinds.iter().map(|part| (part.name.as_str(), part.ms, part.launches)).collect();
        assert_eq!(
            found,
            [
                ("dense products", 7.5, 2.0),
                ("norm", 1.5, 1.5),
                ("sparse products", 0.375, 1.0),
                ("copies and fills", 0.25, 0.5)
            ]
        );
        assert_eq!(kinds[0].percent, 75.0);
        let parts = |kind: usize| -> Vec<&str> {
            kinds[kind].parts.iter().map(|part| part.name.as_str()).collect()
        };
        assert_eq!(
            parts(0),
            ["wte, wgrad", "attn.c_attn, forward", "5x7, dgrad", "attention.output.dense, dgrad"]
        );
        assert_eq!(parts(1), ["norm_forward", "norm_backward"]);
        assert_eq!(parts(2), ["attn.c_attn, forward", "attn.c_attn, dgrad"]);
        assert!(parts(3).is_empty());
    }

    /// A trainer on the CPU.
    fn trainer(preset: &str, method: &str) -> (Trainer, Batches<RandomTokens>, Option<NonZeroU32>) {
        let settings = ["layers=1", "heads=2", "d_model=16", "d_ff=32"]
            .map(|setting| format!("model.{setting}"));
        let others = [format!("method.name={method}"), "batch.size=2".into(), "steps=100".into()];
        let config = Config::resolve(Some(preset), None, &[&settings[..], &others].concat())
            .expect("valid settings");
        let mut recipe = config.recipe(config.usual_vocabulary()).expect("a valid recipe");
        let interval = refresh_often(&mut recipe);
        let backend = (config.backend_entry().expect("the CPU").open)(config.backend.settings())
            .expect("the CPU opens");
        let batches = batches(&recipe);
        (Trainer::new(backend, recipe).expect("enough memory"), batches, interval)
    }

    #[test]
    fn steps_that_refresh_masks_are_timed_separately_and_weighted_by_their_frequency() {
        let (mut fst, batches, interval) = trainer("quickstart", "fst");
        assert_eq!(interval, NonZeroU32::new(40));
        let times = time_steps(&mut fst, &batches, 5, None).expect("finite");
        let counts = (times.keeping.len(), times.refreshing.len(), fst.step());
        assert_eq!(counts, (5, 2, 7), "steps 3 and 6 refresh");
        let (mut dense, batches, interval) = trainer("quickstart", "dense");
        let times = time_steps(&mut dense, &batches, 5, None).expect("finite");
        assert_eq!((times.keeping.len(), times.refreshing.len(), interval), (5, 0, None));
        assert_eq!(mean(10.0, Some(RefreshTime { interval: 40, step_ms: 50.0, steps: 5 })), 11.0);
        assert_eq!(mean(10.0, None), 10.0);
    }

    /// On masked tokens, and on images.
    #[test]
    fn other_batches_train() {
        for preset in ["bert-tiny-cpu", "deit-cifar-cpu"] {
            let (mut model, batches, _) = trainer(preset, "fst");
            assert_eq!(time_steps(&mut model, &batches, 1, None).expect("finite").keeping.len(), 1);
        }
    }
}
