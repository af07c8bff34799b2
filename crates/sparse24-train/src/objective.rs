//! Objectives: what a model is trained to predict. An objective makes batches as a pure function of
//! (seed, step, micro-step), so there is no iterator whose position could be lost.

use sparse24_core::philox::{Purpose, Site, Stream, uniform};

use crate::{Error, Result, backend::op::HeadLoss, nn::BatchShape};
pub use sparse24_backend::DataError;

/// The inputs and targets of a micro-batch on the host.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Batch {
    /// Input ids `[size, sequence_length]`, row-major; empty if the inputs are images.
    pub tokens: Vec<u32>,
    /// Images, of which a sequence has one token per patch after the class token:
    /// `[size, sequence_length - 1]` patches, row by row of an image, each with its pixels
    /// `[3, patch size, patch size]` by channel, row and column. Empty if the inputs are tokens.
    pub pixels: Vec<f32>,
    /// Input ids of an encoder, the shape of `tokens`; empty if the model has none.
    pub source: Vec<u32>,
    /// Targets `[size, sequence_length]`: ids of tokens or of classes, or the bits of f32 values;
    /// [`IGNORE`](HeadLoss::IGNORE) where there is none. A fine-tuned model reads the rows that
    /// have one; the target of a span is at its first token, and is the position of its last.
    pub targets: Vec<u32>,
    /// Segment of each token, 0 or 1; empty if all are 0.
    pub segments: Vec<u32>,
    /// Tokens of each sequence that are no padding, of `source` if there is one; empty if all are.
    /// A causal model ignores it, but for spans: padding comes last, and its targets are ignored.
    pub lengths: Vec<u32>,
    /// Second targets `[size]` of sequences that were mixed from two; empty if none were.
    pub second_targets: Vec<u32>,
    /// The share of the first target of each sequence `[size]`; that of the second is the rest.
    pub shares: Vec<f32>,
    /// Targets that are not [`IGNORE`](HeadLoss::IGNORE).
    pub counted: usize,
    /// The shape, where it is not that of all batches; it has at most their tokens, in sequences of
    /// at most their length. With dropout of attention, it has at most their 64x64 tiles, which are
    /// whole in every sequence.
    pub shape: Option<BatchShape>,
}

/// The inputs that a model reads; a batch has no others. Images may have second targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inputs {
    /// Tokens.
    Tokens,
    /// Tokens, in no more sequences than the recipe says, however short.
    Sequences,
    /// Like `Sequences`, with optional segments.
    Segments,
    /// Tokens, and a source.
    Translation,
    /// Images with this many values each.
    Images(usize),
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        let Self { tokens, source, targets, segments, lengths, second_targets, .. } = self;
        let ids = [tokens, source, targets, segments, lengths, second_targets];
        ids.into_iter().for_each(Vec::clear);
        [&mut self.pixels, &mut self.shares].into_iter().for_each(Vec::clear);
        (self.counted, self.shape) = (0, None);
    }

    /// Fills in lengths that are left out. Refuses a batch that does not consist of these inputs in
    /// whole sequences of shape `most`, or of its own, which must fit into `most`, with the same
    /// length for images. Returns the batch's shape.
    ///
    /// # Errors
    /// [`Error::Operand`] names what does not fit.
    pub fn complete(&mut self, most: BatchShape, inputs: Inputs) -> Result<BatchShape> {
        let shape = self.shape.unwrap_or(most);
        let BatchShape { size, sequence_length } = shape;
        let is_larger = shape.tokens() > most.tokens() || sequence_length > most.sequence_length;
        let are_images = matches!(inputs, Inputs::Images(_));
        let is_cut = are_images && sequence_length != most.sequence_length;
        let is_more = size > most.size && matches!(inputs, Inputs::Sequences | Inputs::Segments);
        let misfit = |operand, expected, found| {
            Err(Error::Operand { operation: "batch", operand, expected, found })
        };
        if is_larger || is_cut || is_more || shape.tokens() == 0 {
            return misfit("the shape", [most.size, most.sequence_length], [size, sequence_length]);
        }
        let found = self.targets.iter().filter(|&&target| target != HeadLoss::IGNORE).count();
        let (none, whole) = ([0, 1], [size, sequence_length]);
        let [tokens, source, pixels] = match inputs {
            Inputs::Tokens | Inputs::Sequences | Inputs::Segments => [whole, none, none],
            Inputs::Translation => [whole, whole, none],
            Inputs::Images(values) => [none, none, [size, values]],
        };
        let has_segments = inputs == Inputs::Segments && !self.segments.is_empty();
        let segments = if has_segments { whole } else { none };
        let mixed = if are_images && !self.shares.is_empty() { size } else { 0 };
        if self.lengths.is_empty() {
            self.lengths.resize(size, sequence_length as u32);
        }
        for (operand, expected, found) in [
            ("tokens", tokens, self.tokens.len()),
            ("source", source, self.source.len()),
            ("pixels", pixels, self.pixels.len()),
            ("targets", whole, self.targets.len()),
            ("segments", segments, self.segments.len()),
            ("lengths", [size, 1], self.lengths.len()),
            ("second targets", [mixed, 1], self.second_targets.len()),
            ("shares", [mixed, 1], self.shares.len()),
            ("the number of targets that count", [found, 1], self.counted),
        ] {
            if expected[0] * expected[1] != found {
                return misfit(operand, expected, [found, 1]);
            }
        }
        Ok(shape)
    }

    /// Next-token prediction: of windows of `sequence_length + 1` tokens, the first are inputs and
    /// the last are targets.
    ///
    /// # Panics
    /// If the windows have another length.
    pub fn set_next_tokens(&mut self, windows: &[u32], sequence_length: usize) {
        self.clear();
        let windows = windows.chunks_exact(sequence_length + 1);
        assert!(windows.remainder().is_empty(), "windows have sequence_length + 1 tokens");
        for window in windows {
            self.tokens.extend(&window[..sequence_length]);
            self.targets.extend(&window[1..]);
        }
        self.counted = self.targets.len();
    }
}

/// The usual probability that a token is a target (Devlin et al. 2018).
pub const MASKED: f32 = 0.15;

/// The most targets among p tokens that are targets with this probability: six standard deviations
/// above the mean, which one batch in 10^9 would exceed.
#[must_use]
pub fn most_targets(probability: f32, p: usize) -> usize {
    let (share, tokens) = (f64::from(probability), p as f64);
    let most = share * tokens + 6.0 * (share * (1.0 - share) * tokens).sqrt();
    (most.ceil() as usize).min(p)
}

/// Masked-token prediction (Devlin et al. 2018): each token but special ones is a target with some
/// probability; of the targets 80 % are replaced by the mask token, 10 % by a random token, and
/// 10 % stay.
#[derive(Debug, Clone, PartialEq)]
pub struct MaskedLm {
    /// Seed of the run.
    pub seed: u64,
    /// Probability that a token is a target, in `[0, 1]`.
    pub probability: f32,
    /// The id that replaces targets.
    pub mask_token: u32,
    /// Random tokens are drawn from `0..vocabulary`.
    pub vocabulary: u32,
    /// Tokens that are never targets, such as separators.
    pub special_tokens: Vec<u32>,
}

impl MaskedLm {
    /// Makes targets of the tokens of a batch `[size, sequence_length]` and replaces them. Token i
    /// draws words 0 to 2 of call i of the stream (seed, data order 1, micro-step, step): whether
    /// it is a target, what becomes of it, and the random token. Padding and special tokens are
    /// never targets, nor is a token after [`most_targets`]; `lengths` is filled in if it is empty.
    ///
    /// # Panics
    /// If the tokens are not whole sequences, or have other lengths than sequences.
    pub fn mask(&self, step: u32, micro_step: u32, sequence_length: usize, batch: &mut Batch) {
        let Batch { tokens, targets, lengths, counted, .. } = batch;
        assert!(tokens.len().is_multiple_of(sequence_length), "tokens are whole sequences");
        if lengths.is_empty() {
            lengths.resize(tokens.len() / sequence_length, sequence_length as u32);
        }
        let stream = Stream::new(self.seed, Site::new(Purpose::DataOrder, 1), micro_step, step);
        let mut left = most_targets(self.probability, tokens.len());
        targets.clear();
        for (i, token) in tokens.iter_mut().enumerate() {
            let [chosen, fate, random, _] = stream.words(i as u32);
            let is_padding = i % sequence_length >= lengths[i / sequence_length] as usize;
            let is_text = !is_padding && !self.special_tokens.contains(token);
            if !is_text || uniform(chosen) >= self.probability || left == 0 {
                targets.push(HeadLoss::IGNORE);
                continue;
            }
            left -= 1;
            targets.push(*token);
            match uniform(fate) {
                ..0.8 => *token = self.mask_token,
                ..0.9 => *token = ((u64::from(random) * u64::from(self.vocabulary)) >> 32) as u32,
                _ => {}
            }
        }
        *counted = targets.iter().filter(|&&target| target != HeadLoss::IGNORE).count();
    }
}

/// Where the batches of training come from.
pub trait Objective {
    /// Fills the empty micro-batch of an optimizer step (from 1) and a micro-step (from 0): as many
    /// sequences, of the length, that the recipe says, or of a [shape](Batch::shape) within it.
    /// Batches of a length have one size. Fails only if the data cannot be read.
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError>;
}

impl<T: Objective + ?Sized> Objective for Box<T> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        (**self).fill(step, micro_step, batch)
    }
}

/// The data that a model is evaluated on.
pub trait Evaluation {
    /// Number of sequences.
    fn sequences(&self) -> usize;
    /// Fills an empty batch with `shape.size` sequences from `first` on. Fails like
    /// [`Objective::fill`].
    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError>;
}

impl<T: Evaluation + ?Sized> Evaluation for Box<T> {
    fn sequences(&self) -> usize {
        (**self).sequences()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        (**self).fill(first, shape, batch)
    }
}

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct Metrics {
    /// Sum of the losses of all targets, in nats.
    pub loss_sum: f64,
    /// Targets that count.
    pub targets: usize,
}

impl Metrics {
    /// Mean loss per target, in nats; NaN without targets.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.targets as f64
    }
}
