//! Several ranks train one model: threads with a backend each.

use std::{collections::BTreeMap, num::NonZeroU32, sync::Mutex, thread};

use sparse24_tests::hooked::{Hook, Hooked};
use sparse24_train::{
    Error, ErrorKind,
    backend::{Backend, Capabilities},
    group::{Group, Threads},
    method::PhaseKind,
    objective::{Batch, DataError, Objective},
    schedule::GradientAccumulation,
    trainer::{FlipSampling, Recipe, StepOutcome, Trainer},
};

use super::fixture::{self, Bits, Noise, STEPS, Validation, fst};

/// FST, dropout and a moving average, with eight micro-batches per step in so many replicas.
fn recipe(replicas: u32) -> Recipe {
    let number = |number| NonZeroU32::new(number).expect("not zero");
    Recipe {
        gradient_accumulation: GradientAccumulation::constant(number(8)),
        replicas: number(replicas),
        dropout: 0.25,
        ema_decay: Some(0.75),
        ..fixture::recipe(fst(1e-2))
    }
}

/// Returns the result of each of `world` ranks, which is the same.
fn on_ranks<T: PartialEq + Send>(
    world: usize,
    recipe: &Recipe,
    run: impl Fn(&mut Trainer) -> T + Sync,
) -> T {
    on_backends(fixture::cpu, world, recipe, run)
}

/// The same with a backend that `open` gives for each.
fn on_backends<T: PartialEq + Send>(
    open: impl Fn() -> Box<dyn Backend> + Sync,
    world: usize,
    recipe: &Recipe,
    run: impl Fn(&mut Trainer) -> T + Sync,
) -> T {
    let mut results = thread::scope(|scope| {
        let rank = |rank: Threads| {
            scope.spawn(|| {
                let group: Box<dyn Group> = Box::new(rank);
                let trainer = Trainer::in_group(open(), recipe.clone(), group);
                let mut trainer = trainer.expect("as many replicas");
                fixture::start_from(&mut trainer, &fixture::weights(&recipe.model));
                run(&mut trainer)
            })
        };
        let ranks: Vec<_> = Threads::group(world).into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
    });
    let first = results.remove(0);
    assert!(results.into_iter().all(|other| other == first), "the ranks differ");
    first
}

/// The outcome of each step, the evaluation after each, and the state at the end.
fn trained(trainer: &mut Trainer) -> (Vec<(StepOutcome, f64)>, Bits) {
    let (noise, validation) = (Noise::of(trainer.recipe()), Validation::of(trainer.recipe()));
    let step = |_| {
        let outcome = trainer.train_step(&noise, FlipSampling::Sample).expect("finite");
        // In two parts of different sizes.
        (outcome, fixture::evaluate(trainer, &validation))
    };
    let steps: Vec<_> = (0..STEPS).map(step).collect();
    assert_eq!(steps[0].0.phase, PhaseKind::Sparse);
    (steps, fixture::bits(trainer))
}

#[test]
fn any_number_of_ranks_gives_the_bits_of_one() {
    let mut seen = Vec::new();
    for replicas in [1, 2, 4, 8] {
        let recipe = recipe(replicas);
        let alone = on_ranks(1, &recipe, trained);
        for world in [2, 4, 8].into_iter().filter(|&world| world <= replicas) {
            let world = world as usize;
            assert!(on_ranks(world, &recipe, trained) == alone, "{replicas} on {world} ranks");
        }
        assert!(!seen.contains(&alone), "{replicas} replicas are summed in another order");
        seen.push(alone);
    }
}

#[test]
fn an_exchange_starts_when_its_gradients_are_final() {
    let models: [fn(Recipe) -> Recipe; 5] = [
        |recipe| recipe,
        fixture::bert,
        fixture::crammed_bert,
        fixture::deit,
        fixture::transformer,
    ];
    for (model, change) in models.into_iter().enumerate() {
        for world in [2, 8] {
            let mut recipe = recipe(world);
            fixture::change(&mut recipe, |spec| (spec.d_model, spec.d_ff) = (64, 128));
            let recipe = change(recipe);
            let open = || -> Box<dyn Backend> {
                let hook: Hook = Box::new(|backend, _, op| backend.execute(op));
                Hooked::new(fixture::cpu(), hook).overlapping()
            };
            let found = on_backends(open, world as usize, &recipe, trained);
            assert!(found == on_ranks(1, &recipe, trained), "model {model} on {world} ranks");
        }
    }
}

/// The micro-batches of [`Noise`], and how often each was made.
struct Counted {
    noise: Noise,
    made: Mutex<BTreeMap<(u32, u32), usize>>,
}

impl Objective for Counted {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        *self.made.lock().expect("no panic").entry((step, micro_step)).or_default() += 1;
        self.noise.fill(step, micro_step, batch)
    }
}

#[test]
fn each_micro_batch_is_made_on_one_rank() {
    let recipe = recipe(4);
    let objective = Counted { noise: Noise::of(&recipe), made: Mutex::default() };
    on_ranks(4, &recipe, |trainer| {
        for _ in 0..STEPS {
            fixture::step(trainer, &objective);
        }
    });
    let made = objective.made.into_inner().expect("no panic");
    assert_eq!(made.len(), 8 * STEPS as usize);
    assert!(made.values().all(|&times| times == 1), "{made:?}");
}

/// The micro-batches of [`Noise`], one of which holds a token that no other does.
struct Spoiled(Noise);

impl Objective for Spoiled {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        self.0.fill(step, micro_step, batch)?;
        if step == 2 && micro_step == 5 {
            batch.tokens.fill(SPOILED);
        }
        Ok(())
    }
}

/// Token 10 is embedded as NaN.
const SPOILED: u32 = 10;

#[test]
fn a_loss_that_is_not_finite_on_one_rank_stops_the_update_on_all() {
    let recipe = recipe(4);
    let run = |trainer: &mut Trainer| {
        let mut noise = Noise::of(trainer.recipe());
        noise.vocabulary = SPOILED as usize;
        let mut weights = fixture::weights(&trainer.recipe().model);
        let row = trainer.recipe().model.extents().d_model;
        let table = &mut weights[0].1;
        table[SPOILED as usize * row..][..row].fill(f32::MAX);
        fixture::start_from(trainer, &weights);
        let objective = Spoiled(noise);
        let mut lines = Vec::new();
        for _ in 0..3 {
            match trainer.train_step(&objective, FlipSampling::Skip) {
                Ok(outcome) => lines.push(outcome.loss.to_string()),
                Err(error @ Error::NonFinite { .. }) => {
                    lines.push(error.to_string());
                    trainer.skip_step().expect("no device fails");
                }
                Err(error) => panic!("{error}"),
            }
        }
        (lines, fixture::bits(trainer))
    };
    let alone = on_ranks(1, &recipe, run);
    assert!(alone.0[1].starts_with("step 2: the loss is not finite"), "{:?}", alone.0);
    for world in [2, 4] {
        let found = on_ranks(world, &recipe, run);
        assert_eq!(found.0, alone.0, "{world} ranks");
        assert!(found.1 == alone.1, "{world} ranks");
    }
}

#[test]
fn all_ranks_take_the_state_of_rank_0() {
    let recipe = recipe(4);
    let run = |steps_before: u32| {
        on_ranks(2, &recipe, |trainer| {
            let noise = Noise::of(trainer.recipe());
            if trainer.group().rank() == 0 {
                let mut alone = fixture::start(trainer.recipe());
                for _ in 0..steps_before {
                    fixture::step(&mut alone, &noise);
                }
                let states = fixture::states(&mut alone);
                trainer.restore(alone.progress().clone(), &states).expect("every state");
            }
            trainer.take_state_of_rank_0().expect("no rank is gone");
            for _ in steps_before..STEPS {
                fixture::step(trainer, &noise);
            }
            fixture::bits(trainer)
        })
    };
    let expected = run(0);
    for steps in [3, 11, 12] {
        assert!(run(steps) == expected, "after {steps} steps");
    }
}

#[test]
fn a_rank_that_is_gone_ends_the_others() {
    let mut ranks = Threads::group(2);
    drop(ranks.pop());
    let group: Box<dyn Group> = Box::new(ranks.remove(0));
    let mut trainer = Trainer::in_group(fixture::cpu(), recipe(2), group).expect("two replicas");
    let noise = Noise::of(trainer.recipe());
    let error = trainer.train_step(&noise, FlipSampling::Skip).expect_err("no rank 1");
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::Peer, "rank 1 is gone".to_owned()));
}

#[test]
fn replicas_that_cannot_be_divided_are_refused() {
    let growing = |mut recipe: Recipe| {
        recipe.gradient_accumulation.last = NonZeroU32::new(16).expect("not zero");
        recipe
    };
    for (recipe, expected) in [
        (recipe(3), "that divides the number of micro-batches of every step (8), found 3 ("),
        (recipe(16), "found 16 ("),
        (growing(recipe(2)), "every step (8 to 16), found 2 ("),
    ] {
        let error = recipe.check(&Capabilities::unlimited("cpu")).expect_err("not divided");
        assert!(error.to_string().starts_with("batch.replicas: expected"), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    for (world, replicas, expected) in [
        (2, 1, "batch.replicas: expected a multiple of the number of ranks, 2, found 1"),
        (3, 4, "ranks: expected a power of two, found 3"),
        (8, 4, "batch.replicas: expected a multiple of the number of ranks, 8, found 4"),
    ] {
        let group: Box<dyn Group> = Box::new(Threads::group(world).remove(0));
        let error = Trainer::in_group(fixture::cpu(), recipe(replicas), group).err();
        let error = error.expect("too many ranks").to_string();
        assert_eq!(error, expected);
    }
}
