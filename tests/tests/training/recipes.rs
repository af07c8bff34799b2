//! Recipes that cannot be trained, and steps beyond a recipe.

use std::num::NonZeroU32;

use sparse24_train::{
    Error,
    backend::BACKENDS,
    estimate::estimate,
    model::ModelSpec,
    nn::Prediction,
    optim::{Adam, MaskedDecay, UpdateRule},
    schedule::Decay,
    trainer::{FlipSampling, Recipe, Trainer},
};

use super::fixture::{self, Noise, change, cpu, deit, fst};

/// The setting that an error names.
fn key<T>(result: Result<T, Error>) -> String {
    match result.err() {
        Some(Error::Setting { key, .. }) => key,
        other => panic!("{other:?} names no setting"),
    }
}

fn adam(change: impl FnOnce(&mut Adam)) -> UpdateRule {
    let mut adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-3 };
    change(&mut adam);
    UpdateRule::Adam(adam)
}

#[test]
fn an_impossible_recipe_is_refused_by_its_setting() {
    const LAST: &str = "batch.final_gradient_accumulation_steps";
    type Damage = fn(&mut Recipe);
    let cases: [(&str, Damage); 30] = [
        ("model.layers", |recipe| change(recipe, |spec| spec.layers = 1 << 60)),
        ("model.heads", |recipe| change(recipe, |spec| spec.heads = 1 << 40)),
        ("model.d_model", |recipe| change(recipe, |spec| spec.d_model = 1 << 40)),
        ("model.d_ff", |recipe| change(recipe, |spec| spec.d_ff = 1 << 62)),
        ("model.sequence_length", |recipe| change(recipe, |spec| spec.sequence_length = 1 << 40)),
        ("the vocabulary", |recipe| change(recipe, |spec| spec.vocabulary = usize::MAX)),
        // Each size is possible, and their product is not.
        ("batch.size", |recipe| {
            change(recipe, |spec| (spec.sequence_length, spec.d_model) = (1 << 24, 1 << 24));
            (recipe.batch.size, recipe.batch.sequence_length) = (1 << 24, 1 << 24);
        }),
        ("model.sequence_length", |recipe| {
            *recipe = deit(recipe.clone());
            let ModelSpec::Deit(spec) = &mut recipe.model else { unreachable!("a DeiT") };
            (spec.image_size, spec.patch_size) = (usize::MAX, 1);
        }),
        ("batch.size", |recipe| recipe.batch.size = usize::MAX),
        ("batch.size", |recipe| recipe.batch.size = 0),
        ("steps", |recipe| recipe.steps = 0),
        ("steps", |recipe| {
            recipe.gradient_accumulation.last = NonZeroU32::new(3).expect("not zero");
        }),
        ("optimizer.cooldown_steps", |recipe| {
            (recipe.schedule.decay, recipe.schedule.cooldown_steps) = (Decay::Wsd, 0);
        }),
        ("the classes", |recipe| {
            change(recipe, |spec| spec.prediction = Some(Prediction::Class(0)))
        }),
        (LAST, |recipe| recipe.gradient_accumulation.last = NonZeroU32::MAX),
        (LAST, |recipe| recipe.gradient_accumulation.last = NonZeroU32::MIN),
        ("model.dropout", |recipe| recipe.dropout = f32::NAN),
        ("method.lambda", |recipe| recipe.method.decay = MaskedDecay::OnWeights(f32::INFINITY)),
        ("optimizer.learning_rate", |recipe| recipe.schedule.peak = f32::NAN),
        ("optimizer.min_learning_rate", |recipe| recipe.schedule.floor = -1.0),
        ("optimizer.warmup_learning_rate", |recipe| recipe.schedule.warmup_start = f32::INFINITY),
        ("optimizer.weight_decay", |recipe| recipe.weight_decay = -0.1),
        ("optimizer.max_grad_norm", |recipe| recipe.optimizer.clip = f32::NAN),
        ("optimizer.max_grad_norm", |recipe| recipe.optimizer.clip = 0.0),
        ("optimizer.ema_decay", |recipe| recipe.ema_decay = Some(1.0)),
        ("optimizer.beta1", |recipe| recipe.optimizer.rule = adam(|adam| adam.beta1 = -0.1)),
        ("optimizer.beta2", |recipe| recipe.optimizer.rule = adam(|adam| adam.beta2 = 1.0)),
        ("optimizer.epsilon", |recipe| recipe.optimizer.rule = adam(|adam| adam.epsilon = 0.0)),
        ("optimizer.momentum", |recipe| {
            recipe.optimizer.rule = UpdateRule::Sgd { momentum: f32::NAN };
        }),
        ("optimizer.beta2", |recipe| {
            recipe.optimizer.rule = UpdateRule::Lion { beta1: 0.9, beta2: f32::NAN };
        }),
    ];
    for (expected, damage) in cases {
        let mut recipe = fixture::recipe(fst(1e-2));
        damage(&mut recipe);
        if let size @ ("model.layers" | "model.d_ff" | "the vocabulary") = expected {
            assert_eq!(key(recipe.model.parameters()), size);
        }
        assert_eq!(key(estimate(&recipe, &BACKENDS[0])), expected);
        assert_eq!(key(Trainer::new(cpu(), recipe)), expected);
    }
}

#[test]
fn no_step_is_beyond_the_recipe() {
    let recipe = Recipe { steps: 1, ..fixture::recipe(fst(1e-2)) };
    let mut trainer = fixture::start(&recipe);
    fixture::step(&mut trainer, &Noise::of(&recipe));
    let before = fixture::states(&mut trainer);
    let step = trainer.train_step(&Noise::of(&recipe), FlipSampling::Skip);
    assert_eq!(key(step), "steps");
    assert_eq!(key(trainer.skip_step()), "steps");
    assert!(trainer.step() == 1 && fixture::states(&mut trainer) == before);
}
