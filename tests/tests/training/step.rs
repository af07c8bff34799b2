//! Whole runs of the trainer against the f64 oracle: across refreshes, the switch and the dense
//! finish.
//!
//! Masks and sampled indices must agree exactly, in the displaced runs too, so that no comparison
//! straddles a tie; everything else lies within the bound of `oracle::arithmetic`. Then each part
//! of the method is left out of the oracle, which must show, and where it should.

use std::{collections::BTreeMap, num::NonZeroU32};

use sparse24_core::{MaskKind, mvue::Estimator, phase::Refresh};
use sparse24_train::{
    backend::{Activation, Arithmetic as Operands, cpu::CpuBackend},
    method::{DgradOperand, GradientOperand, Method},
    model::gpt2::{BatchShape, Sparsify},
    nn::linear24::Bias,
    optim::MaskedDecay,
    trainer::{FlipSampling, ParameterState, Recipe},
};

use super::{
    fixture::{self, HeldOut, Noise, STEPS, SWITCH},
    oracle::{
        arithmetic::{Arithmetic, Matrix, Random, Tensors, bound, distance},
        fst::{Decay, Dgrad, Masks, Part, Pattern, Rules, Run, Sample, Samples},
    },
    spy::{Sampled, Spy},
};

/// Displaced runs.
const RUNS: u64 = 8;

/// lambda: as large as the gradients over the weights, so that it matters.
const LAMBDA: f32 = 2e-2;

const FST: Rules = Rules {
    pattern: Pattern::Transposable,
    dgrad: Dgrad::Pruned,
    sample: Sample::Mvue,
    decay: Decay::OnGradients(LAMBDA as f64),
    interval: fixture::INTERVAL,
    switch: SWITCH,
    dense_first: 0,
    without: None,
};

/// What is known after a step.
#[derive(Debug, Clone)]
struct Record {
    /// In the order in which a step makes them; three a parameter.
    quantities: Vec<(String, Matrix)>,
    masks: Masks,
    samples: Samples,
}

fn number(value: f64) -> Matrix {
    Matrix::from_elem((1, 1), value)
}

/// Every step by the trainer.
fn trained(recipe: &Recipe, noise: Noise) -> Vec<Record> {
    let (backend, log) = Spy::new(CpuBackend::new(Operands::F32));
    let mut trainer = fixture::trainer(backend, recipe);
    let held_out = HeldOut::of(recipe);
    let mut records = Vec::new();
    for _ in 0..recipe.steps {
        let outcome = trainer.train_step(&noise, FlipSampling::Skip).expect("finite");
        let mut quantities = vec![
            ("loss".to_owned(), number(outcome.loss)),
            ("norm".to_owned(), number(f64::from(outcome.grad_norm))),
            ("learning rate".to_owned(), number(f64::from(outcome.learning_rate))),
        ];
        let mut masks = Masks::new();
        for state in trainer.parameter_states().expect("downloads") {
            for (what, values) in
                [("m", &state.first_moment), ("v", &state.second_moment), ("w", &state.weight)]
            {
                let values = values.iter().map(|&x| f64::from(x)).collect();
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
        quantities.push((
            "held-out loss".to_owned(),
            number(trainer.evaluate(&held_out).expect("finite")),
        ));
        let samples =
            log.lock().expect("the trainer is done with it").samples.drain(..).map(place).collect();
        records.push(Record { quantities, masks, samples });
    }
    records
}

/// Which elements of a sample are not zero. Zero is what lies 2^20 below the greatest: where a
/// query sees one key alone its gradient is zero in exact arithmetic, and rounding noise in any
/// other.
fn kept(sampled: &Matrix) -> Vec<bool> {
    let greatest = sampled.iter().fold(0.0_f64, |greatest, x| greatest.max(x.abs()));
    sampled.iter().map(|x| x.abs() > greatest / f64::from(1 << 20)).collect()
}

fn place(sampled: Sampled) -> ((u32, u32), Matrix) {
    assert_eq!(sampled.site >> 24, 4, "the purpose of MVUE");
    ((sampled.micro_step, sampled.site & 0xff_ffff), sampled.values.map(|&x| f64::from(x)))
}

/// Every step by the oracle.
fn computed(recipe: &Recipe, rules: Rules, arithmetic: Arithmetic) -> Vec<Record> {
    let (noise, held_out) = (Noise::of(recipe), HeldOut::of(recipe));
    let mut weights = Tensors::new();
    for ((name, shape), (_, values)) in super::oracle::gpt2::parameters(&recipe.model)
        .into_iter()
        .zip(fixture::weights(&recipe.model))
    {
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
        let batches: Vec<_> = (0..recipe.accumulation.get())
            .map(|micro_step| noise.batch(step, micro_step))
            .collect();
        let outcome = run.train(&batches);
        let mut quantities = vec![
            ("loss".to_owned(), number(outcome.loss)),
            ("norm".to_owned(), number(outcome.norm)),
            ("learning rate".to_owned(), number(outcome.learning_rate)),
        ];
        for (name, _) in super::oracle::gpt2::parameters(&recipe.model) {
            for (what, values) in
                [("m", &run.first_moments), ("v", &run.second_moments), ("w", &run.weights)]
            {
                quantities.push((format!("{what} of {name}"), values[&name].clone()));
            }
        }
        quantities.push((
            "held-out loss".to_owned(),
            number(run.evaluate(&held_out.inputs, &held_out.targets)),
        ));
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

/// The first difference; none, and the greatest ratio, if all is within the bounds.
fn compare(found: &[Record], expected: &[Record], bounds: &Bounds) -> Result<f64, Difference> {
    let mut greatest = 0.0_f64;
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (at, ((name, found), (expected_name, expected))) in
            found.quantities.iter().zip(&expected.quantities).enumerate()
        {
            assert_eq!(name, expected_name);
            let (bound, distance) = (bounds[step][at], distance(expected, found.iter().copied()));
            if distance <= bound {
                greatest = greatest.max(if bound > 0.0 { distance / bound } else { 0.0 });
            } else {
                return Err(Difference {
                    step: step + 1,
                    quantity: name.clone(),
                    ratio: distance / bound,
                });
            }
        }
    }
    Ok(greatest)
}

fn assert_same_choices(what: &str, found: &[Record], expected: &[Record]) {
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.masks == expected.masks, "{what}: the masks after step {} differ", step + 1);
        assert!(
            found.samples.keys().eq(expected.samples.keys()),
            "{what}: step {} samples other weights",
            step + 1
        );
        for (place, sampled) in &expected.samples {
            assert!(
                kept(&found.samples[place]) == kept(sampled),
                "{what}: the samples {place:?} of step {} differ",
                step + 1
            );
        }
    }
}

/// The trainer's run, and the bounds within which it agrees with the oracle's.
fn check(recipe: &Recipe, rules: Rules) -> (Vec<Record>, Bounds) {
    let found = trained(recipe, Noise::of(recipe));
    let expected = computed(recipe, rules, Arithmetic::Exact);
    let displaced: Vec<_> =
        (0..RUNS).map(|run| computed(recipe, rules, Arithmetic::Displaced(Random(run)))).collect();
    for run in &displaced {
        assert_same_choices("displaced", run, &expected);
    }
    assert_same_choices("the trainer", &found, &expected);
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
    println!("greatest distance: {ratio:.3} of its bound");
    (found, bounds)
}

#[test]
fn fst_as_in_f64() {
    check(&fixture::recipe(fixture::fst(LAMBDA)), FST);
}

/// Gated, without biases, every linear layer sparse, with dropout, and 20 tokens, which four
/// divides but not sixteen.
#[test]
fn fst_everywhere_with_dropout_as_in_f64() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    (recipe.model.activation, recipe.model.bias, recipe.model.sparsify) =
        (Activation::Swiglu, Bias::Absent, Sparsify::FfnAndAttention);
    (recipe.dropout, recipe.batch, recipe.seed) =
        (0.25, BatchShape { sequences: 4, context: 5 }, 8);
    check(&recipe, FST);
}

#[test]
fn the_approximate_estimator_as_in_f64() {
    let mut method = fixture::fst(LAMBDA);
    method.phases[0].wgrad = GradientOperand::Mvue(Estimator::Approximate);
    let mut recipe = fixture::recipe(method);
    (recipe.model.activation, recipe.seed) = (Activation::Geglu, 2);
    check(&recipe, Rules { sample: Sample::Approximate, ..FST });
}

/// Orders of rows, of a run that has them.
fn orders(recipe: &Recipe) -> BTreeMap<String, Vec<usize>> {
    let states = fixture::trainer(Box::new(CpuBackend::new(Operands::F32)), recipe)
        .parameter_states()
        .expect("downloads");
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
    decay: Decay::OnWeights(0.0),
    interval: 1,
    switch: STEPS,
    dense_first: 0,
    without: None,
};

fn preset(name: &str, lambda: f32) -> Recipe {
    fixture::recipe(Method::preset(name, lambda).expect("a preset"))
}

/// As SR-STE, but for a dense dgrad.
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
        Rules { dgrad: Dgrad::Dense, decay: Decay::OnWeights(2.0), ..ROW_WISE },
    );
}

#[test]
fn ste_and_sr_ste_as_in_f64() {
    check(&preset("ste-row-wise", 0.0), ROW_WISE);
    let rules = Rules { decay: FST.decay, ..ROW_WISE };
    let (found, bounds) = check(&preset("sr-ste", LAMBDA), rules);
    let other = computed(
        &preset("sr-ste", LAMBDA),
        Rules { dgrad: Dgrad::Dense, ..rules },
        Arithmetic::Exact,
    );
    let difference =
        compare(&found, &other, &bounds).expect_err("dgrad multiplies by the pruned weights");
    assert_eq!((difference.step, difference.quantity.as_str()), (1, "norm"));
}

/// Dense, with a variance that settles in the middle at the latest, then frozen.
#[test]
fn step_as_in_f64() {
    let recipe = preset("step", 0.0);
    let rules = Rules { dense_first: STEPS / 2, ..ROW_WISE };
    let (found, bounds) = check(&recipe, rules);
    let other = computed(&recipe, Rules { dense_first: STEPS / 2 - 1, ..rules }, Arithmetic::Exact);
    let difference = compare(&found, &other, &bounds).expect_err("a step earlier");
    assert_eq!((difference.step, difference.quantity.as_str()), (STEPS as usize / 2, "loss"));
}

#[test]
fn bi_mask_as_in_f64() {
    let recipe = preset("bi-mask", LAMBDA);
    let rules = Rules { dgrad: Dgrad::Permuted, decay: FST.decay, ..ROW_WISE };
    let (found, bounds) = check(&recipe, rules);
    let other = computed(&recipe, Rules { dgrad: Dgrad::Pruned, ..rules }, Arithmetic::Exact);
    let difference = compare(&found, &other, &bounds).expect_err("dgrad prunes once more");
    assert_eq!((difference.step, difference.quantity.as_str()), (1, "norm"));
}

#[test]
fn s_ste_as_in_f64() {
    let mut recipe = preset("s-ste", 0.0);
    // Of the fixture's own, the displaced runs draw otherwise next to a tie.
    recipe.seed += 3;
    let rules = Rules { pattern: Pattern::Soft, sample: Sample::Mvue, ..ROW_WISE };
    let (found, bounds) = check(&recipe, rules);
    let other = computed(&recipe, Rules { pattern: Pattern::RowWise, ..rules }, Arithmetic::Exact);
    let difference = compare(&found, &other, &bounds).expect_err("kept values are thresholded");
    assert_eq!((difference.step, difference.quantity.as_str()), (1, "loss"));
}

#[test]
fn dense_training_as_in_f64() {
    let mut recipe = fixture::recipe(Method::dense());
    (recipe.model.activation, recipe.dropout, recipe.accumulation) =
        (Activation::Geglu, 0.5, NonZeroU32::MIN);
    check(&recipe, Rules { switch: 0, ..FST });
}

/// Two micro-batches of six sequences are one batch of twelve: both lie within the bounds of one
/// oracle, so within twice them of each other.
#[test]
fn accumulation_is_a_larger_batch() {
    let mut recipe = fixture::recipe(Method::dense());
    recipe.batch.sequences = 6;
    let (found, bounds) = check(&recipe, Rules { switch: 0, ..FST });
    let noise = Noise { together: 2, ..Noise::of(&recipe) };
    let mut whole = recipe.clone();
    (whole.batch.sequences, whole.accumulation) = (12, NonZeroU32::MIN);
    let twice = bounds
        .into_iter()
        .map(|bounds| bounds.into_iter().map(|bound| 2.0 * bound).collect())
        .collect();
    let mut together = trained(&whole, noise);
    for (record, found) in together.iter_mut().zip(&found) {
        // The held-out windows are as many as a batch has sequences: other ones.
        record.quantities.pop();
        record.quantities.extend(found.quantities.last().cloned());
    }
    assert!(compare(&together, &found, &twice).is_ok());
}

/// What a comparison is worth: with a part left out of the oracle, or another in its place, it
/// fails, first where the part first acts, and far outside of the bound.
#[test]
fn every_part_of_the_method_shows() {
    let mut recipe = fixture::recipe(fixture::fst(LAMBDA));
    (recipe.dropout, recipe.seed) = (0.25, 4);
    let (found, bounds) = check(&recipe, FST);
    let without = |part| Rules { without: Some(part), ..FST };
    let others = [
        (without(Part::Mask), 1, "loss"),
        (without(Part::Mvue), 1, "norm"),
        (without(Part::Decay), 1, "m of h.0.mlp.c_fc.weight"),
        (without(Part::Refresh), 4, "held-out loss"),
        (without(Part::Switch), 11, "loss"),
        (without(Part::Clipping), 1, "m of wte.weight"),
        (without(Part::WeightDecay), 1, "w of wte.weight"),
        (without(Part::Dropout), 1, "loss"),
        (Rules { dgrad: Dgrad::Dense, ..FST }, 1, "norm"),
        (Rules { pattern: Pattern::RowWise, ..FST }, 1, "loss"),
        (Rules { sample: Sample::Approximate, ..FST }, 1, "norm"),
        (
            Rules { decay: Decay::OnWeights(f64::from(LAMBDA)), ..FST },
            1,
            "m of h.0.mlp.c_fc.weight",
        ),
        (Rules { switch: SWITCH - 1, ..FST }, 10, "loss"),
    ];
    for (rules, step, quantity) in others {
        let other = computed(&recipe, rules, Arithmetic::Exact);
        let difference = compare(&found, &other, &bounds).expect_err("a part is missing");
        assert!(difference.ratio >= 100.0, "{rules:?}: {difference:?}");
        assert_eq!((difference.step, difference.quantity.as_str()), (step, quantity), "{rules:?}");
    }
}
