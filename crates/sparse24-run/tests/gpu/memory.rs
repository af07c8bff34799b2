//! Memory that does not suffice is an error, and the GPU goes on; and the estimate of memory.

use std::num::NonZeroU32;

use sparse24_run::{config::preset, data::TokenizerKind};
use sparse24_train::{
    Error,
    backend::{BACKENDS, Backend, DType, Launches, Region},
    estimate::estimate,
    schedule::GradientAccumulation,
    trainer::{FlipSampling, Trainer},
};

use crate::support::{drawn, embedded, gpt2, on_gpu, opened, trainer};

const MIB: usize = 1 << 20;

/// The sentence of a device that refuses.
fn sentence<T>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Device(sentence)) if !sentence.contains('\n') => sentence,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("there was room"),
    }
}

fn hold(backend: &mut dyn Backend, mib: usize) -> Result<(), Error> {
    backend.alloc("held", [mib, MIB / 4], DType::F32, Region::Activations).map(|_| ())
}

#[test]
fn a_model_beyond_the_memory_is_one_sentence_and_the_next_one_trains() {
    on_gpu(|mut gpu| {
        let text = sentence(hold(&mut *gpu, 4 << 20));
        assert!(text.contains("held needs 4194304 MiB of GPU memory"), "{text}");
        let dataset = embedded(TokenizerKind::Byte);
        let mut recipe = preset::find("quickstart")
            .expect("a preset")
            .recipe(dataset.vocabulary() as usize)
            .expect("possible");
        let layers = std::mem::replace(&mut gpt2(&mut recipe).layers, 1 << 12);
        recipe.batch.size = 1 << 15;
        let text = sentence(Trainer::new(gpu, recipe.clone()));
        assert!(text.contains("MiB of GPU memory"), "{text}");
        println!("{text}");

        gpt2(&mut recipe).layers = layers;
        recipe.batch.size = 12;
        let mut trainer = trainer(opened(Launches::Captured), &recipe);
        trainer.train_step(&drawn(&dataset, &recipe), FlipSampling::Sample).expect("finite");
    });
}

/// Conformance tests compare every byte but scratch, with every method and model.
#[test]
fn an_estimate_is_within_a_hundredth_of_the_memory_held() {
    on_gpu(|gpu| {
        let dataset = embedded(TokenizerKind::Gpt2);
        let preset = preset::find("gpt2-124m").expect("a preset");
        let mut recipe = preset.recipe(50_257).expect("possible");
        recipe.batch.size = 4;
        recipe.gradient_accumulation = GradientAccumulation::constant(NonZeroU32::MIN);
        let cuda = BACKENDS.iter().find(|entry| entry.name == "cuda").expect("this backend");
        let estimated = estimate(&recipe, cuda).expect("possible").device_bytes();
        let mut trainer = trainer(gpu, &recipe);
        trainer.train_step(&drawn(&dataset, &recipe), FlipSampling::Skip).expect("finite");
        let held: usize = trainer.backend().memory().iter().map(|(_, bytes)| bytes).sum();
        println!("{held} held, {estimated} estimated");
        assert!((held as u64).abs_diff(estimated) * 100 <= estimated);
    });
}
