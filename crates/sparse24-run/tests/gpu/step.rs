//! Single steps of every method: from the same state on the same batch, the GPU's is the CPU's with
//! bf16 rounding.
//!
//! The bound is twice the CPU's own spread: `|gpu - bf16| <= 2 |f32 - bf16|`, Frobenius norms, a
//! tensor at a time. Where two computations that round to bf16 at the same places sum in another
//! order, a rounding here and there falls the other way, and after some layers so many do that the
//! two errors are as good as independent: their difference is sqrt(2) times the spread, and no
//! more. Sampled gradients are no exception: a draw that a rounding turns is turned in the spread
//! as well. What follows without rounding to bf16 is the same bits: masks, flips, and the weights
//! that follow from the moments. The change of the variance is a sum in f64 of as many bits, in
//! another order: rounded to f32, two such sums are at most neighbours. Losses are compared by the
//! conformance suite.

use std::{num::NonZeroU32, thread};

use ndarray::ArrayView2;
use sparse24_core::{
    Mask, MaskKind, flip::flip_count, permute::permuted_mask, phase::Refresh, search::mask_search,
};
use sparse24_run::{
    config::{Config, preset},
    data::{Dataset, TokenizerKind},
};
use sparse24_train::{
    backend::{Arithmetic, Backend, Launches, cpu::CpuBackend},
    method::{PRESETS, Phase},
    objective::Objective,
    optim::{AdamVariant, bias_corrections},
    trainer::{FlipSampling, ParameterState, Progress, Recipe, StepOutcome, Trainer},
};

use crate::support::{drawn, embedded, on_gpu, opened, states, trainer};

/// Share of the spread.
const BOUND: f64 = 2.0;

/// Steps after which masks were searched anew; before the last, STEP's variance has settled.
const STOPS: [u32; 4] = [0, 50, 100, 200];

fn within(ratio: f64) -> bool {
    ratio <= BOUND
}

/// The outcome of a step and the states after it.
type Step = (StepOutcome, Vec<ParameterState>);

fn step(trainer: &mut Trainer, batches: &dyn Objective) -> Step {
    let outcome = trainer.train_step(batches, FlipSampling::Sample).expect("finite");
    (outcome, states(trainer))
}

/// The Frobenius norm of a difference.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>().sqrt()
}

/// How far the GPU is from the CPU with bf16 rounding, as a multiple of how far that is from f32;
/// equal tensors without a spread are at 0.
fn ratio(gpu: &[f32], rounded: &[f32], exact: &[f32]) -> f64 {
    let difference = distance(gpu, rounded);
    if difference == 0.0 { 0.0 } else { difference / distance(exact, rounded) }
}

fn matrix(state: &ParameterState) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape(state.shape, &state.weight).expect("a matrix")
}

fn searched(state: &ParameterState, kind: MaskKind) -> Mask {
    mask_search(matrix(state), kind).expect("tiled")
}

/// The masks are those of the weights, in a sparse phase; also those of dgrad in their order.
fn assert_masks(states: &[ParameterState], phase: &Phase, what: &str) {
    let is_sparse = states.iter().any(|state| state.mask.is_some());
    assert_eq!(is_sparse, phase.mask().is_some(), "masks {what}");
    for state in states {
        let Some((mask, kind)) = state.mask.as_ref().zip(phase.mask()) else { continue };
        assert_eq!(*mask, searched(state, kind), "{} {what}", state.name);
        let order = state.row_order.as_deref().unwrap_or_default();
        let both = state.dgrad_mask.as_ref();
        let expected = both.map(|_| permuted_mask(matrix(state), mask, order).expect("an order"));
        assert_eq!(both, expected.as_ref(), "dgrad of {} {what}", state.name);
    }
}

/// A run on the GPU that compares the step after each of [`STOPS`].
fn compare(gpu: Box<dyn Backend>, recipe: &Recipe, dataset: &Dataset) {
    let batches = drawn(dataset, recipe);
    let cpu = |arithmetic| move || trainer(Box::new(CpuBackend::new(arithmetic)), recipe);
    let (mut gpu, mut rounded, mut exact) = thread::scope(|scope| {
        let [rounded, exact] =
            [Arithmetic::Bf16, Arithmetic::F32].map(|arithmetic| scope.spawn(cpu(arithmetic)));
        (trainer(gpu, recipe), rounded.join().expect("room"), exact.join().expect("room"))
    });
    let mut failures = Vec::new();
    for stop in STOPS {
        while gpu.step() < stop {
            gpu.train_step(&batches, FlipSampling::Skip).expect("finite");
        }
        let (name, progress) = (recipe.method.name, gpu.progress().clone());
        let before = states(&mut gpu);
        assert_masks(&before, gpu.phase(), &format!("of {name} after step {stop}"));
        let on_gpu = step(&mut gpu, &batches);
        let [on_cpu, in_f32] = [&mut rounded, &mut exact].map(|trainer| {
            trainer.restore(progress.clone(), &before).expect("every state is there");
            step(trainer, &batches)
        });

        for flips in on_gpu.0.flips.as_ref().expect("sampled") {
            let [was, is] = [&before, &on_gpu.1].map(|states| {
                let state = states.iter().find(|state| state.name == flips.name).expect("there");
                searched(state, MaskKind::Transposable)
            });
            let expected = flip_count(&was, &is).expect("equal shapes") as u64;
            assert_eq!(flips.flips, expected, "{} after step {stop}", flips.name);
        }

        let steps = [&on_gpu, &on_cpu, &in_f32];
        println!("{name}, step {}: loss {:?}", stop + 1, steps.map(|step| step.0.loss));
        failures.extend(beyond_bound(steps.map(|step| &step.1), stop + 1));
        for (before, after) in before.iter().zip(&on_gpu.1) {
            assert_second_moments(before, after, recipe, gpu.phase().optimizer);
            let expected = updated(before, after, recipe, &on_gpu.0, &progress);
            assert!(after.weight == expected, "{}: the weights of the moments", after.name);
        }
        if recipe.method.refresh.is_due(stop + 1) {
            assert_masks(&on_gpu.1, gpu.phase(), &format!("of {name} after step {}", stop + 1));
        } else {
            let masks = |states: &[ParameterState]| {
                states.iter().map(|state| state.mask.clone()).collect::<Vec<_>>()
            };
            assert!(masks(&on_gpu.1) == masks(&before), "{name}: no search was due");
        }
        if let Some(&change) = gpu.progress().variance_changes.last() {
            let expected = variance_change(&before, &on_gpu.1);
            assert!((change - expected).abs() <= f32::EPSILON * expected, "{change}: {expected}");
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The gradients that are farther from the CPU's than the bound allows. They are seen in the first
/// moments: those before the step are the same, so that the difference of those after it is that of
/// the clipped gradients, times 1 - beta1.
fn beyond_bound([gpu, rounded, exact]: [&Vec<ParameterState>; 3], step: u32) -> Vec<String> {
    let of_state =
        |((gpu, rounded), exact): ((&ParameterState, &ParameterState), &ParameterState)| {
            let [moment, on_cpu, in_f32] = [gpu, rounded, exact].map(|state| &state.first_moment);
            (ratio(moment, on_cpu, in_f32), gpu.name.clone())
        };
    let mut ratios: Vec<_> = gpu.iter().zip(rounded).zip(exact).map(of_state).collect();
    ratios.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("  gradient: at most {:.2} of the spread ({})", ratios[0].0, ratios[0].1);
    let beyond = ratios.into_iter().filter(|(ratio, _)| !within(*ratio));
    beyond
        .map(|(ratio, name)| format!("gradient of {name} in step {step}: {ratio:.2} of the spread"))
        .collect()
}

/// The second moments are those of the gradients that the first moments show, or unchanged while
/// the variance is frozen.
///
/// With u = 2^-24, the first moment m' = beta1 m + (1 - beta1) g is rounded three times, so that
/// g is known up to e = 3 u (|m| + |m'|) / (1 - beta1), and its square up to 2 |g| e + e^2. The
/// second moment is rounded four times; results too small for that bound lose at most 2^-149 each.
fn assert_second_moments(
    before: &ParameterState,
    after: &ParameterState,
    recipe: &Recipe,
    variant: AdamVariant,
) {
    if variant == AdamVariant::FrozenVariance {
        assert!(after.second_moment == before.second_moment, "{}: it is frozen", after.name);
        return;
    }
    let adam = recipe.optimizer.rule.adam().expect("a preset has AdamW");
    let [beta1, beta2] = [adam.beta1, adam.beta2].map(f64::from);
    let [rounding, smallest] = [f32::EPSILON / 2.0, f32::from_bits(1)].map(f64::from);
    let moments = |state: &ParameterState| {
        let pairs = state.first_moment.iter().zip(&state.second_moment);
        pairs.map(|(&m, &v)| (f64::from(m), f64::from(v))).collect::<Vec<_>>()
    };
    for (i, ((m, v), (m_after, v_after))) in
        moments(before).into_iter().zip(moments(after)).enumerate()
    {
        let g = (m_after - beta1 * m) / (1.0 - beta1);
        let e = 3.0 * (rounding * (m.abs() + m_after.abs()) + smallest) / (1.0 - beta1);
        let expected = beta2 * v + (1.0 - beta2) * g * g;
        let bound =
            (1.0 - beta2) * (2.0 * g.abs() * e + e * e) + 4.0 * (rounding * expected + smallest);
        let found = (v_after - expected).abs();
        assert!(found <= bound, "second moment {i} of {}: {found} over {bound}", after.name);
    }
}

/// The mean distance of the second moments, over all weights.
fn variance_change(before: &[ParameterState], after: &[ParameterState]) -> f32 {
    let variances = |states: &[ParameterState]| {
        states.iter().flat_map(|state| state.second_moment.clone()).map(f64::from).collect()
    };
    let [before, after]: [Vec<f64>; 2] = [before, after].map(variances);
    let moved: f64 = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).sum();
    (moved / after.len() as f64) as f32
}

/// AdamW's update of a weight from the moments after the step, to the bit. Weights are no smooth
/// function of gradients: where there was none, the first step goes its full length either way.
fn updated(
    before: &ParameterState,
    after: &ParameterState,
    recipe: &Recipe,
    outcome: &StepOutcome,
    progress: &Progress,
) -> Vec<f32> {
    let Recipe { method, steps, optimizer, .. } = recipe;
    let phase = method.phases[method.phase_at(outcome.step, *steps, &progress.ends)];
    let last_change = match phase.optimizer {
        AdamVariant::Standard => outcome.step,
        AdamVariant::FrozenVariance => *progress.ends.values().last().expect("it has settled"),
    };
    let corrections =
        [outcome.step, last_change].map(|step| bias_corrections(&optimizer.rule, step));
    let epsilon = optimizer.rule.adam().expect("a preset has AdamW").epsilon;
    let (first, second) = (1.0 / corrections[0][0], 1.0 / corrections[1][1]);
    let weight_decay = if before.shape[0] > 1 { recipe.weight_decay } else { 0.0 };
    let moments = after.first_moment.iter().zip(&after.second_moment);
    let of = |(&w, (&m, &v)): (&f32, (&f32, &f32))| {
        let step = (m * first) / ((v * second).sqrt() + epsilon);
        w - outcome.learning_rate * (step + weight_decay * w)
    };
    before.weight.iter().zip(moments).map(of).collect()
}

/// Masks that are not searched each step are searched every ten steps, so that they have moved at
/// every stop.
fn recipe(name: &str, change: impl FnOnce(&mut Config), vocabulary: usize) -> Recipe {
    let mut config = preset::find(name).expect("a preset");
    config.steps = 300;
    config.optimizer.warmup_steps = 20;
    change(&mut config);
    let mut recipe = config.recipe(vocabulary).expect("possible");
    if recipe.method.refresh != Refresh::EachStep {
        recipe.method.refresh = Refresh::Every(NonZeroU32::new(10).expect("not zero"));
    }
    recipe
}

#[test]
fn a_step_of_every_method_is_the_cpus() {
    on_gpu(|gpu| {
        drop(gpu);
        let dataset = embedded(TokenizerKind::Byte);
        for method in PRESETS {
            let small = |config: &mut Config| {
                (config.model.layers, config.model.bias, config.model.dropout) = (2, true, 0.1);
                config.batch.gradient_accumulation_steps = 2;
                // So strong a decay that it shows where it is missing.
                (config.method.name, config.method.lambda) = (method.name.to_owned(), 2e-2);
            };
            let recipe = recipe("quickstart", small, dataset.vocabulary() as usize);
            compare(opened(Launches::Captured), &recipe, &dataset);
        }
    });
}

#[test]
#[ignore = "a minute: GPT-2 124M on the CPU"]
fn a_step_of_gpt2_124m_is_the_cpus() {
    on_gpu(|gpu| {
        let dataset = embedded(TokenizerKind::Gpt2);
        let single = |config: &mut Config| config.batch.gradient_accumulation_steps = 1;
        let mut recipe = recipe("gpt2-124m", single, dataset.vocabulary() as usize);
        (recipe.batch.size, recipe.batch.sequence_length) = (4, 256);
        compare(gpu, &recipe, &dataset);
    });
}
