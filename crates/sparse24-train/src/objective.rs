//! Objectives: what a model is trained to predict. An objective makes batches as a pure function of
//! (seed, step, micro-step), so there is no iterator whose position could be lost.

use crate::nn::BatchShape;

/// The inputs and targets of a micro-batch on the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Batch {
    /// Input ids `[size, sequence_length]`, row-major.
    pub tokens: Vec<u32>,
    /// Target ids, the shape of `tokens`;
    /// [`IGNORE`](crate::backend::op::HeadLoss::IGNORE) where there is none.
    pub targets: Vec<u32>,
    /// Tokens of each sequence that are no padding; empty if all are.
    pub lengths: Vec<u32>,
    /// Targets that count.
    pub counted: usize,
}

impl Batch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        let Self { tokens, targets, lengths, counted } = self;
        [tokens, targets, lengths].into_iter().for_each(Vec::clear);
        *counted = 0;
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

/// Where the batches of training come from.
pub trait Objective {
    /// Fills the micro-batch of an optimizer step (from 1) and a micro-step (from 0).
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch);
}

/// What a model is evaluated on.
pub trait Evaluation {
    /// Number of sequences.
    fn sequences(&self) -> usize;
    /// Fills a batch with `shape.size` sequences from `first` on.
    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch);
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
