//! The same bits: on any number of threads, interrupted anywhere, observed or not.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use sparse24_core::{MaskKind, mvue::Estimator, op::Activation, phase::Fraction};
use sparse24_tests::hooked::{Hook, Hooked};
use sparse24_train::{
    Error,
    backend::Region,
    method::{DgradOperand, GradientOperand, Method, PRESETS, Phase, PhaseKind, Until},
    model::ActivationCheckpointing,
    nn::BatchShape,
    trainer::{FlipSampling, Recipe, StepOutcome, Trainer},
};

use super::fixture::{self, Noise, STEPS, Validation, bits, fst, start};

const LAMBDA: f32 = 2e-2;

/// The bits of the validation loss.
fn evaluated(trainer: &mut Trainer) -> u64 {
    let validation = Validation::of(trainer.recipe());
    fixture::evaluate(trainer, &validation).to_bits()
}

/// Every third step samples its flips.
fn sampling(step: u32) -> FlipSampling {
    if step.is_multiple_of(3) { FlipSampling::Sample } else { FlipSampling::Skip }
}

/// Runs to the end of the recipe; the outcomes of the steps from the next one on.
fn finish(trainer: &mut Trainer) -> Vec<StepOutcome> {
    let recipe = trainer.recipe().clone();
    let noise = Noise::of(&recipe);
    (trainer.step() + 1..=recipe.steps)
        .map(|step| trainer.train_step(&noise, sampling(step)).expect("finite"))
        .collect()
}

/// Losses and norms as bits, since `==` has two zeros.
fn outcome_bits(outcomes: &[StepOutcome]) -> Vec<(u64, u32, Option<Vec<u64>>)> {
    let flips = |outcome: &StepOutcome| {
        outcome.flips.as_ref().map(|flips| flips.iter().map(|layer| layer.flips).collect())
    };
    outcomes
        .iter()
        .map(|outcome| (outcome.loss.to_bits(), outcome.grad_norm.to_bits(), flips(outcome)))
        .collect()
}

/// Products of several tiles and parameters of several tasks, both ragged: 132 tokens, 16,896
/// elements in a weight.
fn wide() -> Recipe {
    let mut recipe = fixture::recipe(fst(LAMBDA));
    fixture::change(&mut recipe, |spec| {
        (spec.d_model, spec.heads, spec.d_ff, spec.activation) = (32, 4, 264, Activation::Geglu);
        (spec.sequence_length, spec.vocabulary) = (33, 70);
    });
    recipe.batch = BatchShape { size: 4, sequence_length: 33 };
    (recipe.dropout, recipe.steps) = (0.1, 24);
    recipe
}

#[test]
fn activation_checkpointing_gives_the_same_bits_in_less_memory() {
    for method in [fst(LAMBDA), Method::dense()] {
        for dropout in [0.0, 0.1] {
            let mut recipe = Recipe { method: method.clone(), dropout, ..wide() };
            fixture::change(&mut recipe, |spec| spec.layers = 3);
            let activations = |trainer: &Trainer| {
                let memory = trainer.backend().memory().into_iter();
                let activations = memory.filter(|(region, _)| *region == Region::Activations);
                activations.map(|(_, bytes)| bytes).sum::<usize>()
            };
            let [(expected, more), (found, less)] =
                [ActivationCheckpointing::None, ActivationCheckpointing::Blocks].map(
                    |checkpointing| {
                        let mut trainer = start(&Recipe { checkpointing, ..recipe.clone() });
                        let outcomes = outcome_bits(&finish(&mut trainer));
                        let evaluated = evaluated(&mut trainer);
                        ((outcomes, bits(&mut trainer), evaluated), activations(&trainer))
                    },
                );
            assert!(found == expected, "{} with dropout {dropout}", method.name);
            assert!(less < more, "{less} instead of {more} bytes");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let recipe = wide();
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| {
            let mut trainer = start(&recipe);
            let outcomes = finish(&mut trainer);
            assert_eq!(
                outcomes.iter().map(|outcome| outcome.phase).collect::<Vec<_>>(),
                [[PhaseKind::Sparse; 20].as_slice(), &[PhaseKind::Dense; 4]].concat()
            );
            let evaluated = evaluated(&mut trainer);
            (outcome_bits(&outcomes), bits(&mut trainer), evaluated)
        })
    };
    let one = run(1);
    for threads in [2, 7] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

/// A dense phase, then from step 7 on a phase with row-wise masks.
fn dense_then_sparse() -> Method {
    let dense = Phase {
        until: Until::Fraction(Fraction::new(1, 2).expect("a half")),
        ..fixture::phase(None, DgradOperand::Dense, GradientOperand::Dense)
    };
    let kind = Some(MaskKind::RowWise);
    Method {
        phases: vec![
            dense,
            fixture::phase(
                kind,
                DgradOperand::Dense,
                GradientOperand::Mvue(Estimator::Approximate),
            ),
        ],
        ..fst(LAMBDA)
    }
}

/// Interrupted after every step, so on both sides of each refresh and switch, and restored in a new
/// trainer, a run of any method and model ends with the same bits.
#[test]
fn a_resumed_run_is_the_uninterrupted_one() {
    let presets = PRESETS.iter().map(|preset| preset.method(LAMBDA));
    let recipes = presets.chain([fst(LAMBDA), dense_then_sparse()]).enumerate();
    let recipes = recipes.flat_map(|(at, method)| {
        let mut recipe = fixture::recipe(method);
        recipe.dropout = 0.25;
        recipe.ema_decay = (at % 2 == 0).then_some(0.75);
        let others = [fixture::bert, fixture::crammed_bert, fixture::deit];
        let others = others.map(|of| of(recipe.clone()));
        let activation = Activation::ALL[at % Activation::ALL.len()];
        fixture::change(&mut recipe, |spec| spec.activation = activation);
        others.into_iter().chain([recipe])
    });
    for recipe in recipes {
        let mut whole = start(&recipe);
        let outcomes = finish(&mut whole);
        let expected = (bits(&mut whole), whole.progress());
        for cut in 0..=STEPS {
            let what = format!("{recipe:?} cut after step {cut}");
            let mut before = start(&recipe);
            let noise = Noise::of(&recipe);
            for step in 1..=cut {
                before.train_step(&noise, sampling(step)).expect("finite");
            }
            let states = fixture::states(&mut before);
            // A new trainer has other weights and masks until it is restored.
            let mut after = Trainer::new(fixture::cpu(), recipe.clone()).expect("the same recipe");
            after.restore(before.progress().clone(), &states).expect("every state is there");
            assert_eq!(evaluated(&mut after), evaluated(&mut before), "{what}");
            let rest = outcome_bits(&finish(&mut after));
            assert_eq!(rest, outcome_bits(&outcomes[cut as usize..]), "{what}");
            assert!((bits(&mut after), after.progress()) == expected, "{what}");
        }
    }
}

/// Sampling flips, evaluating, generating text and saving leave no trace in training.
#[test]
fn observation_changes_nothing() {
    let mut recipe = fixture::recipe(fst(LAMBDA));
    recipe.dropout = 0.25;
    let noise = Noise::of(&recipe);
    let run = |observe: &dyn Fn(&mut Trainer), sampling| {
        let mut trainer = start(&recipe);
        let mut outcomes = Vec::new();
        for _ in 0..STEPS {
            observe(&mut trainer);
            let outcome = trainer.train_step(&noise, sampling).expect("finite");
            outcomes.push((outcome.loss.to_bits(), outcome.grad_norm.to_bits()));
        }
        (outcomes, bits(&mut trainer))
    };
    let unobserved = run(&|_| {}, FlipSampling::Skip);
    assert!(run(&|_| {}, FlipSampling::Sample) == unobserved, "sampling flips");
    let evaluating =
        |trainer: &mut Trainer| assert!(f64::from_bits(evaluated(trainer)).is_finite());
    assert!(run(&evaluating, FlipSampling::Skip) == unobserved, "evaluating");
    let generating = |trainer: &mut Trainer| {
        assert_eq!(trainer.next_logits(&[1, 2, 3]).expect("runs").len(), 11);
    };
    assert!(run(&generating, FlipSampling::Skip) == unobserved, "generating");
    let saving = |trainer: &mut Trainer| drop(fixture::states(trainer));
    assert!(run(&saving, FlipSampling::Skip) == unobserved, "saving");
}

/// States are those of the step in which the copy started, also in memory that held earlier states.
#[test]
fn states_copied_out_are_those_of_their_step() {
    let recipe = fixture::recipe(fst(LAMBDA));
    let noise = Noise::of(&recipe);
    let mut trainer = start(&recipe);
    let mut reused = Vec::new();
    for _ in 0..STEPS {
        let expected = fixture::states(&mut trainer);
        let copied = trainer.copy_out(reused).expect("downloads");
        fixture::step(&mut trainer, &noise);
        reused = copied().expect("downloads");
        assert!(reused == expected, "before step {}", trainer.step());
    }
}

/// Whichever operation of a step fails, the next try has the same bits or is refused until the
/// state before is restored; so is one after a step that was started and dropped.
#[test]
fn a_step_that_did_not_end_is_repeated_to_the_bit_or_refused() {
    let recipe = Recipe { ema_decay: Some(0.75), ..fixture::recipe(fst(LAMBDA)) };
    let noise = Noise::of(&recipe);
    let train = |trainer: &mut Trainer| trainer.train_step(&noise, FlipSampling::Sample);
    // Masks are searched again after step 4.
    let finish = |trainer: &mut Trainer| {
        while trainer.step() < 5 {
            train(trainer).expect("finite");
        }
        bits(trainer)
    };
    let expected = finish(&mut start(&recipe));
    let (mut operations, mut refused) = (0, 0);
    for is_dropped in [true, false] {
        loop {
            let left = Arc::new(AtomicUsize::new(usize::MAX));
            let counted = Arc::clone(&left);
            let hook: Hook = Box::new(move |backend, _, op| match counted.fetch_sub(1, Relaxed) {
                0 => Err(Error::Device("lost".to_owned())),
                _ => backend.execute(op),
            });
            let mut trainer = fixture::trainer(Hooked::new(fixture::cpu(), hook), &recipe);
            (0..3).for_each(|_| drop(train(&mut trainer).expect("finite")));
            let states = fixture::states(&mut trainer);
            if is_dropped {
                drop(trainer.start_step(&noise, FlipSampling::Skip).expect("queued"));
            } else {
                left.store(operations, Relaxed);
                if train(&mut trainer).is_ok() {
                    break;
                }
                left.store(usize::MAX, Relaxed);
            }
            if let Err(error) = train(&mut trainer) {
                assert!(error.to_string().contains("restore"), "{error}");
                assert!(trainer.skip_step().is_err() && trainer.parameter_states().is_err());
                assert!(trainer.next_logits(&[1]).is_err());
                assert!(trainer.gradient_noise(&noise).is_err());
                assert!(trainer.evaluate(&Validation::of(&recipe), 1).is_err());
                trainer.restore(3, &states).expect("its own states");
                refused += 1;
            }
            assert!(finish(&mut trainer) == expected, "operation {operations}");
            if is_dropped {
                assert_eq!(refused, 1);
                let weights: Vec<_> = states.iter().map(|s| (&*s.name, &*s.weight)).collect();
                let late = trainer.start_from(&weights).expect_err("step 5").to_string();
                assert!(late.contains("found 5"), "{late}");
                trainer.restore(0, &states).expect("its own states");
                left.store(1, Relaxed);
                trainer.start_from(&weights).expect_err("lost");
                left.store(usize::MAX, Relaxed);
                let torn = train(&mut trainer).expect_err("torn").to_string();
                assert!(torn.contains("restore"), "{torn}");
                break;
            }
            operations += 1;
        }
    }
    assert!(
        operations > 100 && (8..operations / 2).contains(&refused),
        "{refused} of {operations}"
    );
}
