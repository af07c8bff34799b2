//! Blocks that are computed again: the same bits in less memory, queued and replayed.

use sparse24_run::data::TokenizerKind;
use sparse24_train::{
    backend::{Backend, BackendSettings, Launches, Region, cuda::CudaBackend},
    model::ActivationCheckpointing,
    trainer::{Recipe, Trainer},
};

use crate::{
    plans::{finish, recipe},
    support::{embedded, gpt2, on_gpu},
};

#[test]
fn blocks_that_are_computed_again_give_the_same_bits_in_less_memory() {
    on_gpu(|backend| {
        let dataset = embedded(TokenizerKind::Byte);
        let mut recipe = recipe(&dataset);
        gpt2(&mut recipe).layers = 3;
        let mut kept = Trainer::new(backend, recipe.clone()).expect("room");
        let expected = finish(&mut kept, &dataset);
        let activations = |trainer: &Trainer| {
            let memory = trainer.backend().memory();
            memory
                .iter()
                .filter(|(region, _)| *region == Region::Activations)
                .map(|(_, bytes)| bytes)
                .sum::<usize>()
        };
        for launches in [Launches::Eager, Launches::Captured] {
            let another: Box<dyn Backend> = Box::new(
                CudaBackend::open(BackendSettings { launches, ..BackendSettings::default() })
                    .expect("it opened before"),
            );
            let mut again = Trainer::new(
                another,
                Recipe { checkpointing: ActivationCheckpointing::Blocks, ..recipe.clone() },
            )
            .expect("room");
            again.use_plans(&kept.backend().plans()).expect("this device's own");
            assert!(finish(&mut again, &dataset) == expected, "{launches:?}");
            let [less, more] = [&again, &kept].map(activations);
            assert!(less < more, "{less} instead of {more} bytes");
        }
    });
}
