//! Two steps of every method on a tiny model: masks of core, finite updates everywhere, the same
//! bits again.

use std::num::NonZeroU32;

use ndarray::ArrayView2;
use sparse24_core::{op::Activation, search::mask_search};
use sparse24_train::{
    method::{PRESETS, Preset},
    model::{ActivationCheckpointing, Gpt2Spec, ModelSpec, Sparsify},
    nn::{BatchShape, Bias},
    objective::{Batch, Objective},
    optim::AdamW,
    schedule::Schedule,
    trainer::{FlipSampling, ParameterState, Recipe, StepOutcome, Trainer},
};

use super::Open;
use crate::oracle::arithmetic::Random;

const VOCABULARY: usize = 19;
const LAMBDA: f32 = 2e-4;

fn recipe(preset: &Preset) -> Recipe {
    Recipe {
        model: ModelSpec::Gpt2(Gpt2Spec {
            layers: 2,
            heads: 2,
            d_model: 16,
            d_ff: 32,
            sequence_length: 8,
            vocabulary: VOCABULARY,
            activation: Activation::Swiglu,
            bias: Bias::Present,
            sparsify: Sparsify::FfnAndAttention,
        }),
        method: (preset.build)(LAMBDA),
        steps: 12,
        batch: BatchShape { size: 4, sequence_length: 8 },
        checkpointing: ActivationCheckpointing::None,
        gradient_accumulation_steps: NonZeroU32::new(2).expect("not zero"),
        dropout: 0.125,
        optimizer: AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, clip: 1.0 },
        weight_decay: 0.1,
        schedule: Schedule { peak: 1e-3, floor: 1e-4, warmup_steps: 0, decay_steps: 12 },
        seed: 3,
    }
}

struct Noise;

impl Objective for Noise {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) {
        let mut random = Random(u64::from(step) << 32 | u64::from(micro_step));
        batch.clear();
        batch.tokens.extend((0..32).map(|_| random.below(VOCABULARY as u32)));
        batch.targets.extend((0..32).map(|_| random.below(VOCABULARY as u32)));
        batch.counted = batch.targets.len();
    }
}

/// The outcomes of two steps, and the states before and after them.
type Steps = (Vec<StepOutcome>, [Vec<ParameterState>; 2]);

/// None where the backend cannot train the method, or there is no backend.
fn steps(preset: &Preset, open: Open<'_>) -> Option<Steps> {
    let (backend, recipe) = (open()?, recipe(preset));
    if let Err(refused) = recipe.check(&backend.capabilities()) {
        println!("skipped: {refused}");
        return None;
    }
    let mut trainer = Trainer::new(backend, recipe).expect("the backend can train it");
    let before = trainer.parameter_states().expect("downloads");
    let step = |_| trainer.train_step(&Noise, FlipSampling::Sample).expect("finite");
    let outcomes = (0..2).map(step).collect();
    Some((outcomes, [before, trainer.parameter_states().expect("downloads")]))
}

pub(super) fn check(open: Open<'_>) {
    for preset in PRESETS {
        let Some((outcomes, states)) = steps(preset, open) else { continue };
        let name = preset.name;
        let again = steps(preset, open).expect("it could be opened before");
        assert!(again.0 == outcomes && again.1 == states, "{name}: other bits in another run");
        let [before, after] = &states;
        let loss = outcomes[0].loss;
        // Initial weights are small, so the first loss is near that of the uniform distribution.
        assert!((loss - (VOCABULARY as f64).ln()).abs() <= 0.1, "{name}: a first loss of {loss}");
        let kind = (preset.build)(LAMBDA).phases[0].mask();
        for (before, after) in before.iter().zip(after) {
            let name = format!("{name}: {}", before.name);
            let [rows, columns] = before.shape;
            let sparse = before.name.ends_with(".weight")
                && (before.name.contains(".mlp.") || before.name.contains(".attn."));
            let w = ArrayView2::from_shape((rows, columns), &before.weight).expect("its shape");
            let expected = kind.filter(|_| sparse).map(|kind| mask_search(w, kind).expect("tiles"));
            assert!(before.mask == expected, "{name}: another mask than core's");
            assert!(after.weight.iter().all(|w| w.is_finite()), "{name}: not finite");
            assert!(after.weight != before.weight, "{name}: no update");
        }
    }
}
