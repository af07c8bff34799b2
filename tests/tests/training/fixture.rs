//! Tiny runs and their data.

use std::num::NonZeroU32;

use sparse24_core::{
    MaskKind,
    phase::{Fraction, Refresh},
};
use sparse24_train::{
    backend::{Activation, Backend},
    method::{DgradOperand, GradientOperand, KeptValues, Method, Phase, Until, WeightOperand},
    model::gpt2::{BatchShape, Gpt2Shape, Recompute, Sparsify},
    nn::linear24::Bias,
    optim::{AdamVariant, AdamW},
    schedule::Schedule,
    trainer::{Batches, Recipe, Trainer, Windows},
};

use super::oracle::{arithmetic::Random, gpt2::parameters};

/// Optimizer steps of a tiny run; ten of them are sparse.
pub(crate) const STEPS: u32 = 12;

/// floor(5 * STEPS / 6).
pub(crate) const SWITCH: u32 = 10;

/// Steps between refreshes: after steps 4 and 8.
pub(crate) const INTERVAL: u32 = 4;

/// Of a tiny run: none of its draws and masks lies so near a tie that rounding decides it.
const SEED: u64 = 5;

/// FST that refreshes every [`INTERVAL`] steps.
pub(crate) fn fst(lambda: f32) -> Method {
    Method {
        refresh: Refresh::Every(NonZeroU32::new(INTERVAL).expect("not zero")),
        ..Method::fst(lambda)
    }
}

/// A phase that ends with the run.
pub(crate) fn phase(
    forward: Option<MaskKind>,
    dgrad: DgradOperand,
    wgrad: GradientOperand,
) -> Phase {
    let forward = forward
        .map_or(WeightOperand::Dense, |kind| WeightOperand::Pruned(kind, KeptValues::Identity));
    Phase {
        until: Until::Fraction(Fraction::ONE),
        optimizer: AdamVariant::Standard,
        forward,
        dgrad,
        wgrad,
    }
}

/// Two layers of width 8; 21 tokens at a time, which four does not divide, in two micro-batches;
/// one position is never used.
///
/// Adam's epsilon is of the size of the gradients, so that a step is a smooth function of them.
pub(crate) fn recipe(method: Method) -> Recipe {
    Recipe {
        model: Gpt2Shape {
            layers: 2,
            heads: 2,
            width: 8,
            ffn_width: 16,
            context: 8,
            vocabulary: 11,
            activation: Activation::Gelu,
            bias: Bias::Present,
            sparsify: Sparsify::Ffn,
        },
        method,
        steps: STEPS,
        batch: BatchShape { sequences: 3, context: 7 },
        recompute: Recompute::None,
        accumulation: NonZeroU32::new(2).expect("not zero"),
        dropout: 0.0,
        optimizer: AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-3, clip: 0.5 },
        weight_decay: 0.1,
        schedule: Schedule { peak: 3e-2, floor: 3e-3, warmup_steps: 3, decay_steps: STEPS },
        seed: SEED,
    }
}

/// Weights of deviation near 1/2, so that every part of a layer matters.
pub(crate) fn weights(shape: &Gpt2Shape) -> Vec<(String, Vec<f32>)> {
    let mut random = Random(12);
    let fill = |(name, [rows, columns]): (String, [usize; 2])| {
        (name, (0..rows * columns).map(|_| random.symmetric()).collect())
    };
    parameters(shape).into_iter().map(fill).collect()
}

/// A run at step 0 from [`weights`].
pub(crate) fn trainer(backend: Box<dyn Backend>, recipe: &Recipe) -> Trainer {
    let mut trainer =
        Trainer::new(backend, recipe.clone()).expect("a run that this trainer can do");
    begin(&mut trainer, &weights(&recipe.model));
    trainer
}

/// Begins again from these weights.
pub(crate) fn begin(trainer: &mut Trainer, weights: &[(String, Vec<f32>)]) {
    let borrowed: Vec<(&str, &[f32])> =
        weights.iter().map(|(name, values)| (name.as_str(), values.as_slice())).collect();
    trainer.start_from(&borrowed).expect("a weight for every parameter");
}

/// Random tokens and targets: a function of the step and micro-step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Noise {
    pub(crate) vocabulary: usize,
    /// Micro-steps that are taken together.
    pub(crate) together: u32,
    /// Tokens of each.
    pub(crate) tokens: usize,
}

impl Noise {
    pub(crate) fn of(recipe: &Recipe) -> Self {
        Self {
            vocabulary: recipe.model.vocabulary,
            together: 1,
            tokens: recipe.batch.sequences * recipe.batch.context,
        }
    }

    pub(crate) fn batch(&self, step: u32, micro_step: u32) -> (Vec<u32>, Vec<u32>) {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for part in micro_step * self.together..(micro_step + 1) * self.together {
            let mut random = Random(u64::from(step) << 32 | u64::from(part));
            inputs.extend((0..self.tokens).map(|_| random.below(self.vocabulary as u32)));
            targets.extend((0..self.tokens).map(|_| random.below(self.vocabulary as u32)));
        }
        (inputs, targets)
    }
}

impl Batches for Noise {
    fn fill(&self, step: u32, micro_step: u32, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
        (*inputs, *targets) = self.batch(step, micro_step);
    }
}

/// The same tokens, held out: as many windows as a batch has sequences, and one more.
#[derive(Debug, Clone)]
pub(crate) struct HeldOut {
    pub(crate) context: usize,
    pub(crate) inputs: Vec<u32>,
    pub(crate) targets: Vec<u32>,
}

impl HeldOut {
    pub(crate) fn of(recipe: &Recipe) -> Self {
        let context = recipe.batch.context;
        let tokens = (recipe.batch.sequences + 1) * context;
        let (inputs, targets) = Noise { tokens, ..Noise::of(recipe) }.batch(u32::MAX, 0);
        Self { context, inputs, targets }
    }
}

impl Windows for HeldOut {
    fn count(&self) -> usize {
        self.inputs.len() / self.context
    }

    fn fill(
        &self,
        first: usize,
        sequences: usize,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> usize {
        let taken = first * self.context..(first + sequences) * self.context;
        (*inputs, *targets) =
            (self.inputs[taken.clone()].to_vec(), self.targets[taken.clone()].to_vec());
        taken.len()
    }
}
