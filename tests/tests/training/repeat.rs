//! The same bits: on any number of threads, interrupted anywhere, watched or not.

use sparse24_core::{MaskKind, mvue::Estimator, phase::Fraction};
use sparse24_train::{
    backend::{Activation, Arithmetic, Region, cpu::CpuBackend},
    method::{DgradOperand, GradientOperand, Method, Phase, PhaseKind, Until},
    model::gpt2::{BatchShape, Recompute},
    trainer::{FlipSampling, ParameterState, Recipe, Sampler, StepOutcome, Trainer},
};

use super::fixture::{self, HeldOut, Noise, STEPS, fst};

const LAMBDA: f32 = 2e-2;

fn start(recipe: &Recipe) -> Trainer {
    fixture::trainer(Box::new(CpuBackend::new(Arithmetic::F32)), recipe)
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

/// The bits of w, m and v, and the mask, of every parameter.
type Bits = Vec<(String, [Vec<u32>; 3], Option<Vec<u16>>)>;

fn bits(trainer: &mut Trainer) -> Bits {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
    let of = |state: ParameterState| {
        let values = [bits(&state.weight), bits(&state.first_moment), bits(&state.second_moment)];
        (state.name, values, state.mask.map(|mask| mask.tiles().to_vec()))
    };
    trainer.parameter_states().expect("downloads").into_iter().map(of).collect()
}

/// Losses and norms by their bits, for `==` has two zeros.
fn outcome_bits(outcomes: &[StepOutcome]) -> Vec<(u64, u32, Option<Vec<u64>>)> {
    let flips = |outcome: &StepOutcome| {
        outcome.flips.as_ref().map(|flips| flips.iter().map(|layer| layer.flips).collect())
    };
    outcomes
        .iter()
        .map(|outcome| (outcome.loss.to_bits(), outcome.grad_norm.to_bits(), flips(outcome)))
        .collect()
}

/// Products of several tiles, parameters of several tasks, ragged both: 132 tokens, 16 896 elements
/// in a weight.
fn wide() -> Recipe {
    let mut recipe = fixture::recipe(fst(LAMBDA));
    (recipe.model.width, recipe.model.heads, recipe.model.ffn_width) = (32, 4, 264);
    (recipe.model.activation, recipe.model.context, recipe.model.vocabulary) =
        (Activation::Geglu, 33, 70);
    (recipe.batch, recipe.dropout, recipe.steps) =
        (BatchShape { sequences: 4, context: 33 }, 0.1, 24);
    recipe
}

#[test]
fn blocks_that_are_computed_again_give_the_same_bits_in_less_memory() {
    for method in [fst(LAMBDA), Method::dense()] {
        for dropout in [0.0, 0.1] {
            let mut kept = Recipe { method: method.clone(), dropout, ..wide() };
            kept.model.layers = 3;
            let held_out = HeldOut::of(&kept);
            let activations = |trainer: &Trainer| {
                let memory = trainer.backend().memory();
                memory
                    .iter()
                    .filter(|(region, _)| *region == Region::Activations)
                    .map(|(_, bytes)| bytes)
                    .sum::<usize>()
            };
            let [(expected, more), (found, less)] =
                [Recompute::None, Recompute::Blocks].map(|recompute| {
                    let mut trainer = start(&Recipe { recompute, ..kept.clone() });
                    let outcomes = finish(&mut trainer);
                    let evaluated = trainer.evaluate(&held_out).expect("finite").to_bits();
                    (
                        (outcome_bits(&outcomes), bits(&mut trainer), evaluated),
                        activations(&trainer),
                    )
                });
            assert!(found == expected, "{} with dropout {dropout}", method.name);
            assert!(less < more, "{less} instead of {more} bytes");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let recipe = wide();
    let held_out = HeldOut::of(&recipe);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| {
            let mut trainer = start(&recipe);
            let outcomes = finish(&mut trainer);
            assert_eq!(
                outcomes.iter().map(|outcome| outcome.phase).collect::<Vec<_>>(),
                [[PhaseKind::Sparse; 20].as_slice(), &[PhaseKind::Dense; 4]].concat()
            );
            let evaluated = trainer.evaluate(&held_out).expect("finite").to_bits();
            (outcome_bits(&outcomes), bits(&mut trainer), evaluated)
        })
    };
    let one = run(1);
    for threads in [2, 7] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

/// A dense phase, then one of row-wise masks that are entered at step 7.
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

/// Interrupted after every step, so on both sides of each refresh and switch: restored in a new
/// trainer, it ends on the same bits.
#[test]
fn a_resumed_run_is_the_uninterrupted_one() {
    for method in [fst(LAMBDA), dense_then_sparse(), Method::dense()] {
        let mut recipe = fixture::recipe(method);
        recipe.dropout = 0.25;
        let mut whole = start(&recipe);
        let outcomes = finish(&mut whole);
        let whole = bits(&mut whole);
        for cut in 0..=STEPS {
            let mut before = start(&recipe);
            let noise = Noise::of(&recipe);
            for step in 1..=cut {
                before.train_step(&noise, sampling(step)).expect("finite");
            }
            let states = before.parameter_states().expect("downloads");
            // A new trainer has other weights and masks until it is restored.
            let mut after =
                Trainer::new(Box::new(CpuBackend::new(Arithmetic::F32)), recipe.clone())
                    .expect("the same recipe");
            after.restore(cut, &states).expect("every state is there");
            let held_out = HeldOut::of(&recipe);
            let evaluated = [&mut before, &mut after]
                .map(|trainer| trainer.evaluate(&held_out).expect("finite").to_bits());
            assert_eq!(evaluated[0], evaluated[1], "{} cut after step {cut}", recipe.method.name);
            assert_eq!(
                outcome_bits(&finish(&mut after)),
                outcome_bits(&outcomes[cut as usize..]),
                "{} cut after step {cut}",
                recipe.method.name
            );
            assert!(bits(&mut after) == whole, "{} cut after step {cut}", recipe.method.name);
        }
    }
}

/// Sampling flips, evaluating and generating text leave no trace in training.
#[test]
fn watching_changes_nothing() {
    let mut recipe = fixture::recipe(fst(LAMBDA));
    recipe.dropout = 0.25;
    let (noise, held_out) = (Noise::of(&recipe), HeldOut::of(&recipe));
    let run = |watch: &dyn Fn(&mut Trainer), sampling| {
        let mut trainer = start(&recipe);
        let mut outcomes = Vec::new();
        for _ in 0..STEPS {
            watch(&mut trainer);
            let outcome = trainer.train_step(&noise, sampling).expect("finite");
            outcomes.push((outcome.loss.to_bits(), outcome.grad_norm.to_bits()));
        }
        (outcomes, bits(&mut trainer))
    };
    let unwatched = run(&|_| {}, FlipSampling::Skip);
    assert!(run(&|_| {}, FlipSampling::Sample) == unwatched, "sampling flips");
    let evaluating =
        |trainer: &mut Trainer| assert!(trainer.evaluate(&held_out).expect("runs").is_finite());
    assert!(run(&evaluating, FlipSampling::Skip) == unwatched, "evaluating");
    let sampler = Sampler { temperature: 0.8, top_k: 5, seed: 3 };
    let generating =
        |trainer: &mut Trainer| assert!(trainer.sample(&[1, 2, 3], &sampler).expect("runs") < 11);
    assert!(run(&generating, FlipSampling::Skip) == unwatched, "generating");
    let saving = |trainer: &mut Trainer| drop(trainer.parameter_states().expect("downloads"));
    assert!(run(&saving, FlipSampling::Skip) == unwatched, "saving");
}

/// Whoever asks late gets them as they were, also in room that held others.
#[test]
fn states_copied_out_are_those_of_their_step() {
    let recipe = fixture::recipe(fst(LAMBDA));
    let noise = Noise::of(&recipe);
    let mut trainer = start(&recipe);
    let mut room = Vec::new();
    for _ in 0..STEPS {
        let expected = trainer.parameter_states().expect("downloads");
        let copied = trainer.copy_out(room).expect("downloads");
        trainer.train_step(&noise, FlipSampling::Skip).expect("finite");
        room = copied().expect("downloads");
        assert!(room == expected, "before step {}", trainer.step());
    }
}

/// Another seed is another run: what is repeated above is not a constant.
#[test]
fn another_seed_is_another_run() {
    let [one, other] = [1, 2].map(|seed| {
        let recipe = Recipe { seed, ..fixture::recipe(fst(LAMBDA)) };
        let mut trainer = start(&recipe);
        (outcome_bits(&finish(&mut trainer)), bits(&mut trainer))
    });
    assert!(one != other);
}
