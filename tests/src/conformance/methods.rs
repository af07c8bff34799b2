//! Two steps of every method on a tiny model of each architecture, and with every optimizer: masks
//! of core, finite updates everywhere, the same bits again, and as much memory as was estimated.

use std::num::NonZeroU32;

use ndarray::ArrayView2;
use sparse24_core::{op::Activation, search::mask_search};
use sparse24_train::{
    backend::{BACKENDS, Region, op::HeadLoss},
    estimate::estimate,
    method::{PRESETS, Preset},
    model::{ActivationCheckpointing, Gpt2Spec, ModelSpec, Sparsify},
    nn::{BatchShape, Bias, NoWeightDecay},
    objective::{Batch, DataError, Objective},
    optim::{Adam, Optimizer, UpdateRule},
    schedule::{Decay, GradientAccumulation, Schedule},
    trainer::{FlipSampling, ParameterState, Recipe, StepOutcome, Trainer},
};

use super::{Open, is_imitated};
use crate::{bert, crammed_bert, deit, oracle::arithmetic::Random};

/// Sequences of a micro-batch.
const SIZE: usize = 8;

const VOCABULARY: usize = 19;
const LAMBDA: f32 = 2e-4;

const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
const RULES: [UpdateRule; 4] = [
    UpdateRule::AdamW(ADAM),
    UpdateRule::Adam(ADAM),
    UpdateRule::Sgd { momentum: 0.9 },
    UpdateRule::Lion { beta1: 0.9, beta2: 0.99 },
];

fn models() -> [ModelSpec; 4] {
    let gpt2 = Gpt2Spec {
        layers: 2,
        heads: 2,
        d_model: 16,
        d_ff: 32,
        sequence_length: 8,
        vocabulary: VOCABULARY,
        activation: Activation::Swiglu,
        bias: Bias::Present,
        sparsify: Sparsify::FfnAndAttention,
        prediction: None,
    };
    let of = |activation| Gpt2Spec { activation, ..gpt2 };
    [
        ModelSpec::Gpt2(gpt2),
        bert(of(Activation::GeluErf)),
        crammed_bert(of(Activation::Geglu)),
        deit(of(Activation::GeluErf)),
    ]
}

fn recipe(preset: &Preset, model: &ModelSpec, rule: UpdateRule) -> Recipe {
    // A step of SGD is as large as the gradient, and gains near 1 lose one that is much smaller.
    let peak = if matches!(rule, UpdateRule::Sgd { .. }) { 1.0 } else { 1e-3 };
    Recipe {
        model: model.clone(),
        method: preset.method(LAMBDA),
        steps: 12,
        batch: BatchShape { size: SIZE, sequence_length: model.extents().longest },
        checkpointing: ActivationCheckpointing::None,
        gradient_accumulation: GradientAccumulation::constant(
            NonZeroU32::new(2).expect("not zero"),
        ),
        replicas: NonZeroU32::MIN,
        dropout: 0.125,
        optimizer: Optimizer { rule, clip: 1.0 },
        weight_decay: 0.1,
        no_weight_decay: NoWeightDecay::Vectors,
        ema_decay: Some(0.9),
        schedule: Schedule {
            peak,
            floor: 1e-4,
            warmup_start: 0.0,
            warmup_steps: 0,
            decay_steps: 12,
            decay: Decay::Cosine,
            cooldown_steps: 4,
        },
        seed: 3,
    }
}

/// Random tokens and targets, with padding that a causal model ignores, or random images with two
/// classes each.
struct Noise<'a>(&'a ModelSpec);

impl Objective for Noise<'_> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let mut random = Random(u64::from(step) << 32 | u64::from(micro_step));
        batch.clear();
        if let ModelSpec::Deit(spec) = self.0 {
            let values = SIZE * 3 * spec.image_size.pow(2);
            batch.pixels.extend((0..values).map(|_| random.symmetric()));
            for _ in 0..SIZE {
                batch.targets.push(random.below(VOCABULARY as u32));
                let tokens = batch.targets.len() + spec.patches().count;
                batch.targets.resize(tokens, HeadLoss::IGNORE);
                batch.second_targets.push(random.below(VOCABULARY as u32));
                batch.shares.push(random.symmetric().abs());
            }
            batch.counted = SIZE;
            return Ok(());
        }
        for _ in 0..SIZE {
            let length = 3 + random.below(6);
            batch.lengths.push(length);
            for position in 0..8 {
                batch.tokens.push(random.below(VOCABULARY as u32));
                let target = random.below(VOCABULARY as u32);
                batch.targets.push(if position < length { target } else { HeadLoss::IGNORE });
            }
            batch.counted += length as usize;
        }
        Ok(())
    }
}

/// The outcomes of two steps, and the states before and after them.
type Steps = (Vec<StepOutcome>, [Vec<ParameterState>; 2]);

/// None where there is no backend.
fn steps(recipe: &Recipe, open: Open<'_>) -> Option<Steps> {
    let trainer = Trainer::new(open()?, recipe.clone());
    let mut trainer = trainer.expect("every backend can train every method");
    let before = trainer.parameter_states().expect("downloads");
    let step = |_| trainer.train_step(&Noise(&recipe.model), FlipSampling::Sample).expect("finite");
    let outcomes = (0..2).map(step).collect();
    let states = [before, trainer.parameter_states().expect("downloads")];
    assert_memory(&trainer);
    Some((outcomes, states))
}

/// The estimate counts every byte except scratch, which the device and its plans decide.
fn assert_memory(trainer: &Trainer) {
    let name = trainer.backend().device().backend;
    let entry = BACKENDS.iter().find(|entry| entry.name == name).expect("a known backend");
    let estimated = estimate(trainer.recipe(), entry).expect("it can be allocated");
    for (region, held) in trainer.backend().memory() {
        let expected = match region {
            Region::Parameters => estimated.weight_bytes,
            Region::Gradients => estimated.gradient_bytes,
            Region::Moments => estimated.moment_bytes,
            Region::Sparse => estimated.sparse_bytes,
            Region::Activations => estimated.activation_bytes,
            Region::Scratch => continue,
        };
        assert_eq!(held as u64, expected, "{region:?}");
    }
}

pub(super) fn check(open: Open<'_>) {
    let few = open().is_some_and(|backend| is_imitated(&*backend));
    let of_models = |preset: &'static Preset| {
        let count = if few && preset.name != "fst" { 1 } else { models().len() };
        models().into_iter().take(count).map(move |model| (preset, model, RULES[0]))
    };
    let fst = PRESETS.iter().find(|preset| preset.name == "fst").expect("the paper's method");
    let of_rules = RULES[1..].iter().map(|&rule| (fst, models()[0].clone(), rule));
    for (preset, model, rule) in PRESETS.iter().flat_map(of_models).chain(of_rules) {
        let recipe = recipe(preset, &model, rule);
        let Some((outcomes, states)) = steps(&recipe, open) else { continue };
        let name = preset.name;
        let again = steps(&recipe, open).expect("it could be opened before");
        assert!(again.0 == outcomes && again.1 == states, "{name}: other bits in another run");
        let [before, after] = &states;
        let loss = outcomes[0].loss;
        // Initial weights are small, so the first loss is near that of the uniform distribution.
        assert!((loss - (VOCABULARY as f64).ln()).abs() <= 0.1, "{name}: a first loss of {loss}");
        let sparsifiable = model.sparsifiable().expect("tiles");
        let kind = preset.method(LAMBDA).phases[0].mask();
        for (before, after) in before.iter().zip(after) {
            let name = format!("{name}: {}", before.name);
            let [rows, columns] = before.shape;
            let sparse = sparsifiable.iter().any(|(name, _)| *name == before.name);
            let w = ArrayView2::from_shape((rows, columns), &before.weight).expect("its shape");
            let expected = kind.filter(|_| sparse).map(|kind| mask_search(w, kind).expect("tiles"));
            assert!(before.mask == expected, "{name}: another mask than core's");
            assert!(after.weight.iter().all(|w| w.is_finite()), "{name}: not finite");
            assert!(after.weight != before.weight, "{name}: no update");
        }
    }
}
