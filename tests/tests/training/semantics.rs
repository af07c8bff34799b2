//! The trainer's promises about masks, phases, flips and failures.

use ndarray::ArrayView2;
use sparse24_core::{
    Mask, MaskKind, flip::flip_count, phase::Fraction, philox::Philox4x32, search::mask_search,
};
use sparse24_train::{
    Error, ErrorKind,
    method::{
        DgradOperand, GradientOperand, KeptValues, Method, Phase, PhaseKind, Until, WeightOperand,
    },
    model::{ActivationCheckpointing, ModelSpec},
    objective::{Batch, DataError, Objective},
    optim::AdamVariant,
    trainer::{FlipSampling, ParameterState, Recipe, Trainer, overall_flip_rate},
};

use super::{
    fixture::{self, INTERVAL, Noise, STEPS, SWITCH, Validation, cpu, fst, gpt2},
    oracle::fst::sparsified,
    spy::spy,
};

const LAMBDA: f32 = 2e-2;

fn states(trainer: &mut Trainer) -> Vec<ParameterState> {
    trainer.parameter_states().expect("downloads")
}

/// The mask of every sparsifiable weight, searched in its present values, in order.
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

/// The loss of these weights without masks.
fn dense_loss(recipe: &Recipe, weights: &[(String, Vec<f32>)], validation: &Validation) -> f64 {
    let dense = Recipe { method: Method::dense(), ..recipe.clone() };
    let mut trainer = Trainer::new(cpu(), dense).expect("a valid recipe");
    fixture::start_from(&mut trainer, weights);
    fixture::evaluate(&mut trainer, validation)
}

/// Masks are searched in w_0, then in w_t after the steps that the interval divides; they prune
/// until the switch and are gone after it.
#[test]
fn masks_are_refreshed_at_their_interval_and_gone_after_the_switch() {
    let mut recipe = fixture::recipe(fst(LAMBDA));
    recipe.schedule.peak = 0.3;
    let (spy, log) = spy();
    let mut trainer = fixture::trainer(spy, &recipe);
    let (noise, validation) = (Noise::of(&recipe), Validation::of(&recipe));
    let mut due = searched(&states(&mut trainer));
    assert_eq!(masks(states(&mut trainer)), due);
    let mut refreshed = 0;
    for step in 1..=STEPS {
        let outcome = trainer.train_step(&noise, FlipSampling::Skip).expect("finite");
        let now = states(&mut trainer);
        let weights: Vec<_> =
            now.iter().map(|state| (state.name.clone(), state.weight.clone())).collect();
        let evaluated = fixture::evaluate(&mut trainer, &validation);
        if step > SWITCH {
            assert_eq!((outcome.phase, masks(now)), (PhaseKind::Dense, vec![]), "step {step}");
            assert_eq!(evaluated, dense_loss(&recipe, &weights, &validation), "step {step}");
            continue;
        }
        if step % INTERVAL == 0 {
            refreshed += usize::from(due != searched(&now));
            due = searched(&now);
        }
        assert_eq!(outcome.phase, PhaseKind::Sparse);
        let pruned: Vec<_> = now.iter().map(|state| (state.name.clone(), pruned(state))).collect();
        assert_eq!(evaluated, dense_loss(&recipe, &pruned, &validation), "step {step}");
        assert_ne!(
            evaluated,
            dense_loss(&recipe, &weights, &validation),
            "step {step}: pruning changes nothing"
        );
        let now = masks(now);
        assert_eq!(now, due, "step {step}");
        now.iter().for_each(|mask| mask.check(MaskKind::Transposable).expect("transposable"));
    }
    assert_eq!(refreshed, 2, "a refresh changed no mask");
    let log = log.lock().expect("the trainer is done with it");
    let layers = sparsified(&recipe.model).count();
    let steps =
        |all: &[u32]| -> Vec<u32> { all.iter().flat_map(|&step| vec![step; layers]).collect() };
    // Twice at step 0: in the initial weights, and in those that replaced them.
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
    let (spy, log) = spy();
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

/// In dense and sparse phases alike, flips compare masks searched in w_{t-1} and w_t, whatever the
/// refresh interval.
#[test]
fn flips_compare_consecutive_weights() {
    for method in [fst(LAMBDA), Method::dense()] {
        let recipe = fixture::recipe(method);
        let mut trainer = fixture::trainer(cpu(), &recipe);
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

/// A weight that is not finite stops training before the update, again and again, until good
/// weights are restored.
#[test]
fn a_non_finite_weight_stops_training() {
    let kept = fixture::recipe(fst(LAMBDA));
    let noise = Noise::of(&kept);
    for (poison, checkpointing) in [
        (f32::NAN, ActivationCheckpointing::None),
        (f32::NAN, ActivationCheckpointing::Blocks),
        (f32::INFINITY, ActivationCheckpointing::None),
        (f32::NEG_INFINITY, ActivationCheckpointing::Blocks),
    ] {
        let recipe = Recipe { checkpointing, ..kept.clone() };
        for (name, layer) in [
            ("wte.weight", "the embedding"),
            ("h.0.mlp.c_fc.weight", "h.0.mlp.c_fc"),
            ("h.1.attn.c_attn.bias", "h.1.attn.c_attn"),
            ("ln_f.weight", "ln_f"),
        ] {
            let mut trainer = fixture::trainer(cpu(), &recipe);
            trainer.train_step(&noise, FlipSampling::Skip).expect("finite");
            let good = states(&mut trainer);
            let mut bad = good.clone();
            let state = bad.iter_mut().find(|state| state.name == name).expect("a parameter");
            let columns = state.shape[1];
            let kept = |mask: &Mask, at: usize| mask.keeps(at / columns, at % columns);
            let used = (0..state.weight.len())
                .find(|&at| state.mask.as_ref().is_none_or(|mask| kept(mask, at)));
            state.weight[used.expect("a kept element")] = poison;
            trainer.restore(1, &bad).expect("the shapes are right");
            for _ in 0..2 {
                let error = trainer.train_step(&noise, FlipSampling::Sample).expect_err("poisoned");
                let Error::NonFinite { step: 2, what } = &error else { panic!("{name}: {error}") };
                assert_eq!(error.kind(), ErrorKind::NonFinite);
                // GELU maps minus infinity to 0: only the backward pass then shows the poison.
                let is_loss =
                    what.contains("loss") && what.ends_with(&format!("the output of {layer}"));
                let is_gradient = what.contains("gradient") && !poison.is_nan();
                assert!(is_loss || is_gradient, "{name} {poison}: {error}");
                assert_eq!(trainer.step(), 1);
                assert!(same_bits(&states(&mut trainer), &bad), "{name} {poison}: updated");
            }
            // Nothing of it is left in the buffers.
            trainer.restore(1, &good).expect("the shapes are right");
            trainer.train_step(&noise, FlipSampling::Skip).expect("good again");
            let mut unharmed = fixture::trainer(cpu(), &recipe);
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

/// The usual weights, except parameters whose names start with these prefixes.
fn weights_with(spec: &ModelSpec, values: &[(&str, f32)]) -> Vec<(String, Vec<f32>)> {
    let named = |name: &str| {
        values.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|&(_, value)| value)
    };
    let mut all = fixture::weights(spec);
    for (name, weights) in &mut all {
        if let Some(value) = named(name) {
            weights.fill(value);
        }
    }
    all
}

/// The first step from these weights stops before the update, with this explanation.
fn assert_stops(weights: &[(String, Vec<f32>)], objective: &dyn Objective, expected: &[&str]) {
    let recipe = fixture::recipe(Method::dense());
    let mut trainer = fixture::trainer(cpu(), &recipe);
    fixture::start_from(&mut trainer, weights);
    let before = states(&mut trainer);
    let error = trainer.train_step(objective, FlipSampling::Skip).expect_err("not finite");
    let Error::NonFinite { step: 1, what } = &error else { panic!("{error}") };
    assert!(expected.iter().all(|part| what.contains(part)), "{error}");
    assert!(same_bits(&states(&mut trainer), &before), "the weights were updated");
}

/// A gradient overflows while the loss is finite: LayerNorm almost cancels a scale that the weights
/// after it restore.
#[test]
fn an_overflowing_gradient_names_its_tensor() {
    let recipe = fixture::recipe(Method::dense());
    let large = [("h.1.ln_2", 1e-44), ("h.1.mlp.c_fc.weight", 3e38), ("ln_f.weight", 1e4)];
    let weights = weights_with(&recipe.model, &large);
    let loss = dense_loss(&recipe, &weights, &Validation::of(&recipe));
    assert!(loss.is_finite(), "the loss is {loss}");
    assert_stops(&weights, &Noise::of(&recipe), &["gradient", "h.1.ln_2.bias"]);
}

/// Every target is the last token of the vocabulary, which is never an input.
struct LastToken(Noise);

impl Objective for LastToken {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        *batch = self.0.batch(step, micro_step);
        batch.tokens.iter_mut().for_each(|token| *token %= self.0.vocabulary as u32 - 1);
        batch.targets.fill(self.0.vocabulary as u32 - 1);
        Ok(())
    }
}

/// The target's logit is minus infinity: the loss is infinite, though every gradient is finite.
#[test]
fn an_infinite_loss_stops_training_though_gradients_are_finite() {
    let recipe = fixture::recipe(Method::dense());
    let spec = gpt2(&recipe);
    let mut weights = weights_with(&recipe.model, &[("ln_f.weight", 1e-3), ("ln_f.bias", 1.0)]);
    let embedding = &mut weights[0].1;
    let last = embedding.len() - spec.d_model;
    embedding[last..].fill(-6e37);
    assert_stops(&weights, &LastToken(Noise::of(&recipe)), &["loss", "the logits"]);
}

#[test]
fn impossible_methods_are_refused() {
    let pruned = |kind| WeightOperand::Pruned(kind, KeptValues::Identity);
    let dense = fixture::phase(None, DgradOperand::Dense, GradientOperand::Dense);
    let ends = |until: Fraction| Phase { until: Until::Fraction(until), ..dense };
    let half = ends(Fraction::new(1, 2).expect("a half"));
    let of = |kind, phase: Phase| Phase { forward: pruned(kind), ..phase };
    let permuted = |forward| Phase { dgrad: DgradOperand::Permuted, forward, ..dense };
    let soft = WeightOperand::Pruned(MaskKind::RowWise, KeptValues::SoftThreshold);
    let frozen = Phase { optimizer: AdamVariant::FrozenVariance, ..dense };
    let no_step = ends(Fraction::new(1, 13).expect("a thirteenth"));
    for (phases, key, part) in [
        (vec![], "method.phases", "the last"),
        (vec![half], "method.phases", "the last"),
        (vec![dense, half], "method.phases", "the last"),
        (vec![dense, half, dense], "method.phases", "the last"),
        (vec![Phase { until: Until::SETTLED, ..dense }], "method.phases", "the last"),
        (
            vec![of(MaskKind::Transposable, half), of(MaskKind::RowWise, dense)],
            "method.forward",
            "all sparse phases",
        ),
        (
            vec![of(MaskKind::RowWise, half), Phase { forward: soft, ..dense }],
            "method.forward",
            "all sparse phases",
        ),
        (vec![half, permuted(WeightOperand::Dense)], "method.dgrad", "row-wise"),
        (vec![permuted(pruned(MaskKind::Transposable))], "method.dgrad", "row-wise"),
        (vec![frozen], "method.phases", "at least one step before"),
        (vec![no_step, frozen], "method.phases", "at least one step before"),
    ] {
        let method = Method { name: "trial", phases, ..Method::dense() };
        let checked = method.check(STEPS).expect_err(part);
        let refused = Trainer::new(cpu(), fixture::recipe(method)).err().expect(part);
        for error in [checked, refused] {
            assert_eq!(error.kind(), ErrorKind::Configuration);
            let Error::Setting { key: found, problem } = &error else { panic!("{error}") };
            assert!(found == key && problem.contains(part), "{error}");
        }
    }
}

/// Box and Muller in f64 from the documented words: the site is purpose 1 and the number of the
/// parameter, from 0; biases are 0, norms 1.
#[test]
fn initial_weights_are_those_documented() {
    let recipe = fixture::recipe(fst(LAMBDA));
    let spec = gpt2(&recipe);
    let mut trainer = Trainer::new(cpu(), recipe.clone()).expect("a valid recipe");
    for (number, state) in states(&mut trainer).into_iter().enumerate() {
        let matrix = state.shape[0] > 1;
        let residual = state.name.ends_with("c_proj.weight");
        let deviation = 0.02 / if residual { (2.0 * spec.layers as f64).sqrt() } else { 1.0 };
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
}

/// A text that repeats every 17 tokens.
struct Repetitive(Noise);

impl Objective for Repetitive {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let token = |at: usize| (at % 17 * 7 % 11) as u32;
        let first = (31 * step + 5 * micro_step) as usize;
        batch.clear();
        batch.tokens.extend((first..first + self.0.tokens).map(token));
        batch.targets.extend((first + 1..=first + self.0.tokens).map(token));
        batch.counted = self.0.tokens;
        Ok(())
    }
}

/// The next token follows from the last few: FST starts at ln 11 = 2.4 nats and ends below half a
/// nat.
#[test]
fn fst_learns_a_repetitive_text() {
    let mut recipe = fixture::recipe(Method::fst(6e-5));
    fixture::change(&mut recipe, |spec| {
        (spec.d_model, spec.d_ff, spec.sequence_length) = (32, 128, 16);
    });
    (recipe.batch.sequence_length, recipe.batch.size, recipe.steps) = (16, 8, 120);
    (recipe.schedule.peak, recipe.schedule.decay_steps, recipe.optimizer.clip) = (1e-2, 120, 1.0);
    recipe.optimizer.epsilon = 1e-8;
    let mut trainer = Trainer::new(cpu(), recipe.clone()).expect("a valid recipe");
    let text = Repetitive(Noise::of(&recipe));
    let losses: Vec<f64> = (0..recipe.steps)
        .map(|_| trainer.train_step(&text, FlipSampling::Skip).expect("finite").loss)
        .collect();
    assert!((losses[0] - 11.0_f64.ln()).abs() <= 0.1, "the first loss is {}", losses[0]);
    for (name, steps) in [("sparse", 95..100), ("dense", 115..120)] {
        let mean = losses[steps].iter().sum::<f64>() / 5.0;
        assert!(mean <= 0.5, "{name}: {mean} nats");
    }
}
