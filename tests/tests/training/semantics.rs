//! The trainer's promises about masks, phases, schedules, flips and failures.

use std::num::NonZeroU32;

use ndarray::ArrayView2;
use sparse24_core::{
    Mask, MaskKind, flip::flip_count, phase::Fraction, philox::Philox4x32, search::mask_search,
};
use sparse24_train::{
    Error, ErrorKind,
    backend::{Capabilities, op::HeadLoss},
    method::{DgradOperand, GradientOperand, KeptValues, Method, Phase, Until, WeightOperand},
    model::{ActivationCheckpointing, Gpt2Spec, ModelSpec},
    nn::{BatchShape, Init, Prediction, Role},
    objective::{Batch, DataError, MaskedLm, Objective},
    optim::AdamVariant,
    schedule::{Decay, GradientAccumulation, Schedule},
    trainer::{FlipSampling, ParameterState, Recipe, Trainer, overall_flip_rate},
};

use super::{
    fixture::{self, INTERVAL, Noise, STEPS, SWITCH, Validation, bits, cpu, fst, gpt2, states},
    oracle::fst::sparsified,
    spy::spy,
};

const LAMBDA: f32 = 2e-2;

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

/// Masks are searched in the initial weights and at refreshes, and weights pruned and gradients
/// sampled in sparse steps alone; dense training does none of it.
#[test]
fn sparse_work_is_done_only_when_it_is_due() {
    // Twice at step 0: in the initial weights, and in those that replaced them.
    let pruned: Vec<u32> = [0].into_iter().chain(0..=SWITCH).collect();
    let (fst, searched) = (fst(LAMBDA), [0, 0, INTERVAL, 2 * INTERVAL].as_slice());
    for (method, searched, pruned, samples) in
        [(fst, searched, &pruned[..], 2 * SWITCH), (Method::dense(), &[], &[], 0)]
    {
        let recipe = fixture::recipe(method);
        let (spy, log) = spy();
        let mut trainer = fixture::trainer(spy, &recipe);
        for _ in 0..STEPS {
            fixture::step(&mut trainer, &Noise::of(&recipe));
        }
        let log = log.lock().expect("the trainer is done with it");
        let layers = sparsified(&recipe.model).count();
        let in_layers =
            |steps: &[u32]| steps.iter().flat_map(|&step| vec![step; layers]).collect::<Vec<_>>();
        assert_eq!((&log.searches, &log.prunings), (&in_layers(searched), &in_layers(pruned)));
        assert_eq!(log.samples.len(), samples as usize * layers);
    }
}

/// In dense and sparse phases alike, flips compare masks searched in w_{t-1} and w_t, whatever the
/// refresh interval.
#[test]
fn flips_compare_consecutive_weights() {
    for method in [fst(LAMBDA), Method::dense()] {
        let recipe = fixture::recipe(method);
        let mut trainer = fixture::start(&recipe);
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
            let mut trainer = fixture::start(&recipe);
            fixture::step(&mut trainer, &noise);
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
                assert!(
                    bits(&mut trainer) == fixture::bits_of(bad.clone()),
                    "{name} {poison}: updated"
                );
            }
            // Nothing of it is left in the buffers.
            trainer.restore(1, &good).expect("the shapes are right");
            fixture::step(&mut trainer, &noise);
            let mut unharmed = fixture::start(&recipe);
            for _ in 0..2 {
                fixture::step(&mut unharmed, &noise);
            }
            let remembers = bits(&mut trainer) != bits(&mut unharmed);
            assert!(!remembers, "{name} {poison}: the run remembers the poison");
        }
    }
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

/// The first step from these weights stops before the update, with this explanation. Returns their
/// validation loss.
fn assert_stops(
    weights: &[(String, Vec<f32>)],
    objective: &dyn Objective,
    expected: &[&str],
) -> f64 {
    let recipe = fixture::recipe(Method::dense());
    let mut trainer = fixture::start(&recipe);
    fixture::start_from(&mut trainer, weights);
    let (loss, before) =
        (fixture::evaluate(&mut trainer, &Validation::of(&recipe)), bits(&mut trainer));
    let error = trainer.train_step(objective, FlipSampling::Skip).expect_err("not finite");
    let Error::NonFinite { step: 1, what } = &error else { panic!("{error}") };
    assert!(expected.iter().all(|part| what.contains(part)), "{error}");
    assert!(bits(&mut trainer) == before, "the weights were updated");
    loss
}

/// A gradient overflows while the loss is finite: LayerNorm almost cancels a scale that the weights
/// after it restore.
#[test]
fn an_overflowing_gradient_names_its_tensor() {
    let recipe = fixture::recipe(Method::dense());
    let large = [("h.1.ln_2", 1e-44), ("h.1.mlp.c_fc.weight", 3e38), ("ln_f.weight", 1e4)];
    let weights = weights_with(&recipe.model, &large);
    let loss = assert_stops(&weights, &Noise::of(&recipe), &["gradient", "h.1.ln_2.bias"]);
    assert!(loss.is_finite(), "the loss is {loss}");
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
        (vec![half, of(MaskKind::ColumnWise, dense)], "method.forward", "along its rows"),
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
    let crammed = fixture::crammed_bert(recipe).model.parameters().expect("4x4 tiles");
    let factor = crammed.iter().find(|spec| spec.name.ends_with("scale_factor")).expect("a factor");
    let root = Init::Constant(0.125_f64.sqrt() as f32);
    assert_eq!((factor.shape, factor.init, factor.role), ([1, 1], root, Role::Gain));
}

#[test]
fn the_learning_rate_rises_and_falls() {
    let schedule = Schedule {
        peak: 1.0,
        floor: 0.1,
        warmup_start: 0.0,
        warmup_steps: 4,
        decay_steps: 24,
        decay: Decay::Cosine,
        cooldown_steps: 1,
    };
    for (decay, cooldown_steps, middle) in [
        (Decay::Cosine, 1, 0.55),
        (Decay::Linear, 1, 0.55),
        (Decay::Wsd, 5, 1.0),
        (Decay::Wsd, 20, 0.55),
    ] {
        let schedule = Schedule { decay, cooldown_steps, ..schedule };
        let rates = [1, 4, 5, 15, 25, 26, 1000].map(|step| schedule.learning_rate(step, 0.0));
        assert_eq!(rates, [0.2, 0.8, 1.0, middle, 0.1, 0.1, 0.1], "{decay:?}");
    }
    let schedule = Schedule { floor: 0.0, decay: Decay::InverseSqrt, ..schedule };
    let rates = [1, 4, 5, 17, 65].map(|step| schedule.learning_rate(step, 0.0));
    assert_eq!(rates, [0.2, 0.8, 1.0, 0.5, 0.25]);
    let rates = [1, 3, 5, 17]
        .map(|step| Schedule { warmup_start: 0.5, ..schedule }.learning_rate(step, 0.0));
    assert_eq!(rates, [0.5, 0.75, 1.0, 0.5]);
    let schedule = Schedule { decay: Decay::Triangle, warmup_steps: 0, ..schedule };
    let rates = [0.0, 0.25, 0.75, 0.875, 1.0].map(|x| schedule.learning_rate(99, x));
    assert_eq!(rates, [0.25, 0.5, 1.0, 0.5, 0.0]);
}

/// The schedule of `bert-crammed`: 38,049 steps of 1 to 32 micro-batches, with M = 300,005 by its
/// formula, and the last sixth of the micro-batches dense.
#[test]
fn growing_batches_are_a_function_of_the_step() {
    let [first, last] = [1, 32].map(|count| NonZeroU32::new(count).expect("not zero"));
    let growing = GradientAccumulation { first, last, steps: 38_049 };
    let mut before = 0_u64;
    for step in 1..=growing.steps {
        assert_eq!(growing.before(step), before, "step {step}");
        let size = growing.of(step);
        assert_eq!(u64::from(size), (1 + before * 32 / 300_005).min(32), "step {step}");
        before += u64::from(size);
    }
    assert_eq!(before, 299_946);
    let sparse = growing.share_of_steps(Fraction::FIVE_SIXTHS);
    let switch = sparse.of(growing.steps);
    let [within, beyond] = [1, 2].map(|more| 6 * growing.before(switch + more));
    assert!(within <= 5 * before && 5 * before < beyond, "{switch} steps are sparse");
    assert_eq!(growing.share_of_steps(Fraction::ONE), Fraction::ONE);
    let constant = GradientAccumulation::constant(last);
    assert_eq!(constant.share_of_steps(Fraction::FIVE_SIXTHS), Fraction::FIVE_SIXTHS);
}

#[test]
fn recipes_and_batches_that_do_not_fit_are_refused() {
    let recipe = fixture::recipe(Method::dense());
    let shaped = |change: &dyn Fn(&mut Gpt2Spec)| {
        let mut recipe = recipe.clone();
        fixture::change(&mut recipe, change);
        recipe
    };
    let shape = recipe.batch;
    for (recipe, expected) in [
        (shaped(&|spec| spec.heads = 0), "model.heads: expected at least 1"),
        (shaped(&|spec| spec.heads = 3), "model.heads: expected a divisor of model.d_model 8"),
        (shaped(&|spec| spec.d_model = 18), "model.d_model: expected a multiple of 4"),
        (shaped(&|spec| spec.d_ff = 0), "model.d_ff: expected a multiple of 4"),
        (shaped(&|spec| spec.vocabulary = 0), "the vocabulary: expected"),
        (shaped(&|spec| spec.sequence_length = 6), "model.sequence_length: expected at least 1"),
        (Recipe { batch: BatchShape { size: 0, ..shape }, ..recipe.clone() }, "batch.size: "),
        (Recipe { dropout: 2.0, ..recipe.clone() }, "model.dropout: expected a number in [0, 1)"),
    ] {
        let error = recipe.check(&Capabilities::unlimited("cpu")).expect_err("not trainable");
        assert!(error.to_string().starts_with(expected), "{error}");
    }

    type Change = fn(&mut Batch);
    let images_for_tokens: Change = |batch| {
        batch.tokens.clear();
        batch.pixels.push(0.0);
    };
    let gpt2: fn(Recipe) -> Recipe = |recipe| recipe;
    let cases: [(_, Change); 21] = [
        (gpt2, |batch| batch.clear()),
        (gpt2, |batch| batch.tokens.truncate(14)),
        (gpt2, |batch| batch.targets.push(0)),
        (gpt2, |batch| batch.lengths.push(7)),
        (gpt2, |batch| batch.counted -= 1),
        (gpt2, images_for_tokens),
        (gpt2, |batch| batch.source.clone_from(&batch.tokens)),
        (gpt2, |batch| batch.segments.resize(batch.tokens.len(), 0)),
        (gpt2, mixed),
        (gpt2, |batch| shape_of_nothing(batch, 3)),
        (gpt2, |batch| shape_of_nothing(batch, usize::MAX)),
        (fixture::bert, images_for_tokens),
        (fixture::bert, |batch| {
            batch.lengths.clear();
            batch.shape = Some(BatchShape { size: 21, sequence_length: 1 });
        }),
        (fixture::bert, mixed),
        (fixture::crammed_bert, images_for_tokens),
        (fixture::crammed_bert, |batch| batch.segments.resize(batch.tokens.len(), 0)),
        (fixture::deit, |batch| batch.segments.resize(batch.targets.len(), 0)),
        (fixture::transformer, |batch| batch.source.clear()),
        (fixture::deit, |batch| batch.pixels.clear()),
        (fixture::deit, |batch| {
            let (size, sequence_length) = (3, batch.targets.len() / 3 - 1);
            batch.shape = Some(BatchShape { size, sequence_length });
            batch.targets.truncate(size * sequence_length);
            batch.lengths.clear();
        }),
        (fixture::deit, |batch| batch.tokens.resize(batch.targets.len(), 0)),
    ];
    for (case, (of, change)) in cases.into_iter().enumerate() {
        let recipe = of(recipe.clone());
        let (mut trainer, noise) = (fixture::start(&recipe), Noise::of(&recipe));
        let before = bits(&mut trainer);
        let refused = trainer.train_step(&Changed { noise, change }, FlipSampling::Skip);
        let error = refused.expect_err("no batch");
        assert!(matches!(error, Error::Operand { operation: "batch", .. }), "{case}: {error}");
        assert!(bits(&mut trainer) == before, "{case}: the weights were updated");
        fixture::step(&mut trainer, &noise);
    }
}

fn mixed(batch: &mut Batch) {
    batch.second_targets.resize(3, 0);
    batch.shares.resize(3, 0.5);
}

fn shape_of_nothing(batch: &mut Batch, size: usize) {
    batch.clear();
    batch.shape = Some(BatchShape { size, sequence_length: 0 });
}

/// Batches of another shape.
struct Changed {
    noise: Noise,
    change: fn(&mut Batch),
}

impl Objective for Changed {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        self.noise.fill(step, micro_step, batch)?;
        (self.change)(batch);
        Ok(())
    }
}

/// Also after a batch with padding.
#[test]
fn a_batch_without_lengths_has_no_padding() {
    let mut spans = fixture::recipe(fst(LAMBDA));
    fixture::change(&mut spans, |spec| spec.prediction = Some(Prediction::Span));
    let recipe = fixture::recipe(fst(LAMBDA));
    for recipe in [
        fixture::bert(recipe.clone()),
        fixture::crammed_bert(recipe.clone()),
        fixture::transformer(recipe),
        fixture::bert(spans.clone()),
        spans,
    ] {
        let noise = Noise::of(&recipe);
        let run = |change: fn(&mut Batch)| {
            let mut trainer = fixture::start(&recipe);
            fixture::step(&mut trainer, &noise);
            fixture::step(&mut trainer, &Changed { noise, change });
            bits(&mut trainer)
        };
        let whole = run(|batch| batch.lengths = vec![7; 3]);
        assert!(run(|batch| batch.lengths.clear()) == whole, "{:?}", recipe.model);
    }
}

/// Images that are not finite, of which there is no second micro-batch.
struct Poisoned(Noise);

impl Objective for Poisoned {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        self.0.fill(step, micro_step, batch)?;
        batch.pixels.fill(f32::NAN);
        if micro_step == 0 { Ok(()) } else { Err("no data".into()) }
    }
}

/// A step reports its own values, not those of passes that were abandoned or only looked at.
#[test]
fn a_step_after_poisoned_passes_is_finite() {
    let recipe = fixture::deit(fixture::recipe(fst(LAMBDA)));
    let noise = Noise::of(&recipe);
    for pass in [
        (|trainer, poisoned| {
            trainer.train_step(poisoned, FlipSampling::Skip).expect_err("no data");
        }) as fn(&mut Trainer, &Poisoned),
        |trainer, poisoned| drop(trainer.gradient_noise(poisoned).expect("one micro-batch")),
        |trainer, poisoned| trainer.time_plans(poisoned).expect("one micro-batch"),
    ] {
        let [mut trainer, mut unharmed] = [(); 2].map(|()| fixture::start(&recipe));
        pass(&mut trainer, &Poisoned(noise));
        fixture::step(&mut trainer, &noise);
        fixture::step(&mut unharmed, &noise);
        assert!(bits(&mut trainer) == bits(&mut unharmed));
    }
}

#[test]
fn special_tokens_and_padding_are_never_targets() {
    let rule = MaskedLm {
        seed: 1,
        probability: 0.5,
        mask_token: 4,
        vocabulary: 9,
        special_tokens: vec![0, 3, 4],
    };
    let tokens: Vec<u32> = (0..640).map(|i| i % 9).collect();
    let mut batch = Batch::default();
    batch.tokens.clone_from(&tokens);
    batch.lengths.resize(40, 12);
    rule.mask(1, 0, 16, &mut batch);
    let mut counts = [0; 4];
    for (i, (&target, (&before, &after))) in
        (0..).zip(batch.targets.iter().zip(tokens.iter().zip(&batch.tokens)))
    {
        if target == HeadLoss::IGNORE {
            assert_eq!(before, after, "token {i} changed");
            continue;
        }
        assert_eq!(target, before, "token {i}");
        assert!(i % 16 < 12 && !rule.special_tokens.contains(&before), "token {i}");
        counts[0] += 1;
        counts[1] += usize::from(after == 4);
        counts[2] += usize::from(after == before);
        counts[3] += usize::from(after != before && after != 4);
    }
    // Of 320 tokens half, and of these 80 %, 10 % and 10 %.
    assert_eq!(counts[0], batch.counted);
    let [all, masked, same, random] = counts;
    assert!((120..200).contains(&all) && (90..160).contains(&masked), "{counts:?}");
    assert!(same > 0 && random > 0, "{counts:?}");
}
