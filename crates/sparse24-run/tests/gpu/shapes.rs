//! Shapes at the edges of what the kernels serve: training on the GPU gets as far as on the CPU
//! with the same rounding.
//!
//! Two runs that differ in the order of sums part ways after some steps, so that what they learned
//! is compared, not their bits.

use sparse24_core::op::Activation;
use sparse24_run::{
    config::{Config, preset},
    data::{Dataset, TokenizerKind},
};
use sparse24_train::{
    backend::{Arithmetic, Backend, cpu::CpuBackend},
    model::ActivationCheckpointing,
    trainer::{FlipSampling, Recipe, Trainer},
};

use crate::support::{drawn, embedded, on_gpu};

const STEPS: usize = 40;

/// The loss of every step.
fn losses(backend: Box<dyn Backend>, recipe: &Recipe, dataset: &Dataset) -> Vec<f64> {
    let mut trainer = Trainer::new(backend, recipe.clone()).expect("room");
    let batches = drawn(dataset, recipe);
    (0..STEPS)
        .map(|_| trainer.train_step(&batches, FlipSampling::Skip).expect("finite").loss)
        .collect()
}

/// How far the loss fell, in the mean of a few steps.
fn fall(losses: &[f64]) -> f64 {
    const FEW: usize = 5;
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / FEW as f64;
    mean(&losses[..FEW]) - mean(&losses[STEPS - FEW..])
}

fn learns_as_on_the_cpu(kind: TokenizerKind, change: fn(&mut Config)) {
    on_gpu(|gpu| {
        let dataset = embedded(kind);
        let mut config = preset::find("quickstart").expect("a preset");
        (config.steps, config.method.refresh, config.model.layers) = (60, 7, 2);
        (config.optimizer.warmup_steps, config.optimizer.learning_rate) = (5, 1e-2);
        change(&mut config);
        config.backend.name = "cuda".to_owned();
        config.check().expect("served");
        let recipe = config.recipe(dataset.vocabulary() as usize).expect("possible");
        let on_gpu = losses(gpu, &recipe, &dataset);
        let on_cpu = losses(Box::new(CpuBackend::new(Arithmetic::Bf16)), &recipe, &dataset);
        let (found, expected) = (fall(&on_gpu), fall(&on_cpu));
        println!("the loss falls by {found}, on the CPU by {expected}");
        assert!(expected >= 0.3 && found >= 0.8 * expected, "{on_gpu:?} {on_cpu:?}");
    });
}

/// Heads of 8, rows of 80 and 112 bytes, 39 tokens, and a vocabulary that is no multiple of 8.
#[test]
fn narrow_heads_and_odd_tokens() {
    learns_as_on_the_cpu(TokenizerKind::Character, |config| {
        let model = &mut config.model;
        (model.d_model, model.heads, model.d_ff, model.sequence_length) = (40, 5, 56, 13);
        (model.bias, config.batch.size) = (true, 3);
    });
}

/// Heads of 128, a gate whose halves begin at no multiple of 64, blocks computed again, dropout.
#[test]
fn wide_heads_and_gates() {
    learns_as_on_the_cpu(TokenizerKind::Byte, |config| {
        let model = &mut config.model;
        (model.d_model, model.heads, model.d_ff, model.sequence_length) = (256, 2, 328, 40);
        (model.activation, model.dropout, model.activation_checkpointing) =
            (Activation::Geglu, 0.1, ActivationCheckpointing::Blocks);
        config.batch.size = 2;
    });
}
