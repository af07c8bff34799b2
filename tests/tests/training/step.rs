//! Whole runs of the trainer against the f64 oracle: across refreshes, the switch and the dense
//! finish.
//!
//! Masks and sampled indices must agree exactly, in the displaced runs too, so that no comparison
//! straddles a tie; all other values lie within the bound of `oracle::arithmetic`. Then each part
//! of the method is left out of the oracle, and the comparison must fail, first where that part
//! first acts.

use std::{collections::BTreeMap, num::NonZeroU32};

use sparse24_core::{MaskKind, mvue::Estimator, op::Activation, phase::Refresh};
use sparse24_tests::oracle::arithmetic::{Arithmetic, Matrix, Random, Tensors, bound, distance};
use sparse24_train::{
    method::{DgradOperand, GradientOperand, Method},
    model::Sparsify,
    nn::{BatchShape, Bias, NoWeightDecay, Prediction},
    optim::{MaskedDecay, UpdateRule},
    schedule::{Decay, GradientAccumulation, Schedule},
    trainer::{ParameterState, Recipe},
};

use super::{
    fixture::{self, Noise, STEPS, SWITCH, Validation},
    oracle::{
        fst::{Dgrad, Masks, Part, Pattern, Rules, Run, Sample, Samples},
        pass::parameters,
    },
    spy::{Sampled, spy},
};

/// Displaced runs.
const RUNS: u64 = 8;

/// Seeds that are tried until one has no draw and no mask near a tie.
const SEEDS: std::ops::Range<u64> = 1..40;

/// lambda: of the size of the gradients over the weights, so that it matters.
const LAMBDA: f32 = 2e-2;

const FST: Rules = Rules {
    pattern: Pattern::Transposable,
    dgrad: Dgrad::Pruned,
    sample: Sample::Mvue,
    decay: MaskedDecay::OnGradients(LAMBDA),
    interval: fixture::INTERVAL,
    switch: SWITCH,
    dense_first: 0,
    without: None,
};

/// The outcome of a step.
#[derive(Debug, Clone)]
struct Record {
    /// In the order in which a step computes them; three per parameter.
    quantities: Vec<(String, Matrix)>,
    masks: Masks,
    samples: Samples,
}

fn number(value: f64) -> Matrix {
    Matrix::from_elem((1, 1), value)
}

/// Every step by the trainer.
fn trained(recipe: &Recipe, noise: Noise) -> Vec<Record> {
    let (backend, log) = spy();
    let mut trainer = fixture::trainer(backend, recipe);
    let validation = Validation::of(recipe);
    let mut records = Vec::new();
    for _ in 0..recipe.steps {
        let outcome = fixture::step(&mut trainer, &noise);
        let mut quantities = vec![
            ("loss".to_owned(), number(outcome.loss)),
            ("norm".to_owned(), number(f64::from(outcome.grad_norm))),
            ("learning rate".to_owned(), number(f64::from(outcome.learning_rate))),
        ];
        let mut masks = Masks::new();
        for state in fixture::states(&mut trainer) {
            for (what, values) in
                [("m", &state.first_moment), ("v", &state.second_moment), ("w", &state.weight)]
            {
                // A rule without a second moment leaves the oracle's at zero.
                let elements = state.shape[0] * state.shape[1];
                let zeros = std::iter::repeat_n(0.0, elements - values.len());
                let values = values.iter().map(|&x| f64::from(x)).chain(zeros).collect();
                quantities.push((
                    format!("{what} of {}", state.name),
                    Matrix::from_shape_vec(state.shape, values).expect("its shape"),
                ));
            }
            if let Some(mask) = state.mask {
                let [rows, columns] = state.shape;
                masks.insert(
                    state.name,
                    (0..rows * columns).map(|at| mask.keeps(at / columns, at % columns)).collect(),
                );
            }
        }
        let loss = fixture::evaluate(&mut trainer, &validation);
        quantities.push(("validation loss".to_owned(), number(loss)));
        let samples =
            log.lock().expect("the trainer is done with it").samples.drain(..).map(place).collect();
        records.push(Record { quantities, masks, samples });
    }
    records
}

/// Which elements of a sample are not zero. Elements 2^20 below the largest count as zero: where a
/// query sees one key alone, its gradient is zero in exact arithmetic and rounding noise in f32.
fn kept(sampled: &Matrix) -> Vec<bool> {
    let largest = sampled.iter().fold(0.0_f64, |largest, x| largest.max(x.abs()));
    sampled.iter().map(|x| x.abs() > largest / f64::from(1 << 20)).collect()
}

fn place(sampled: Sampled) -> ((u32, u32), Matrix) {
    assert_eq!(sampled.site >> 24, 4, "the purpose of MVUE");
    ((sampled.micro_step, sampled.site & 0xff_ffff), sampled.values.map(|&x| f64::from(x)))
}

/// Every step by the oracle.
fn computed(recipe: &Recipe, rules: Rules, arithmetic: Arithmetic) -> Vec<Record> {
    let (noise, validation) = (Noise::of(recipe), Validation::of(recipe));
    let spec = &recipe.model;
    let mut weights = Tensors::new();
    for ((name, shape), (_, values)) in parameters(spec).into_iter().zip(fixture::weights(spec)) {
        weights.insert(
            name,
            Matrix::from_shape_vec(shape, values.into_iter().map(f64::from).collect())
                .expect("its shape"),
        );
    }
    let mut run = Run::new(recipe, rules, weights, arithmetic);
    run.orders = orders(recipe);
    let mut records = Vec::new();
    for step in 1..=recipe.steps {
        let micro_steps = 0..recipe.gradient_accumulation.of(step);
        let batches: Vec<_> = micro_steps.map(|micro_step| noise.batch(step, micro_step)).collect();
        let outcome = run.train(&batches);
        let mut quantities = vec![
            ("loss".to_owned(), number(outcome.loss)),
            ("norm".to_owned(), number(outcome.norm)),
            ("learning rate".to_owned(), number(outcome.learning_rate)),
        ];
        for (name, _) in parameters(spec) {
            for (what, values) in
                [("m", &run.first_moments), ("v", &run.second_moments), ("w", &run.weights)]
            {
                quantities.push((format!("{what} of {name}"), values[&name].clone()));
            }
        }
        quantities.push(("validation loss".to_owned(), number(run.evaluate(&validation.all))));
        let masks = if step > rules.dense_first && step <= rules.switch {
            run.masks.clone()
        } else {
            Masks::new()
        };
        records.push(Record { quantities, masks, samples: outcome.samples });
    }
    records
}

/// A quantity that lies further from the oracle than its bound.
#[derive(Debug, PartialEq)]
struct Difference {
    step: usize,
    quantity: String,
    /// Distance over bound.
    ratio: f64,
}

/// The bound of every quantity after every step.
type Bounds = Vec<Vec<f64>>;

/// The first difference; none, and the largest ratio, if all is within the bounds.
fn compare(found: &[Record], expected: &[Record], bounds: &Bounds) -> Result<f64, Difference> {
    let mut largest = 0.0_f64;
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (at, ((name, found), (expected_name, expected))) in
            found.quantities.iter().zip(&expected.quantities).enumerate()
        {
            assert_eq!(name, expected_name);
            let (bound, distance) = (bounds[step][at], distance(expected, found.iter().copied()));
            if distance <= bound {
                largest = largest.max(if bound > 0.0 { distance / bound } else { 0.0 });
            } else {
                return Err(Difference {
                    step: step + 1,
                    quantity: name.clone(),
                    ratio: distance / bound,
                });
            }
        }
    }
    Ok(largest)
}

/// Whether masks and samples agree; if not, where they do not.
fn same_choices(found: &[Record], expected: &[Record]) -> Result<(), String> {
    for (step, (found, expected)) in (1..).zip(found.iter().zip(expected)) {
        if found.masks != expected.masks {
            return Err(format!("the masks after step {step} differ"));
        }
        if !found.samples.keys().eq(expected.samples.keys()) {
            return Err(format!("step {step} samples other weights"));
        }
        let differs =
            |place: &&(u32, u32)| kept(&found.samples[*place]) != kept(&expected.samples[*place]);
        if let Some(place) = expected.samples.keys().find(differs) {
            return Err(format!("the samples {place:?} of step {step} differ"));
        }
    }
    Ok(())
}

/// The first seed for which every displaced run makes the choices of the exact one, with these
/// runs: rounding then decides no mask and no draw, with a margin of one standard deviation of the
/// f32 error in each of the runs.
fn seeded(recipe: &Recipe, rules: Rules) -> (Recipe, Vec<Record>, Vec<Vec<Record>>) {
    for seed in SEEDS {
        let recipe = Recipe { seed, ..recipe.clone() };
        let expected = computed(&recipe, rules, Arithmetic::Exact);
        let displaced: Option<Vec<_>> = (0..RUNS)
            .map(|run| computed(&recipe, rules, Arithmetic::Displaced(Random(run))))
            .map(|run| same_choices(&run, &expected).is_ok().then_some(run))
            .collect();
        if let Some(displaced) = displaced {
            return (recipe, expected, displaced);
        }
    }
    panic!("every seed of {SEEDS:?} has a choice near a tie");
}

/// Compares a run of the trainer with the oracle's; returns the recipe with its seed, the run, and
/// the bounds within which it agrees.
fn check(recipe: &Recipe, rules: Rules) -> (Recipe, Vec<Record>, Bounds) {
    let (recipe, expected, displaced) = seeded(recipe, rules);
    let found = trained(&recipe, Noise::of(&recipe));
    same_choices(&found, &expected).expect("the trainer chooses like the oracle");
    let of_step = |(step, record): (usize, &Record)| -> Vec<f64> {
        let quantities = record.quantities.iter().enumerate();
        quantities
            .map(|(at, (_, expected))| {
                bound(expected, displaced.iter().map(|run| &run[step].quantities[at].1))
            })
            .collect()
    };
    let bounds = expected.iter().enumerate().map(of_step).collect();
    let ratio =
        compare(&found, &expected, &bounds).unwrap_or_else(|difference| panic!("{difference:?}"));
    println!("seed {}: largest distance {ratio:.3} of its bound", recipe.seed);
    (recipe, found, bounds)
}

/// Fails unless other rules differ from the run first in this step and quantity.
fn assert_shows(
    (recipe, found, bounds): &(Recipe, Vec<Record>, Bounds),
    rules: Rules,
    step: usize,
    quantity: &str,
) -> f64 {
    let other = computed(recipe, rules, Arithmetic::Exact);
    let Err(difference) = compare(found, &other, bounds) else {
        panic!("{rules:?} do not show");
    };
    assert_eq!((difference.step, difference.quantity.as_str()), (step, quantity), "{rules:?}");
    difference.ratio
}

/// Compares dense training and FST; then fails unless each part of the method shows where it first
/// acts: in the moment of the first weight that decays, in the first parameter, or in the losses,
/// as these other parts do.
fn check_parts(recipe: &Recipe, decayed: &str, first: &str, others: &[Part]) {
    check(&Recipe { method: Method::dense(), ..recipe.clone() }, Rules { switch: 0, ..FST });
    assert_parts(&check(recipe, FST), decayed, first, others);
}

/// The smallest distance over bound of a run without one part.
fn assert_parts(
    checked: &(Recipe, Vec<Record>, Bounds),
    decayed: &str,
    first: &str,
    others: &[Part],
) -> f64 {
    let [decayed, clipped] = [decayed, first].map(|name| format!("m of {name}"));
    let updated = format!("w of {first}");
    let parts = [
        (Part::Mask, 1, "loss"),
        (Part::Mvue, 1, "norm"),
        (Part::Decay, 1, &decayed),
        (Part::Refresh, 4, "validation loss"),
        (Part::Switch, 11, "loss"),
        (Part::Clipping, 1, &clipped),
        (Part::WeightDecay, 1, &updated),
        (Part::Dropout, 1, "loss"),
    ];
    let others = others.iter().map(|&part| (part, 1, "loss"));
    let ratios = parts.into_iter().chain(others).map(|(part, step, quantity)| {
        assert_shows(checked, Rules { without: Some(part), ..FST }, step, quantity)
    });
    ratios.fold(f64::INFINITY, f64::min)
}

/// Gated, without biases, every linear layer sparse, with dropout, and 20 tokens, a multiple of
/// four but not of sixteen.
#[test]
fn fst_everywhere_with_dropout_as_in_f64() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    fixture::change(&mut recipe, |spec| {
        (spec.activation, spec.bias) = (Activation::Swiglu, Bias::Absent);
        spec.sparsify = Sparsify::FfnAndAttention;
    });
    (recipe.dropout, recipe.batch) = (0.25, BatchShape { size: 4, sequence_length: 5 });
    check(&recipe, FST);
}

#[test]
fn the_approximate_estimator_as_in_f64() {
    let mut method = fixture::fst(LAMBDA);
    method.phases[0].wgrad = GradientOperand::Mvue(Estimator::Approximate);
    let mut recipe = fixture::recipe(method);
    fixture::change(&mut recipe, |spec| spec.activation = Activation::Geglu);
    check(&recipe, Rules { sample: Sample::Approximate, ..FST });
}

/// The orders of rows of a run, by parameter, if it has them.
fn orders(recipe: &Recipe) -> BTreeMap<String, Vec<usize>> {
    let states = fixture::states(&mut fixture::start(recipe));
    let order = |state: ParameterState| {
        Some((state.name, state.row_order?.into_iter().map(|row| row as usize).collect()))
    };
    states.into_iter().filter_map(order).collect()
}

/// Row-wise masks searched after every step, no dense finish.
const ROW_WISE: Rules = Rules {
    pattern: Pattern::RowWise,
    dgrad: Dgrad::Pruned,
    sample: Sample::All,
    decay: MaskedDecay::None,
    interval: 1,
    switch: STEPS,
    dense_first: 0,
    without: None,
};

fn preset(name: &str, lambda: f32) -> Recipe {
    fixture::recipe(Method::preset(name, lambda).expect("a preset"))
}

/// The recipe with another schedule.
fn decaying(recipe: Recipe, decay: Decay) -> Recipe {
    Recipe { schedule: Schedule { decay, ..recipe.schedule }, ..recipe }
}

/// Adam with L2 regularization under an inverse square root, and SGD under a triangle with a batch
/// that grows from one micro-batch to three; all parameters decay, or matrices alone.
#[test]
fn optimizers_and_growing_batches_as_in_f64() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    let adam = recipe.optimizer.rule.adam().expect("the fixture has AdamW");
    recipe.optimizer.rule = UpdateRule::Adam(adam);
    recipe.no_weight_decay = NoWeightDecay::VectorsAndEmbeddings;
    recipe.schedule = Schedule { warmup_start: 1e-2, ..recipe.schedule };
    let checked = check(&decaying(recipe.clone(), Decay::InverseSqrt), FST);
    assert_shows(&checked, Rules { decay: MaskedDecay::OnWeights(LAMBDA), ..FST }, 1, DECAYED);
    recipe.optimizer.rule = UpdateRule::Sgd { momentum: 0.75 };
    recipe.no_weight_decay = NoWeightDecay::None;
    let [first, last] = [1, 3].map(|count| NonZeroU32::new(count).expect("not zero"));
    recipe.gradient_accumulation = GradientAccumulation { first, last, steps: STEPS };
    let checked = check(&decaying(recipe, Decay::Triangle), FST);
    let clipped = Rules { without: Some(Part::Clipping), ..FST };
    assert_shows(&checked, clipped, 1, "m of wte.weight");
}

/// The first weight that masked decay reaches.
const DECAYED: &str = "m of h.0.mlp.c_fc.weight";

/// SR-STE with a dense dgrad.
#[test]
fn row_wise_masks_with_decay_on_weights_as_in_f64() {
    let phase =
        fixture::phase(Some(MaskKind::RowWise), DgradOperand::Dense, GradientOperand::Dense);
    let method = Method {
        refresh: Refresh::EachStep,
        decay: MaskedDecay::OnWeights(2.0),
        phases: vec![phase],
        ..Method::fst(0.0)
    };
    check(
        &fixture::recipe(method),
        Rules { dgrad: Dgrad::Dense, decay: MaskedDecay::OnWeights(2.0), ..ROW_WISE },
    );
}

#[test]
fn ste_and_sr_ste_as_in_f64() {
    check(&decaying(preset("ste-row-wise", 0.0), Decay::Linear), ROW_WISE);
    let rules = Rules { decay: FST.decay, ..ROW_WISE };
    let checked = check(&decaying(preset("sr-ste", LAMBDA), Decay::Wsd), rules);
    assert_shows(&checked, Rules { dgrad: Dgrad::Dense, ..rules }, 1, "norm");
}

/// Transposable masks that are not refreshed within the run; no decay, no sampling.
#[test]
fn transposable_ste_as_in_f64() {
    let rules = Rules { pattern: Pattern::Transposable, interval: 40, ..ROW_WISE };
    let checked = check(&preset("ste", 0.0), rules);
    assert_shows(&checked, Rules { pattern: Pattern::RowWise, ..rules }, 1, "loss");
}

/// Dense, with a variance that settles in the middle of the run at the latest, then frozen.
#[test]
fn step_as_in_f64() {
    let half = STEPS / 2;
    let checked = check(&preset("step", 0.0), Rules { dense_first: half, ..ROW_WISE });
    let earlier = Rules { dense_first: half - 1, ..ROW_WISE };
    assert_shows(&checked, earlier, half as usize, "loss");
}

#[test]
fn bi_mask_as_in_f64() {
    let rules = Rules { dgrad: Dgrad::Permuted, decay: FST.decay, ..ROW_WISE };
    let checked = check(&preset("bi-mask", LAMBDA), rules);
    assert_shows(&checked, Rules { dgrad: Dgrad::Pruned, ..rules }, 1, "norm");
}

#[test]
fn s_ste_as_in_f64() {
    let rules = Rules { pattern: Pattern::Soft, sample: Sample::Mvue, ..ROW_WISE };
    let checked = check(&preset("s-ste", 0.0), rules);
    assert_shows(&checked, Rules { pattern: Pattern::RowWise, ..rules }, 1, "loss");
}

/// Post-LN, segments, padding, and a head that reads the rows with a target.
#[test]
fn bert_as_in_f64() {
    let everywhere = |method, activation| {
        let mut recipe = fixture::recipe(method);
        fixture::change(&mut recipe, |spec| {
            (spec.activation, spec.sparsify) = (activation, Sparsify::FfnAndAttention);
        });
        recipe.dropout = 0.25;
        fixture::bert(recipe)
    };
    check(&everywhere(Method::dense(), Activation::Gelu), Rules { switch: 0, ..FST });
    check(&everywhere(fixture::fst(LAMBDA), Activation::GeluErf), FST);
    let sr_ste = Method::preset("sr-ste", LAMBDA).expect("a preset");
    check(&everywhere(sr_ste, Activation::GeluErf), Rules { decay: FST.decay, ..ROW_WISE });
}

/// Pre-LN, sinusoidal positions with a learned factor, padding, a gate, and a head that reads the
/// rows with a target. Each part of the method shows.
#[test]
fn crammed_bert_as_in_f64() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    fixture::change(&mut recipe, |spec| spec.activation = Activation::Geglu);
    recipe.dropout = 0.25;
    let decayed = "layers.0.ffn.dense_in.weight";
    let recipe = fixture::crammed_bert(recipe);
    check_parts(&recipe, decayed, "embedding.word_embedding.weight", &[]);
}

/// Patches, a class token, whole images that skip a half block, and two smoothed targets. Each part
/// of the method shows.
#[test]
fn deit_as_in_f64() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    fixture::change(&mut recipe, |spec| spec.activation = Activation::GeluErf);
    recipe.dropout = 0.25;
    // Steps that are large enough for a refresh to change masks.
    recipe.schedule.peak *= 4.0;
    let others = [Part::DropPath, Part::Smoothing, Part::Mixing];
    let (decayed, first) = ("blocks.0.mlp.fc1.weight", "patch_embed.proj.weight");
    check_parts(&fixture::deit(recipe), decayed, first, &others);
}

/// An encoder and a decoder, padding of both, one table that is used three times, label smoothing
/// and Adam. Each part of the method shows.
#[test]
fn transformer_as_in_f64() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    fixture::change(&mut recipe, |spec| spec.activation = Activation::Gelu);
    recipe.dropout = 0.25;
    let mut everywhere = recipe.clone();
    fixture::change(&mut everywhere, |spec| {
        (spec.layers, spec.sparsify) = (1, Sparsify::FfnAndAttention);
    });
    check(&fixture::transformer(everywhere), FST);
    let (decayed, first) = ("encoder.layers.0.fc1.weight", "encoder.embed_tokens.weight");
    check_parts(&fixture::transformer(recipe), decayed, first, &[Part::Smoothing]);
}

/// A pooler, dropout, and outputs of one row of each sequence; the token table has no head.
#[test]
fn fine_tuning_as_in_f64() {
    for prediction in [Prediction::Class(3), Prediction::Value, Prediction::Span] {
        let mut recipe = fixture::recipe(Method::dense());
        fixture::change(&mut recipe, |spec| spec.prediction = Some(prediction));
        recipe.dropout = 0.25;
        check(&fixture::bert(recipe.clone()), Rules { switch: 0, ..FST });
        check(&fixture::crammed_bert(recipe.clone()), Rules { switch: 0, ..FST });
        check(&recipe, Rules { switch: 0, ..FST });
        recipe.method = fixture::fst(LAMBDA);
        check(&recipe, FST);
    }
}

/// Two micro-batches of six sequences are one batch of twelve: both lie within the bounds of one
/// oracle, so within twice them of each other.
#[test]
fn gradient_accumulation_is_a_larger_batch() {
    let mut recipe = fixture::recipe(Method::dense());
    recipe.batch.size = 6;
    let (recipe, found, bounds) = check(&recipe, Rules { switch: 0, ..FST });
    let noise = Noise { joined: 2, ..Noise::of(&recipe) };
    let mut whole = recipe.clone();
    whole.batch.size = 12;
    whole.gradient_accumulation = GradientAccumulation::constant(NonZeroU32::MIN);
    let twice = bounds
        .into_iter()
        .map(|bounds| bounds.into_iter().map(|bound| 2.0 * bound).collect())
        .collect();
    let mut joined = trained(&whole, noise);
    for (record, found) in joined.iter_mut().zip(&found) {
        // The validation set follows the batch size, so its loss differs.
        record.quantities.pop();
        record.quantities.extend(found.quantities.last().cloned());
    }
    assert!(compare(&joined, &found, &twice).is_ok());
}

/// With a part left out of the oracle, or another in its place, the comparison fails, first where
/// the part first acts, and far outside of the bound.
#[test]
fn every_part_of_the_method_shows() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    recipe.dropout = 0.25;
    let checked = check(&recipe, FST);
    let ratio = assert_parts(&checked, "h.0.mlp.c_fc.weight", "wte.weight", &[]);
    assert!(ratio >= 100.0, "only {ratio} bounds away");
    let others = [
        (Rules { dgrad: Dgrad::Dense, ..FST }, 1, "norm"),
        (Rules { pattern: Pattern::RowWise, ..FST }, 1, "loss"),
        (Rules { sample: Sample::Approximate, ..FST }, 1, "norm"),
        (Rules { decay: MaskedDecay::OnWeights(LAMBDA), ..FST }, 1, DECAYED),
        (Rules { switch: SWITCH - 1, ..FST }, 10, "loss"),
    ];
    for (rules, step, quantity) in others {
        let ratio = assert_shows(&checked, rules, step, quantity);
        assert!(ratio >= 100.0, "{rules:?}: only {ratio} bounds away");
    }
}
