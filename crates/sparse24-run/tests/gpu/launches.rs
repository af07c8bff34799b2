//! Captured launches: a gradient that is not finite, states copied out, memory, recomputed blocks.

use sparse24_run::data::TokenizerKind;
use sparse24_train::{
    backend::{Launches, Region},
    model::ActivationCheckpointing,
    trainer::{FlipSampling, Recipe, Trainer},
};

use crate::{
    plans::{finish, recipe},
    support::{drawn, embedded, gpt2, on_gpu, opened, states, trainer},
};

#[test]
fn a_gradient_that_is_not_finite_stops_a_replayed_step_too() {
    on_gpu(|backend| {
        let dataset = embedded(TokenizerKind::Byte);
        let recipe = recipe(&dataset);
        let batches = drawn(&dataset, &recipe);
        let mut trainer = trainer(backend, &recipe);
        for _ in 0..3 {
            trainer.train_step(&batches, FlipSampling::Skip).expect("finite");
        }
        let mut damaged = states(&mut trainer);
        damaged[3].weight[0] = f32::INFINITY;
        trainer.restore(3, &damaged).expect("its own states");
        trainer.train_step(&batches, FlipSampling::Skip).expect_err("not finite");
        assert!(states(&mut trainer) == damaged, "no weight has changed");
    });
}

/// Copies that take longer than the passes of a step: the update waits for them.
#[test]
fn states_copied_out_are_those_of_their_step() {
    on_gpu(|_| {
        let dataset = embedded(TokenizerKind::Byte);
        let recipe = recipe(&dataset);
        let batches = drawn(&dataset, &recipe);
        for launches in [Launches::Eager, Launches::Captured] {
            let mut trainer = trainer(opened(launches), &recipe);
            while trainer.step() < recipe.steps {
                let expected = states(&mut trainer);
                let copies: Vec<_> =
                    (0..40).map(|_| trainer.copy_out(Vec::new()).expect("queued")).collect();
                trainer.train_step(&batches, FlipSampling::Skip).expect("finite");
                assert!(states(&mut trainer) != expected, "the step changed them");
                for copied in copies {
                    assert!(
                        copied().expect("copied") == expected,
                        "before step {}",
                        trainer.step()
                    );
                }
            }
        }
    });
}

#[test]
fn no_memory_is_taken_after_the_first_step() {
    on_gpu(|backend| {
        let dataset = embedded(TokenizerKind::Byte);
        let recipe = recipe(&dataset);
        let mut trainer = trainer(backend, &recipe);
        let windows = dataset.evaluation_windows(recipe.batch.sequence_length, 0);
        let batches = drawn(&dataset, &recipe);
        trainer.train_step(&batches, FlipSampling::Sample).expect("finite");
        let after_one = trainer.backend().memory();
        while trainer.step() < recipe.steps {
            trainer.train_step(&batches, FlipSampling::Sample).expect("finite");
            assert_eq!(trainer.backend().memory(), after_one, "after step {}", trainer.step());
            trainer.evaluate(&windows, recipe.batch.size).expect("finite");
            assert_eq!(trainer.backend().memory(), after_one, "evaluated at {}", trainer.step());
        }
    });
}

#[test]
fn recomputed_blocks_give_the_same_bits_in_less_memory() {
    on_gpu(|backend| {
        let dataset = embedded(TokenizerKind::Byte);
        let mut recipe = recipe(&dataset);
        gpt2(&mut recipe).layers = 3;
        let mut kept = trainer(backend, &recipe);
        let expected = finish(&mut kept, &dataset);
        let activations = |trainer: &Trainer| -> usize {
            let memory = trainer.backend().memory();
            let held = memory.iter().filter(|(region, _)| *region == Region::Activations);
            held.map(|(_, bytes)| bytes).sum()
        };
        for launches in [Launches::Eager, Launches::Captured] {
            let checkpointing = ActivationCheckpointing::Blocks;
            let recipe = Recipe { checkpointing, ..recipe.clone() };
            let mut again = trainer(opened(launches), &recipe);
            again.use_plans(&kept.backend().plans()).expect("this device's own");
            assert!(finish(&mut again, &dataset) == expected, "{launches:?}");
            let [less, more] = [&again, &kept].map(activations);
            assert!(less < more, "{less} instead of {more} bytes");
        }
    });
}
