//! Batches of pairs of like length.
//!
//! Invariant: a batch is a pure function of (seed, step, micro-step). Step s takes the next batches
//! of a sequence of epochs; an epoch has every pair once, in an order of its own.

use std::sync::{Arc, PoisonError};

use sparse24_train::{
    backend::op::HeadLoss,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation, Objective},
    schedule::GradientAccumulation,
};

use super::{
    epoch::{Epoch, LENGTHS, Planned},
    pairs::{PairSplit, Pairs},
};
use crate::data::{END, PADDING};

/// The batches of a run.
#[derive(Debug)]
pub struct TranslationBatches<'a> {
    /// The data.
    pub pairs: &'a Pairs,
    /// Seed of the run.
    pub seed: u64,
    /// The most sequences of the longest batches.
    pub most: BatchShape,
    /// Micro-batches per optimizer step.
    pub accumulation: GradientAccumulation,
}

impl TranslationBatches<'_> {
    fn epoch(&self, number: u32) -> Arc<Epoch> {
        let &Self { pairs, seed, most, .. } = self;
        let mut known = pairs.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it =
            |epoch: &&Arc<Epoch>| (epoch.seed, epoch.most, epoch.number) == (seed, most, number);
        match known.as_ref().filter(is_it) {
            Some(epoch) => epoch.clone(),
            None => {
                known.insert(Epoch::new(pairs.train.lengths(), seed, most, number).into()).clone()
            }
        }
    }

    /// The number of batches of an epoch, which is the same for all.
    #[must_use]
    pub fn batches_per_epoch(&self) -> usize {
        let known = self.pairs.epoch.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = known.filter(|epoch| (epoch.seed, epoch.most) == (self.seed, self.most));
        known.unwrap_or_else(|| self.epoch(0)).batches.len()
    }
}

impl Objective for TranslationBatches<'_> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let place = self.accumulation.before(step) + u64::from(micro_step);
        let count = self.batches_per_epoch() as u64;
        let epoch = self.epoch((place / count) as u32);
        let Planned { shape, pairs } = &epoch.batches[(place % count) as usize];
        batch.clear();
        batch.shape = Some(*shape);
        for &pair in pairs {
            push(self.pairs.train.pair(pair as usize), shape.sequence_length, batch);
        }
        // A batch that lacks pairs has the shape of the others of its length.
        for _ in pairs.len()..shape.size {
            push([&[], &[]], shape.sequence_length, batch);
        }
        Ok(())
    }
}

/// Appends a pair, filled up with padding. The decoder reads the end of a sentence and then the
/// target, without its end.
pub(super) fn push([source, target]: [&[u32]; 2], length: usize, batch: &mut Batch) {
    let Batch { source: sources, tokens, targets, lengths, counted, .. } = batch;
    let end = tokens.len() + length;
    sources.extend(source);
    sources.resize(end, PADDING);
    lengths.push(source.len() as u32);
    if let Some((_, before)) = target.split_last() {
        tokens.push(END);
        tokens.extend(before);
    }
    tokens.resize(end, PADDING);
    targets.extend(target);
    targets.resize(end, HeadLoss::IGNORE);
    *counted += target.len();
}

/// The validation split of a run, from short pairs to long ones.
#[derive(Debug)]
pub struct TranslationEvaluation<'a> {
    split: &'a PairSplit,
    order: Vec<usize>,
}

impl<'a> TranslationEvaluation<'a> {
    /// All pairs, or as many, evenly spaced, as have about this number of target tokens; 0 is all.
    #[must_use]
    pub fn new(pairs: &'a Pairs, tokens: usize) -> Self {
        let split = &pairs.validation;
        let (all, there) = (split.len(), split.target_tokens());
        let count = match tokens {
            1.. if tokens < there => (all * tokens).div_ceil(there),
            _ => all,
        };
        let mut order: Vec<usize> = (0..count).map(|i| i * all / count).collect();
        order.sort_by_cached_key(|&pair| split.length(pair));
        Self { split, order }
    }
}

impl Evaluation for TranslationEvaluation<'_> {
    fn sequences(&self) -> usize {
        self.order.len()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        let pairs = &self.order[first..first + shape.size];
        let longest = pairs.iter().map(|&pair| self.split.length(pair)).max().unwrap_or(0);
        let sequence_length = longest.next_multiple_of(LENGTHS);
        batch.clear();
        batch.shape = Some(BatchShape { sequence_length, ..shape });
        pairs.iter().for_each(|&pair| push(self.split.pair(pair), sequence_length, batch));
        Ok(())
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use std::{collections::BTreeSet, fs, num::NonZeroU32};

    use super::*;
    use crate::{data::TokenizerKind, translation::PairSource};

    fn pairs(sentences: usize) -> Pairs {
        let folder = tempfile::tempdir().unwrap();
        let text = |word: &str, split: usize| -> String {
            (0..split).map(|i| format!("{word}{i} {}\n", "x ".repeat(i % 20))).collect()
        };
        for (name, split) in [("train", sentences), ("valid", 5)] {
            for language in ["en", "de"] {
                let file = folder.path().join(format!("{name}.{language}"));
                fs::write(file, text(language, split)).unwrap();
            }
        }
        let languages = ["en", "de"].map(str::to_owned);
        let (folder, kind) = (folder.path().to_owned(), TokenizerKind::Bpe);
        Pairs::open(PairSource { folder, languages, kind, vocabulary: 300, longest: 32 }, None)
            .unwrap()
    }

    #[test]
    fn an_epoch_has_every_pair_once_in_batches_of_few_shapes() {
        let pairs = pairs(100);
        let most = BatchShape { size: 4, sequence_length: 32 };
        let micro_steps = NonZeroU32::new(2).unwrap();
        let accumulation = GradientAccumulation::constant(micro_steps);
        let batches = || TranslationBatches { pairs: &pairs, seed: 3, most, accumulation };
        let of = |step, micro_step| {
            let mut batch = Batch::default();
            batches().fill(step, micro_step, &mut batch).unwrap();
            batch
        };
        let count = batches().batches_per_epoch();
        let epoch = |number: usize| -> Vec<Batch> {
            let places = number * count..(number + 1) * count;
            places.map(|place| of(1 + place as u32 / 2, place as u32 % 2)).collect()
        };
        let epochs = [epoch(0), epoch(1)];
        let mut shapes = BTreeSet::new();
        for batches in &epochs {
            let mut sources = BTreeSet::new();
            let mut targets = 0;
            for batch in batches {
                let BatchShape { size, sequence_length } = batch.shape.unwrap();
                assert!(size * sequence_length <= most.tokens());
                shapes.insert((sequence_length, size));
                assert_eq!(batch.lengths.len(), size);
                targets += batch.counted;
                for (source, &length) in batch.source.chunks(sequence_length).zip(&batch.lengths) {
                    assert!(source[length as usize..].iter().all(|&token| token == PADDING));
                    if length > 0 {
                        assert!(sources.insert(source[..length as usize].to_vec()));
                    }
                }
            }
            assert_eq!((sources.len(), targets), (100, pairs.train.target_tokens()));
        }
        assert_ne!(epochs[0], epochs[1], "every epoch has one order");
        let lengths: BTreeSet<_> = shapes.iter().map(|&(length, _)| length).collect();
        assert_eq!(lengths.len(), shapes.len(), "a length has one size: {shapes:?}");
        assert_eq!(of(1, 1), epochs[0][1], "a batch is a function of its coordinates");
    }

    #[test]
    fn the_decoder_reads_what_comes_before_each_target() {
        let mut batch = Batch::default();
        push([&[7, 8, END], &[9, END]], 4, &mut batch);
        assert_eq!(batch.source, [7, 8, END, PADDING]);
        assert_eq!(batch.tokens, [END, 9, PADDING, PADDING]);
        assert_eq!(batch.targets, [9, END, HeadLoss::IGNORE, HeadLoss::IGNORE]);
        assert_eq!((&batch.lengths[..], batch.counted), (&[3][..], 2));
    }

    #[test]
    fn an_evaluation_has_every_pair_or_some_of_them() {
        let pairs = pairs(9);
        let all = TranslationEvaluation::new(&pairs, 0);
        let mut batch = Batch::default();
        all.fill(0, BatchShape { size: all.sequences(), sequence_length: 32 }, &mut batch).unwrap();
        assert_eq!((batch.counted, all.sequences()), (pairs.validation.target_tokens(), 5));
        assert!(TranslationEvaluation::new(&pairs, 20).sequences() < 5);
    }
}
