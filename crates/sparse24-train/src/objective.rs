//! Objectives: what a model is trained to predict. An objective makes batches as a pure function of
//! (seed, step, micro-step), so there is no iterator whose position could be lost.

use sparse24_core::philox::{Purpose, Site, Stream, uniform};

use crate::{Error, backend::op::HeadLoss, nn::BatchShape};
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
    /// Input ids of an encoder, the shape of `tokens`, for a model that has one.
    pub source: Vec<u32>,
    /// Targets `[size, sequence_length]`: ids of tokens or of classes, or the bits of f32 values;
    /// [`IGNORE`](HeadLoss::IGNORE) where there is none. A fine-tuned model reads the rows that
    /// have one; the target of a span is at its first token, and is the position of its last.
    pub targets: Vec<u32>,
    /// Segment of each token, 0 or 1; empty if all are 0.
    pub segments: Vec<u32>,
    /// Tokens of each sequence that are no padding, of `source` if there is one; empty if none are.
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

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        let Self { tokens, source, targets, segments, lengths, second_targets, .. } = self;
        [tokens, source, targets, segments, lengths, second_targets]
            .into_iter()
            .for_each(Vec::clear);
        let Self { pixels, shares, counted, shape, .. } = self;
        [pixels, shares].into_iter().for_each(Vec::clear);
        (*counted, *shape) = (0, None);
    }

    /// Refuses a batch that does not consist of whole sequences of this shape, or of its own, which
    /// must fit into this one. Returns the batch's shape.
    pub(crate) fn check(&self, most: BatchShape) -> Result<BatchShape, Error> {
        let shape = self.shape.unwrap_or(most);
        let BatchShape { size, sequence_length } = shape;
        if shape.tokens() > most.tokens() || sequence_length > most.sequence_length {
            return Err(Error::Operand {
                operation: "batch",
                operand: "the shape",
                expected: [most.size, most.sequence_length],
                found: [size, sequence_length],
            });
        }
        let found = self.targets.iter().filter(|&&target| target != HeadLoss::IGNORE).count();
        let segments = if self.segments.is_empty() { [0, 1] } else { [size, sequence_length] };
        let lengths = if self.lengths.is_empty() { 0 } else { size };
        let mixed = if self.shares.is_empty() { 0 } else { size };
        // Images have no tokens; the model checks their pixels, whose number it knows.
        let tokens = if self.pixels.is_empty() { [size, sequence_length] } else { [0, 1] };
        let source = if self.source.is_empty() { [0, 1] } else { [size, sequence_length] };
        for (operand, expected, found) in [
            ("tokens", tokens, self.tokens.len()),
            ("source", source, self.source.len()),
            ("targets", [size, sequence_length], self.targets.len()),
            ("segments", segments, self.segments.len()),
            ("lengths", [lengths, 1], self.lengths.len()),
            ("second targets", [mixed, 1], self.second_targets.len()),
            ("shares", [mixed, 1], self.shares.len()),
            ("the number of targets that count", [found, 1], self.counted),
        ] {
            if expected[0] * expected[1] != found {
                return Err(Error::Operand {
                    operation: "batch",
                    operand,
                    expected,
                    found: [found, 1],
                });
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
    /// Fills the micro-batch of an optimizer step (from 1) and a micro-step (from 0): as many
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
    /// Fills a batch with `shape.size` sequences from `first` on. Fails as [`Objective::fill`].
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
    /// Mean loss per target, in nats.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.targets as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_and_padding_are_never_targets() {
        let rule = MaskedLm {
            seed: 1,
            probability: 0.5,
            mask_token: 4,
            vocabulary: 9,
            special_tokens: vec![0, 3, 4],
        };
        let tokens: Vec<u32> = (0..640).map(|i| i % 9).collect();
        let mut batch = Batch { tokens: tokens.clone(), ..Batch::default() };
        batch.lengths.resize(40, 12);
        rule.mask(1, 0, 16, &mut batch);
        let mut counts = [0; 4];
        for (i, (&target, (&before, &after))) in
            (0..).zip(batch.targets.iter().zip(tokens.iter().zip(&batch.tokens)))
        {
            if target == HeadLoss::IGNORE {
                assert_eq!(before, after, "token {i} changed");
                continue;
            }
            assert_eq!(target, before, "token {i}");
            assert!(i % 16 < 12 && !rule.special_tokens.contains(&before), "token {i}");
            counts[0] += 1;
            counts[1] += usize::from(after == 4);
            counts[2] += usize::from(after == before);
            counts[3] += usize::from(after != before && after != 4);
        }
        // Of 320 tokens half, and of these 80 %, 10 % and 10 %.
        assert_eq!(counts[0], batch.counted);
        let [all, masked, same, random] = counts;
        assert!((120..200).contains(&all) && (90..160).contains(&masked), "{counts:?}");
        assert!(same > 0 && random > 0, "{counts:?}");
    }
}
