//! Tiny runs and their data.

use std::{mem, num::NonZeroU32};

use sparse24_core::{
    MaskKind,
    op::Activation,
    phase::{Fraction, Refresh},
};
use sparse24_tests::oracle::arithmetic::Random;
use sparse24_train::{
    backend::{Arithmetic, Backend, cpu::CpuBackend, op::HeadLoss},
    method::{DgradOperand, GradientOperand, KeptValues, Method, Phase, Until, WeightOperand},
    model::{ActivationCheckpointing, Gpt2Spec, ModelSpec, Sparsify, transformer},
    nn::{BatchShape, Bias, NoWeightDecay, Prediction},
    objective::{Batch, DataError, Evaluation, Objective},
    optim::{Adam, AdamVariant, Optimizer, UpdateRule},
    schedule::{Decay, GradientAccumulation, Schedule},
    trainer::{FlipSampling, ParameterState, Recipe, StepOutcome, Trainer},
};

pub(crate) use super::oracle::fst::gpt2;
use super::oracle::pass::parameters;

/// Optimizer steps of a tiny run; ten of them are sparse.
pub(crate) const STEPS: u32 = 12;

/// floor(5 * STEPS / 6).
pub(crate) const SWITCH: u32 = 10;

/// Steps between refreshes: after steps 4 and 8.
pub(crate) const INTERVAL: u32 = 4;

/// The CPU backend in f32.
pub(crate) fn cpu() -> Box<dyn Backend> {
    Box::new(CpuBackend::new(Arithmetic::F32))
}

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

/// Two layers of width 8; two micro-batches of 21 tokens, not a multiple of four; one position is
/// never used.
///
/// Adam's epsilon is of the size of the gradients, so that a step is a smooth function of them.
pub(crate) fn recipe(method: Method) -> Recipe {
    Recipe {
        model: ModelSpec::Gpt2(Gpt2Spec {
            layers: 2,
            heads: 2,
            d_model: 8,
            d_ff: 16,
            sequence_length: 8,
            vocabulary: 11,
            activation: Activation::Gelu,
            bias: Bias::Present,
            sparsify: Sparsify::Ffn,
            prediction: None,
        }),
        method,
        steps: STEPS,
        batch: BatchShape { size: 3, sequence_length: 7 },
        checkpointing: ActivationCheckpointing::None,
        gradient_accumulation: GradientAccumulation::constant(
            NonZeroU32::new(2).expect("not zero"),
        ),
        replicas: NonZeroU32::MIN,
        dropout: 0.0,
        optimizer: Optimizer {
            rule: UpdateRule::AdamW(Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-3 }),
            clip: 0.5,
        },
        weight_decay: 0.1,
        no_weight_decay: NoWeightDecay::Vectors,
        ema_decay: None,
        schedule: Schedule {
            peak: 3e-2,
            floor: 3e-3,
            warmup_start: 0.0,
            warmup_steps: 3,
            decay_steps: STEPS,
            decay: Decay::Cosine,
            cooldown_steps: 4,
        },
        seed: 5,
    }
}

/// Changes the model of a recipe.
pub(crate) fn change(recipe: &mut Recipe, change: impl FnOnce(&mut Gpt2Spec)) {
    let mut spec = gpt2(recipe);
    change(&mut spec);
    recipe.model = ModelSpec::Gpt2(spec);
}

/// The recipe with a BERT of the same sizes.
pub(crate) fn bert(recipe: Recipe) -> Recipe {
    let model = sparse24_tests::bert(gpt2(&recipe));
    Recipe { model, ..recipe }
}

/// The recipe with a crammed BERT of the same sizes.
pub(crate) fn crammed_bert(recipe: Recipe) -> Recipe {
    let model = sparse24_tests::crammed_bert(gpt2(&recipe));
    Recipe { model, ..recipe }
}

/// The recipe with a DeiT of the same sizes, for images of four patches of 4x4 pixels.
pub(crate) fn deit(recipe: Recipe) -> Recipe {
    let model = sparse24_tests::deit(gpt2(&recipe));
    let sequence_length = model.extents().longest;
    Recipe { model, batch: BatchShape { sequence_length, ..recipe.batch }, ..recipe }
}

/// The recipe with a Transformer of the same sizes.
pub(crate) fn transformer(recipe: Recipe) -> Recipe {
    let model = sparse24_tests::transformer(gpt2(&recipe));
    Recipe { model, ..recipe }
}

/// Weights of standard deviation near 1/2, so that every part of a layer matters. A Transformer
/// multiplies its embeddings by sqrt(d), so they are smaller by that.
pub(crate) fn weights(spec: &ModelSpec) -> Vec<(String, Vec<f32>)> {
    let mut random = Random(12);
    let fill = |(name, [rows, columns]): (String, [usize; 2])| {
        let scale = if name == transformer::TOKEN_TABLE { (columns as f32).sqrt() } else { 1.0 };
        (name, (0..rows * columns).map(|_| random.symmetric() / scale).collect())
    };
    parameters(spec).into_iter().map(fill).collect()
}

/// A run at step 0 from [`weights`].
pub(crate) fn trainer(backend: Box<dyn Backend>, recipe: &Recipe) -> Trainer {
    let mut trainer = Trainer::new(backend, recipe.clone()).expect("a valid recipe");
    start_from(&mut trainer, &weights(&recipe.model));
    trainer
}

/// A run at step 0 from [`weights`], on the CPU.
pub(crate) fn start(recipe: &Recipe) -> Trainer {
    trainer(cpu(), recipe)
}

/// A step that succeeds and samples no flips.
pub(crate) fn step(trainer: &mut Trainer, objective: &dyn Objective) -> StepOutcome {
    trainer.train_step(objective, FlipSampling::Skip).expect("finite")
}

pub(crate) fn states(trainer: &mut Trainer) -> Vec<ParameterState> {
    trainer.parameter_states().expect("downloads")
}

/// Starts from these weights instead.
pub(crate) fn start_from(trainer: &mut Trainer, weights: &[(String, Vec<f32>)]) {
    let borrowed: Vec<(&str, &[f32])> =
        weights.iter().map(|(name, values)| (name.as_str(), values.as_slice())).collect();
    trainer.start_from(&borrowed).expect("a weight for every parameter");
}

/// The bits of w, m and v of every parameter, and the rest of its state.
pub(crate) type Bits = Vec<([Vec<u32>; 3], ParameterState)>;

pub(crate) fn bits(trainer: &mut Trainer) -> Bits {
    bits_of(states(trainer))
}

pub(crate) fn bits_of(states: Vec<ParameterState>) -> Bits {
    let of = |mut state: ParameterState| {
        let values =
            [&mut state.weight, &mut state.first_moment, &mut state.second_moment].map(mem::take);
        (values.map(|values| values.into_iter().map(f32::to_bits).collect()), state)
    };
    states.into_iter().map(of).collect()
}

/// The mean validation loss, in batches of the recipe's size.
pub(crate) fn evaluate(trainer: &mut Trainer, data: &Validation) -> f64 {
    let size = trainer.recipe().batch.size;
    trainer.evaluate(data, size).expect("no device fails").loss()
}

/// Random tokens and targets: a function of the step and micro-step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Noise {
    pub(crate) vocabulary: usize,
    pub(crate) sequence_length: usize,
    /// Values of an image, of a model of images.
    pub(crate) values_per_sequence: Option<usize>,
    /// Micro-batches that are joined into one.
    pub(crate) joined: u32,
    /// Tokens of each.
    pub(crate) tokens: usize,
    /// Whether sequences of this length end with padding.
    pub(crate) padded: Option<usize>,
    /// Whether tokens have segments.
    pub(crate) segmented: bool,
    /// Whether there are sources.
    pub(crate) translates: bool,
    /// The prediction of a fine-tuned model, and the length of its sequences.
    pub(crate) prediction: Option<(Prediction, usize)>,
}

impl Noise {
    pub(crate) fn of(recipe: &Recipe) -> Self {
        let bidirectional = !matches!(recipe.model, ModelSpec::Gpt2(_));
        Self {
            vocabulary: recipe.model.vocabulary(),
            sequence_length: recipe.batch.sequence_length,
            values_per_sequence: match &recipe.model {
                ModelSpec::Deit(spec) => Some(3 * spec.image_size * spec.image_size),
                _ => None,
            },
            joined: 1,
            tokens: recipe.batch.tokens(),
            translates: matches!(recipe.model, ModelSpec::Transformer(_)),
            padded: bidirectional.then_some(recipe.batch.sequence_length),
            segmented: matches!(recipe.model, ModelSpec::Bert(_)),
            prediction: recipe
                .model
                .prediction()
                .map(|prediction| (prediction, recipe.batch.sequence_length)),
        }
    }

    pub(crate) fn batch(&self, step: u32, micro_step: u32) -> Batch {
        let mut batch = Batch::default();
        for part in micro_step * self.joined..(micro_step + 1) * self.joined {
            let mut random = Random(u64::from(step) << 32 | u64::from(part));
            if let Some(values) = self.values_per_sequence {
                let size = self.tokens / self.sequence_length;
                self.add_images(&mut batch, size, values, &mut random);
                continue;
            }
            let mut ids = |_| random.below(self.vocabulary as u32);
            batch.tokens.extend((0..self.tokens).map(&mut ids));
            batch.targets.extend((0..self.tokens).map(&mut ids));
            let Some(sequence_length) = self.padded else { continue };
            for sequence in batch.targets.chunks_mut(sequence_length) {
                // A query that sees one key has no gradient but rounding noise, so at least two.
                let length = 2 + random.below(sequence_length as u32 - 1);
                sequence[length as usize..].fill(HeadLoss::IGNORE);
                // Not every token is a target.
                sequence[0] = HeadLoss::IGNORE;
                batch.lengths.push(length);
                let segments = (0..sequence_length).map(|_| random.below(2));
                batch.segments.extend(segments.filter(|_| self.segmented));
            }
            if self.translates {
                batch.source.extend((0..self.tokens).map(|_| random.below(self.vocabulary as u32)));
            }
        }
        if let (Some((prediction, sequence_length)), None) =
            (self.prediction, self.values_per_sequence)
        {
            // One target of each sequence, at any token but padding.
            let mut random = Random(u64::from(step) << 32 | u64::from(micro_step) | 1 << 63);
            for (i, sequence) in batch.targets.chunks_mut(sequence_length).enumerate() {
                let length = batch.lengths.get(i).map_or(sequence_length as u32, |&length| length);
                let target = match prediction {
                    Prediction::Class(classes) => random.below(classes as u32),
                    Prediction::Value => (random.symmetric()).to_bits(),
                    Prediction::Span => random.below(length),
                };
                sequence.fill(HeadLoss::IGNORE);
                sequence[random.below(length) as usize] = target;
            }
        }
        batch.counted = counted(&batch.targets);
        batch
    }
}

impl Noise {
    /// Adds images with two classes each.
    fn add_images(&self, batch: &mut Batch, size: usize, values: usize, random: &mut Random) {
        batch.pixels.extend((0..size * values).map(|_| random.symmetric()));
        for _ in 0..size {
            let mut class = || random.below(self.vocabulary as u32);
            batch.targets.push(class());
            batch.second_targets.push(class());
            batch.targets.resize(batch.targets.len() + self.sequence_length - 1, HeadLoss::IGNORE);
            batch.shares.push(random.symmetric().abs());
        }
    }
}

fn counted(targets: &[u32]) -> usize {
    targets.iter().filter(|&&target| target != HeadLoss::IGNORE).count()
}

impl Objective for Noise {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        *batch = self.batch(step, micro_step);
        Ok(())
    }
}

/// A validation set of the same tokens: one sequence more than a batch.
#[derive(Debug, Clone)]
pub(crate) struct Validation {
    pub(crate) sequence_length: usize,
    pub(crate) all: Batch,
}

impl Validation {
    pub(crate) fn of(recipe: &Recipe) -> Self {
        let BatchShape { size, sequence_length } = recipe.batch;
        let tokens = (size + 1) * sequence_length;
        let all = Noise { tokens, ..Noise::of(recipe) }.batch(u32::MAX, 0);
        Self { sequence_length, all }
    }
}

impl Evaluation for Validation {
    fn sequences(&self) -> usize {
        self.all.targets.len() / self.sequence_length
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        let range = first * self.sequence_length..(first + shape.size) * self.sequence_length;
        batch.clear();
        if self.all.pixels.is_empty() {
            batch.tokens.extend(&self.all.tokens[range.clone()]);
        } else {
            let values = self.all.pixels.len() / self.sequences();
            let images = first * values..(first + shape.size) * values;
            batch.pixels.extend(&self.all.pixels[images]);
        }
        batch.targets.extend(&self.all.targets[range.clone()]);
        if !self.all.lengths.is_empty() {
            batch.lengths.extend(&self.all.lengths[first..first + shape.size]);
            batch.segments.extend(self.all.segments.get(range.clone()).unwrap_or_default());
        }
        if !self.all.source.is_empty() {
            batch.source.extend(&self.all.source[range]);
        }
        batch.counted = counted(&batch.targets);
        Ok(())
    }
}
