//! What the trainer promises of masks, phases, flips and failures.

use ndarray::ArrayView2;
use sparse24_core::{
    Mask, MaskKind, flip::flip_count, phase::Fraction, philox::Philox4x32, search::mask_search,
};
use sparse24_train::{Error, ErrorKind};
use sparse24_train::{
    backend::{Arithmetic, cpu::CpuBackend},
    method::{
        DgradOperand, GradientOperand, KeptValues, Method, Phase, PhaseKind, Until, WeightOperand,
    },
    model::gpt2::Recompute,
    optim::AdamVariant,
    trainer::{Batches, FlipSampling, ParameterState, Recipe, Trainer, overall_flip_rate},
};

use super::{
    fixture::{self, HeldOut, INTERVAL, Noise, STEPS, SWITCH, fst},
    oracle::{arithmetic::distance, fst::sparsified, gpt2::parameters},
    spy::Spy,
};

const LAMBDA: f32 = 2e-2;

fn backend() -> CpuBackend {
    CpuBackend::new(Arithmetic::F32)
}

fn states(trainer: &mut Trainer) -> Vec<ParameterState> {
    trainer.parameter_states().expect("downloads")
}

/// The searched mask of every sparsified weight, in order.
fn searched(states: &[ParameterState]) -> Vec<Mask> {
    let search = |state: &ParameterState| {
        let [rows, columns] = state.shape;
        let w = ArrayView2::from_shape((rows, columns), &state.weight).expect("its shape");
        mask_search(w, MaskKind::Transposable).expect("tiled")
    };
    states
        .iter()
        .filter(|state| state.name.contains(".mlp.") && state.name.ends_with(".weight"))
        .map(search)
        .collect()
}

fn masks(states: Vec<ParameterState>) -> Vec<Mask> {
    states.into_iter().filter_map(|state| state.mask).collect()
}

/// The loss of these weights without any mask.
fn dense_loss(recipe: &Recipe, weights: &[(String, Vec<f32>)], held_out: &HeldOut) -> f64 {
    let dense = Recipe { method: Method::dense(), ..recipe.clone() };
    let mut trainer = Trainer::new(Box::new(backend()), dense).expect("dense");
    fixture::begin(&mut trainer, weights);
    trainer.evaluate(held_out).expect("finite")
}

/// Masks come from w_0, then from w_t after the steps that the interval divides; they prune until
/// the switch and are gone after it.
#[test]
fn masks_live_as_defined() {
    let mut recipe = fixture::recipe(fst(LAMBDA));
    recipe.schedule.peak = 0.3;
    let (spy, log) = Spy::new(backend());
    let mut trainer = fixture::trainer(spy, &recipe);
    let (noise, held_out) = (Noise::of(&recipe), HeldOut::of(&recipe));
    let mut due = searched(&states(&mut trainer));
    assert_eq!(masks(states(&mut trainer)), due);
    let mut refreshed = 0;
    for step in 1..=STEPS {
        let outcome = trainer.train_step(&noise, FlipSampling::Skip).expect("finite");
        let now = states(&mut trainer);
        let weights: Vec<_> =
            now.iter().map(|state| (state.name.clone(), state.weight.clone())).collect();
        let evaluated = trainer.evaluate(&held_out).expect("finite");
        if step > SWITCH {
            assert_eq!((outcome.phase, masks(now)), (PhaseKind::Dense, vec![]), "step {step}");
            assert_eq!(evaluated, dense_loss(&recipe, &weights, &held_out), "step {step}");
            continue;
        }
        if step % INTERVAL == 0 {
            refreshed += usize::from(due != searched(&now));
            due = searched(&now);
        }
        assert_eq!(outcome.phase, PhaseKind::Sparse);
        let pruned: Vec<_> = now.iter().map(|state| (state.name.clone(), pruned(state))).collect();
        assert_eq!(evaluated, dense_loss(&recipe, &pruned, &held_out), "step {step}");
        assert_ne!(
            evaluated,
            dense_loss(&recipe, &weights, &held_out),
            "step {step}: pruning should show"
        );
        let now = masks(now);
        assert_eq!(now, due, "step {step}");
        now.iter().for_each(|mask| mask.check(MaskKind::Transposable).expect("transposable"));
    }
    assert_eq!(refreshed, 2, "a refresh that changes no mask shows nothing");
    let log = log.lock().expect("the trainer is done with it");
    let layers = sparsified(&recipe.model).count();
    let steps =
        |all: &[u32]| -> Vec<u32> { all.iter().flat_map(|&step| vec![step; layers]).collect() };
    // Twice at step 0: of the initial weights, and of those that replaced them.
    assert_eq!(
        log.searches.iter().map(|&(step, _)| step).collect::<Vec<_>>(),
        steps(&[0, 0, 4, 8])
    );
    let every_step: Vec<u32> = [0].into_iter().chain(0..=SWITCH).collect();
    assert_eq!(log.prunings.iter().map(|&(step, _)| step).collect::<Vec<_>>(), steps(&every_step));
}

fn pruned(state: &ParameterState) -> Vec<f32> {
    let columns = state.shape[1];
    let kept =
        |at: usize| state.mask.as_ref().is_none_or(|mask| mask.keeps(at / columns, at % columns));
    state.weight.iter().enumerate().map(|(at, &w)| if kept(at) { w } else { 0.0 }).collect()
}

#[test]
fn dense_training_searches_prunes_and_samples_nothing() {
    let recipe = fixture::recipe(Method::dense());
    let (spy, log) = Spy::new(backend());
    let mut trainer = fixture::trainer(spy, &recipe);
    for _ in 0..STEPS {
        trainer.train_step(&Noise::of(&recipe), FlipSampling::Skip).expect("finite");
        assert_eq!(masks(states(&mut trainer)), []);
    }
    let log = log.lock().expect("the trainer is done with it");
    assert!(
        log.searches.is_empty() && log.prunings.is_empty() && log.samples.is_empty(),
        "{log:?}"
    );
}

/// In dense and sparse phases and runs alike: of searches at w_{t-1} and w_t, whatever the refresh
/// interval.
#[test]
fn flips_are_those_of_consecutive_weights() {
    for method in [fst(LAMBDA), Method::dense()] {
        let recipe = fixture::recipe(method);
        let mut trainer = fixture::trainer(Box::new(backend()), &recipe);
        let mut before = searched(&states(&mut trainer));
        let mut total = 0;
        for step in 1..=STEPS {
            let outcome =
                trainer.train_step(&Noise::of(&recipe), FlipSampling::Sample).expect("finite");
            let after = searched(&states(&mut trainer));
            let expected: Vec<u64> = before
                .iter()
                .zip(&after)
                .map(|(a, b)| flip_count(a, b).expect("one shape"))
                .collect();
            let flips = outcome.flips.expect("sampled");
            assert_eq!(
                flips.iter().map(|layer| layer.flips).collect::<Vec<_>>(),
                expected,
                "step {step}"
            );
            assert!(
                flips
                    .iter()
                    .map(|layer| layer.name.clone())
                    .eq(sparsified(&recipe.model).map(|(name, _)| name))
            );
            assert!(flips.iter().all(|layer| layer.weights == 128));
            let flipped: u64 = expected.iter().sum();
            assert_eq!(overall_flip_rate(&flips), flipped as f64 / (4.0 * 128.0));
            (before, total) = (after, total + flipped);
        }
        assert!(total > 0, "no mask ever moved");
    }
}

/// A weight that is not finite stops training before the update, which then repeats itself, until
/// good weights are restored.
#[test]
fn a_poisoned_weight_stops_training() {
    let kept = fixture::recipe(fst(LAMBDA));
    let noise = Noise::of(&kept);
    for (poison, recompute) in [
        (f32::NAN, Recompute::None),
        (f32::NAN, Recompute::Blocks),
        (f32::INFINITY, Recompute::None),
        (f32::NEG_INFINITY, Recompute::Blocks),
    ] {
        let recipe = Recipe { recompute, ..kept.clone() };
        for (name, layer) in [
            ("wte.weight", "the embedding"),
            ("h.0.mlp.c_fc.weight", "h.0.mlp.c_fc"),
            ("h.1.attn.c_attn.bias", "h.1.attn.c_attn"),
            ("ln_f.weight", "ln_f"),
        ] {
            let mut trainer = fixture::trainer(Box::new(backend()), &recipe);
            trainer.train_step(&noise, FlipSampling::Skip).expect("finite");
            let good = states(&mut trainer);
            let mut bad = good.clone();
            let state = bad.iter_mut().find(|state| state.name == name).expect("a parameter");
            let at = (0..state.weight.len()).find(|at| {
                state
                    .mask
                    .as_ref()
                    .is_none_or(|mask| mask.keeps(at / state.shape[1], at % state.shape[1]))
            });
            state.weight[at.expect("an element that is used")] = poison;
            trainer.restore(1, &bad).expect("shapes are right");
            for _ in 0..2 {
                let error = trainer.train_step(&noise, FlipSampling::Sample).expect_err("poisoned");
                assert_eq!(error.kind(), ErrorKind::NonFinite);
                // GELU takes minus infinity to 0: the poison is then seen in the backward alone.
                let message = error.to_string();
                let begins = format!(
                    "step 2: the loss is not finite, beginning with the output of {layer}; training stopped before the update, "
                );
                let backward = "step 2: a gradient is not finite, beginning with that of ";
                assert!(
                    message.starts_with(&begins) || message.starts_with(backward),
                    "{name} {poison}: {error}"
                );
                assert!(!poison.is_nan() || message.starts_with(&begins), "{name}: {error}");
                assert_eq!(trainer.step(), 1);
                assert!(
                    same_bits(&states(&mut trainer), &bad),
                    "{name} {poison}: something was updated"
                );
            }
            // Nothing sticks to the buffers.
            trainer.restore(1, &good).expect("shapes are right");
            trainer.train_step(&noise, FlipSampling::Skip).expect("good again");
            let mut unharmed = fixture::trainer(Box::new(backend()), &recipe);
            for _ in 0..2 {
                unharmed.train_step(&noise, FlipSampling::Skip).expect("finite");
            }
            assert!(
                same_bits(&states(&mut trainer), &states(&mut unharmed)),
                "{name} {poison}: the run remembers the poison"
            );
        }
    }
}

fn same_bits(a: &[ParameterState], b: &[ParameterState]) -> bool {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let of = |state: &ParameterState| {
        [bits(&state.weight), bits(&state.first_moment), bits(&state.second_moment)]
    };
    a.iter().map(of).eq(b.iter().map(of))
        && a.iter().map(|state| &state.mask).eq(b.iter().map(|state| &state.mask))
}

/// The usual weights, but for those whose names begin like these.
fn set(recipe: &Recipe, values: &[(&str, f32)]) -> Vec<(String, Vec<f32>)> {
    let named = |name: &str| {
        values.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|&(_, value)| value)
    };
    let mut all = fixture::weights(&recipe.model);
    for (name, weights) in &mut all {
        if let Some(value) = named(name) {
            weights.fill(value);
        }
    }
    all
}

/// A gradient overflows while the loss is finite: LayerNorm scales by next to nothing what the
/// weights after it blow up again.
#[test]
fn an_overflowing_gradient_names_its_tensor() {
    let recipe = fixture::recipe(Method::dense());
    let weights =
        set(&recipe, &[("h.1.ln_2", 1e-44), ("h.1.mlp.c_fc.weight", 3e38), ("ln_f.weight", 1e4)]);
    let mut trainer = fixture::trainer(Box::new(backend()), &recipe);
    fixture::begin(&mut trainer, &weights);
    let before = states(&mut trainer);
    let evaluated = trainer.evaluate(&HeldOut::of(&recipe)).expect("runs");
    assert!(evaluated.is_finite(), "the loss is {evaluated}");
    let error = trainer.train_step(&Noise::of(&recipe), FlipSampling::Skip).expect_err("overflows");
    assert!(
        matches!(&error, Error::NonFinite { step: 1, what, .. } if what == "a gradient is not finite, beginning with that of h.1.ln_2.bias"),
        "{error}"
    );
    assert!(same_bits(&states(&mut trainer), &before));
}

/// The last token of the vocabulary is wanted everywhere and read nowhere.
struct Wanted(Noise);

impl Batches for Wanted {
    fn fill(&self, step: u32, micro_step: u32, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
        (*inputs, *targets) = self.0.batch(step, micro_step);
        inputs.iter_mut().for_each(|token| *token %= self.0.vocabulary as u32 - 1);
        targets.fill(self.0.vocabulary as u32 - 1);
    }
}

/// The wanted token's logit is minus infinity: the loss is infinite, every gradient finite, and
/// nothing is updated.
#[test]
fn an_infinite_loss_stops_training_though_gradients_are_finite() {
    let recipe = fixture::recipe(Method::dense());
    let mut weights = set(&recipe, &[("ln_f.weight", 1e-3), ("ln_f.bias", 1.0)]);
    let embedding = &mut weights[0].1;
    let last = embedding.len() - recipe.model.width;
    embedding[last..].fill(-6e37);
    let mut trainer = fixture::trainer(Box::new(backend()), &recipe);
    fixture::begin(&mut trainer, &weights);
    let before = states(&mut trainer);
    let error =
        trainer.train_step(&Wanted(Noise::of(&recipe)), FlipSampling::Skip).expect_err("infinite");
    assert!(
        matches!(&error, Error::NonFinite { step: 1, what, .. } if what == "the loss is not finite, beginning with the logits"),
        "{error}"
    );
    assert!(same_bits(&states(&mut trainer), &before), "the weights were updated");
}

#[test]
fn methods_that_cannot_be_are_refused() {
    let pruned = |kind| WeightOperand::Pruned(kind, KeptValues::Identity);
    let dense = fixture::phase(None, DgradOperand::Dense, GradientOperand::Dense);
    let ends = |until: Fraction| Phase { until: Until::Fraction(until), ..dense };
    let half = ends(Fraction::new(1, 2).expect("a half"));
    let of = |kind, phase: Phase| Phase { forward: pruned(kind), ..phase };
    let permuted = |forward| Phase { dgrad: DgradOperand::Permuted, forward, ..dense };
    let frozen = Phase { optimizer: AdamVariant::FrozenVariance, ..dense };
    let follow =
        "method.phases: expected phases that follow each other, the last one to the end of the run";
    let row_wise = r#"method.dgrad: expected a row-wise forward beside "permuted" (method.forward = "row-wise")"#;
    let alike = "method.forward: expected all sparse phases to prune the forward's operand alike";
    let steps_before =
        "method.phases: expected at least one step before a frozen variance, found none";
    for (phases, expected) in [
        (vec![], follow),
        (vec![half], follow),
        (vec![dense, half], follow),
        (vec![dense, half, dense], follow),
        (vec![Phase { until: Until::SETTLED, ..dense }], follow),
        (vec![of(MaskKind::Transposable, half), of(MaskKind::RowWise, dense)], alike),
        (
            vec![
                of(MaskKind::RowWise, half),
                Phase {
                    forward: WeightOperand::Pruned(MaskKind::RowWise, KeptValues::SoftThreshold),
                    ..dense
                },
            ],
            alike,
        ),
        (vec![half, permuted(WeightOperand::Dense)], row_wise),
        (vec![permuted(pruned(MaskKind::Transposable))], row_wise),
        (vec![frozen], steps_before),
        (vec![ends(Fraction::new(1, 13).expect("of 12 steps none")), frozen], steps_before),
    ] {
        let method = Method { name: "trial", phases, ..Method::dense() };
        let error = method.check(STEPS).expect_err(expected);
        assert_eq!(
            (error.to_string().as_str(), error.kind()),
            (expected, ErrorKind::Configuration)
        );
        let refused = Trainer::new(Box::new(backend()), fixture::recipe(method))
            .err()
            .map(|error| error.to_string());
        assert_eq!(refused.as_deref(), Some(expected));
    }
}

/// Box and Muller in f64 from the documented words: site = purpose 1 and the place of the
/// parameter, from 0; biases 0, norms 1.
#[test]
fn initial_weights_are_those_documented() {
    let recipe = fixture::recipe(fst(LAMBDA));
    let mut trainer = Trainer::new(Box::new(backend()), recipe.clone()).expect("fst");
    for (number, state) in states(&mut trainer).into_iter().enumerate() {
        let matrix = state.shape[0] > 1;
        let residual = state.name.ends_with("c_proj.weight");
        let deviation =
            0.02 / if residual { (2.0 * recipe.model.layers as f64).sqrt() } else { 1.0 };
        let normal = |at: usize| {
            let words = Philox4x32::new(recipe.seed).block([
                (at / 4) as u32,
                1 << 24 | number as u32,
                0,
                0,
            ]);
            let uniform = |word: usize| f64::from(words[word] >> 8) / f64::from(1 << 24);
            let (u, v) = (1.0 - uniform(at % 4 / 2 * 2), uniform(at % 4 / 2 * 2 + 1));
            let angle = std::f64::consts::TAU * v;
            (-2.0 * u.ln()).sqrt() * if at.is_multiple_of(2) { angle.cos() } else { angle.sin() }
        };
        let constant = if state.name.ends_with(".bias") { 0.0 } else { 1.0 };
        let expected = |at: usize| if matrix { deviation * normal(at) } else { constant };
        for (at, &found) in state.weight.iter().enumerate() {
            // The normal, the deviation and their product are rounded.
            let bound = 4.0 * 2.0_f64.powi(-24) * expected(at).abs();
            assert!(
                (f64::from(found) - expected(at)).abs() <= if matrix { bound } else { 0.0 },
                "{}[{at}]",
                state.name
            );
        }
        assert!(state.first_moment.iter().chain(&state.second_moment).all(|&x| x == 0.0));
    }
    let names = parameters(&recipe.model);
    assert!(trainer.parameter_shapes().map(|(name, shape)| (name.to_owned(), shape)).eq(names));
}

/// A text that repeats every 17 tokens.
struct Repetitive(Noise);

impl Batches for Repetitive {
    fn fill(&self, step: u32, micro_step: u32, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
        let token = |at: usize| (at % 17 * 7 % 11) as u32;
        let first = (31 * step + 5 * micro_step) as usize;
        *inputs = (first..first + self.0.tokens).map(token).collect();
        *targets = (first + 1..=first + self.0.tokens).map(token).collect();
    }
}

/// The text can be told from its last few tokens: FST, begun at ln 11 = 2.4 nats, ends below half a
/// nat.
#[test]
fn fst_learns_a_repetitive_text() {
    let mut recipe = fixture::recipe(Method::fst(6e-5));
    (recipe.model.width, recipe.model.ffn_width, recipe.steps) = (32, 128, 120);
    (recipe.model.context, recipe.batch.context, recipe.batch.sequences) = (16, 16, 8);
    (recipe.schedule.peak, recipe.schedule.decay_steps, recipe.optimizer.clip) = (1e-2, 120, 1.0);
    recipe.optimizer.epsilon = 1e-8;
    let mut trainer = Trainer::new(Box::new(backend()), recipe.clone()).expect("fst");
    let text = Repetitive(Noise::of(&recipe));
    let losses: Vec<f64> = (0..recipe.steps)
        .map(|_| trainer.train_step(&text, FlipSampling::Skip).expect("finite").loss)
        .collect();
    let first = distance(&ndarray::arr2(&[[11.0_f64.ln()]]), [losses[0]]);
    assert!(first <= 0.1, "the first loss is {}", losses[0]);
    for (name, steps) in [("sparse", 95..100), ("dense", 115..120)] {
        let mean = losses[steps].iter().sum::<f64>() / 5.0;
        assert!(mean <= 0.5, "{name}: {mean} nats");
    }
}
