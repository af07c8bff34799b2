//! Timed choices: whoever replays them has the bits of whoever timed them, with or without captured
//! launches.

use sparse24_run::{
    config::Config,
    data::{Dataset, TokenizerKind},
};
use sparse24_train::{
    Error,
    backend::{Launches, PLANNED_ON, Plans},
    trainer::{FlipSampling, ParameterState, Recipe, Trainer},
};

use crate::support::{drawn, embedded, on_gpu, opened, states, trainer};

/// Five sparse steps, two refreshes among them, and three dense ones; ragged tokens.
pub(crate) fn recipe(dataset: &Dataset) -> Recipe {
    let settings = "steps=8 model.layers=2 model.d_model=128 model.heads=2 model.d_ff=512 \
        model.sequence_length=75 batch.size=5 \
                    batch.gradient_accumulation_steps=2 method.refresh=2 model.dropout=0.1 \
                    model.bias=true";
    let settings: Vec<String> = settings.split_whitespace().map(str::to_owned).collect();
    let config = Config::resolve(Some("quickstart"), None, &settings).expect("a configuration");
    config.recipe(dataset.vocabulary() as usize).expect("a recipe")
}

/// Trains to the end and evaluates; gives the loss and the states.
pub(crate) fn finish(trainer: &mut Trainer, dataset: &Dataset) -> (f64, Vec<ParameterState>) {
    let recipe = trainer.recipe().clone();
    while trainer.step() < recipe.steps {
        trainer.train_step(&drawn(dataset, &recipe), FlipSampling::Sample).expect("finite");
    }
    let windows = dataset.evaluation_windows(recipe.batch.sequence_length, 0);
    let loss = trainer.evaluate(&windows, recipe.batch.size).expect("finite").loss();
    (loss, states(trainer))
}

#[test]
fn replayed_plans_give_the_bits_of_timed_ones_a_resume_included() {
    on_gpu(|timing| {
        let dataset = embedded(TokenizerKind::Byte);
        let recipe = recipe(&dataset);
        let mut timed = trainer(timing, &recipe);
        let expected = finish(&mut timed, &dataset);
        let plans = timed.backend().plans();
        assert_eq!(timed.backend().plan_count(), plans.len());
        for kind in
            ["gemm forward", "gemm dgrad", "gemm wgrad", "spmm24 transposed", "spmm24 straight"]
        {
            let is_timed = plans.keys().any(|key| key.starts_with(kind));
            assert!(is_timed, "no {kind} among {:?}", plans.keys());
        }
        let replaying = |launches| {
            let mut trainer = trainer(opened(launches), &recipe);
            trainer.use_plans(&plans).expect("this device's own");
            trainer
        };
        for launches in [Launches::Eager, Launches::Captured] {
            let mut replayed = replaying(launches);
            assert!(finish(&mut replayed, &dataset) == expected, "{launches:?}");
            assert_eq!(replayed.backend().plans(), plans, "nothing was timed");
            // On either side of the switch.
            for step in [3, 7] {
                let mut first = replaying(Launches::Eager);
                while first.step() < step {
                    let batches = drawn(&dataset, &recipe);
                    first.train_step(&batches, FlipSampling::Skip).expect("finite");
                }
                let states = states(&mut first);
                // What was captured serves a run that begins again in the middle, too.
                for resumed in [&mut replaying(launches), &mut replayed] {
                    resumed.restore(step, &states).expect("its own states");
                    assert!(finish(resumed, &dataset) == expected, "{launches:?} after {step}");
                }
            }
        }
    });
}

#[test]
fn what_this_device_does_not_have_is_refused_by_name() {
    on_gpu(|mut backend| {
        let here = backend.plans();
        assert_eq!(here.keys().collect::<Vec<_>>(), [PLANNED_ON], "nothing was timed yet");
        backend.use_plans(&here).expect("its own");
        let mut refuses = |key: &str, text: &str, word: &str| {
            let plans = Plans::from([(key.to_owned(), text.to_owned())]);
            match backend.use_plans(&plans) {
                Err(Error::Plan { key: named, problem }) => {
                    assert!(named == key && problem.contains(word), "{named}: {problem}")
                }
                other => panic!("{key:?} was not refused: {other:?}"),
            }
            assert_eq!(backend.plans(), here);
        };
        refuses(PLANNED_ON, "NVIDIA Z1", "timed on NVIDIA Z1, found");
        refuses("other", "", "nothing that is timed");
        refuses("gemm wgrad", "", "not a dense product");
        refuses("gemm wgrad 64x64x64 strides 64, 64, 64", "0", "not an algorithm");
        refuses("spmm24 sideways 64x64x64", "mma", "no sparse product");
        refuses("spmm24 straight 64x64", "mma", "no sparse product");
        refuses("spmm24 straight 64x64x64", "mmb", "not a plan");
        refuses("spmm24 straight 64x64x64", "wgmma-8-8-0x1-66", "no kernel");
    });
}
