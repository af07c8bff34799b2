//! A copy of `sparse24-run`'s preset `quickstart`, because that crate does not build for browsers.
//! A test compares the two.

use core::num::NonZeroU32;

use sparse24_core::{
    op::{Activation, Adam, Optimizer, UpdateRule},
    philox::{Purpose, Site, Stream},
};
use sparse24_train::{
    method::Method,
    model::{ActivationCheckpointing, Gpt2Spec, ModelSpec, Sparsify},
    nn::{BatchShape, Bias, NoWeightDecay},
    objective::{Batch, DataError, Objective},
    schedule::{Decay, GradientAccumulation, Schedule},
    trainer::Recipe,
};

const CORPUS: &str = include_str!("../../sparse24-run/assets/corpus.txt");
const BATCH: BatchShape = BatchShape { size: 12, sequence_length: 64 };
const STEPS: u32 = 1500;

/// The preset with this seed.
#[must_use]
pub fn recipe(seed: u64) -> Recipe {
    Recipe {
        model: ModelSpec::Gpt2(Gpt2Spec {
            layers: 4,
            heads: 4,
            d_model: 128,
            d_ff: 512,
            sequence_length: BATCH.sequence_length,
            vocabulary: 256,
            activation: Activation::Gelu,
            bias: Bias::Absent,
            sparsify: Sparsify::Ffn,
            prediction: None,
        }),
        method: Method::fst(6e-3),
        steps: STEPS,
        batch: BATCH,
        checkpointing: ActivationCheckpointing::None,
        gradient_accumulation: GradientAccumulation {
            first: NonZeroU32::MIN,
            last: NonZeroU32::MIN,
            steps: STEPS,
        },
        replicas: NonZeroU32::MIN,
        dropout: 0.0,
        optimizer: Optimizer {
            rule: UpdateRule::AdamW(Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-8 }),
            clip: 1.0,
        },
        weight_decay: 0.1,
        no_weight_decay: NoWeightDecay::Vectors,
        ema_decay: None,
        schedule: Schedule {
            peak: 1e-3,
            floor: 1e-4,
            warmup_start: 0.0,
            warmup_steps: 150,
            decay_steps: STEPS,
            decay: Decay::Cosine,
            cooldown_steps: 150,
        },
        seed,
    }
}

/// The training split of the corpus that is embedded in `sparse24-run`, one token per byte.
#[derive(Debug, Clone, Copy)]
pub struct Text {
    bytes: &'static [u8],
    seed: u64,
}

impl Text {
    /// The first nine tenths of the characters; `seed` decides where the windows of a batch start.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let characters = CORPUS.chars().count();
        // Rounds like `sparse24-run`.
        let kept = (characters as f64 * (1.0 - 0.1)) as usize;
        let end = CORPUS.char_indices().nth(kept).map_or(CORPUS.len(), |(at, _)| at);
        Self { bytes: &CORPUS.as_bytes()[..end], seed }
    }
}

impl Objective for Text {
    /// Windows start where `Dataset::batch` of `sparse24-run` starts them: sequence i at floor(x
    /// (bytes - length) / 2^64), x being half i%2 of Philox call i/2.
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let length = BATCH.sequence_length;
        let starts = (self.bytes.len() - length) as u128;
        let stream = Stream::new(self.seed, Site::new(Purpose::DataOrder, 0), micro_step, step);
        let window = |sequence: usize| {
            let words = stream.words((sequence / 2) as u32);
            let half = 2 * (sequence % 2);
            let draw = u64::from(words[half]) | u64::from(words[half + 1]) << 32;
            let start = ((u128::from(draw) * starts) >> 64) as usize;
            self.bytes[start..=start + length].iter().map(|&byte| u32::from(byte))
        };
        let windows: Vec<u32> = (0..BATCH.size).flat_map(window).collect();
        batch.set_next_tokens(&windows, length);
        Ok(())
    }
}
