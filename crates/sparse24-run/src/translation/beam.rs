//! Beam search (Graves 2012; Wu et al. 2016 for the length penalty).
//!
//! Invariant: the translation of a sentence does not depend on the sentences beside it, but for the
//! rounding of their common products.

use sparse24_train::{
    backend::op::HeadLoss, model::DecodingStep, nn::BatchShape, objective::Batch, trainer::Trainer,
};

use super::{batch::push, epoch::LENGTHS};
use crate::{
    Error, Result,
    data::{END, PADDING, Tokenizer},
};

/// Maximum number of tokens that a translation may have beyond those of its source.
pub const LONGER: usize = 50;

/// A model that translates.
pub trait Decoder {
    /// The most tokens of a batch, and of a sentence.
    fn most(&self) -> BatchShape;
    /// Encodes the sources of a batch; see [`Trainer::encode`].
    ///
    /// # Errors
    /// Errors of the model.
    fn encode(&mut self, batch: &Batch) -> Result;
    /// The logits after one more token; see [`Trainer::decode`].
    ///
    /// # Errors
    /// Errors of the model.
    fn decode(&mut self, step: &DecodingStep<'_>) -> Result<Vec<f32>>;
    /// Whether to end before the next sentences.
    fn is_interrupted(&self) -> bool;
}

impl Decoder for Trainer {
    fn most(&self) -> BatchShape {
        self.recipe().batch
    }

    fn encode(&mut self, batch: &Batch) -> Result {
        Ok(Self::encode(self, batch)?)
    }

    fn decode(&mut self, step: &DecodingStep<'_>) -> Result<Vec<f32>> {
        Ok(Self::decode(self, step)?)
    }

    fn is_interrupted(&self) -> bool {
        Self::is_interrupted(self)
    }
}

/// A search for the most probable translation.
///
/// A step extends the b hypotheses of a sentence by one token each, and looks at the 2b extensions
/// of the highest log probability; of equal ones, at that of the earlier hypothesis and then of the
/// lower id. Those among the first b that end are finished; of the others, the first b that do not
/// end go on. A sentence is done when it has b finished translations, or when they have as many
/// tokens as the source and 50 more, or as the model has: then each ends. Its translation is the
/// one with the highest score, the log probability over (tokens, the end included)^alpha; of equal
/// ones the first. Padding and the start token are never chosen, and a translation is not empty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamSearch {
    /// Hypotheses of a sentence, b, at least 1.
    pub beam: usize,
    /// alpha.
    pub length_penalty: f64,
    /// Token ids that may be chosen: those of the tokenizer.
    pub vocabulary: usize,
}

/// A translation and its score.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Translation {
    /// Token ids, without the end.
    pub tokens: Vec<u32>,
    /// Log probability over length^alpha.
    pub score: f64,
}

/// The search for one sentence.
struct Sentence {
    /// The most tokens, the end included.
    longest: usize,
    /// Tokens and log probabilities; fewer than the beam only at the start.
    open: Vec<(Vec<u32>, f64)>,
    finished: Vec<Translation>,
}

impl BeamSearch {
    /// The search of Vaswani et al. 2017, b = 4 and alpha = 0.6, with a narrower beam for a model
    /// whose batches have fewer sequences.
    #[must_use]
    pub fn usual(trainer: &Trainer, tokenizer: &Tokenizer) -> Self {
        let beam = trainer.recipe().batch.size.clamp(1, 4);
        Self { beam, length_penalty: 0.6, vocabulary: tokenizer.vocabulary() as usize }
    }

    /// Translates sentences, each with its end. `progress` is called with sentences done.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; errors from the model, such as for a sentence that is empty or too
    /// long.
    ///
    /// # Panics
    /// If [`Self::vocabulary`] exceeds the model's.
    pub fn translate(
        &self,
        decoder: &mut dyn Decoder,
        sources: &[&[u32]],
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<Translation>> {
        let most = decoder.most();
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|&number| sources[number].len());
        let mut translations = vec![Translation::default(); sources.len()];
        let mut done = 0;
        while done < order.len() {
            if decoder.is_interrupted() {
                return Err(Error::Interrupted);
            }
            progress(done);
            // Sources are sorted, so the last of a batch is its longest.
            let fits = |count: usize| {
                let longest = sources[order[done + count - 1]].len();
                let length = longest.next_multiple_of(LENGTHS);
                let steps = self.longest(longest, most);
                count * length <= most.tokens() && count * self.beam * steps <= most.tokens()
            };
            let count = (1..=order.len() - done).take_while(|&count| fits(count)).last();
            let numbers = &order[done..done + count.unwrap_or(1)];
            let batch: Vec<&[u32]> = numbers.iter().map(|&number| sources[number]).collect();
            for (&number, translation) in numbers.iter().zip(self.batch(decoder, &batch)?) {
                translations[number] = translation;
            }
            done += numbers.len();
        }
        progress(done);
        Ok(translations)
    }

    /// The most tokens of a translation, its end included.
    fn longest(&self, source: usize, most: BatchShape) -> usize {
        (source + LONGER).min(most.sequence_length)
    }

    fn batch(&self, decoder: &mut dyn Decoder, sources: &[&[u32]]) -> Result<Vec<Translation>> {
        let most = decoder.most();
        let longest = sources.iter().map(|source| source.len()).max().unwrap_or(0);
        let sequence_length = longest.next_multiple_of(LENGTHS);
        let shape = BatchShape { size: sources.len(), sequence_length };
        let mut batch = Batch::default();
        batch.shape = Some(shape);
        sources.iter().for_each(|source| push([source, &[]], sequence_length, &mut batch));
        debug_assert!(batch.targets.iter().all(|&target| target == HeadLoss::IGNORE));
        decoder.encode(&batch)?;
        let mut sentences: Vec<Sentence> = sources
            .iter()
            .map(|source| Sentence {
                longest: self.longest(source.len(), most),
                open: vec![(Vec::new(), 0.0)],
                finished: Vec::new(),
            })
            .collect();
        let rows = sources.len() * self.beam;
        let longest = self.longest(longest, most);
        let (mut tokens, mut parents) = (vec![END; rows], (0..rows as u32).collect::<Vec<_>>());
        for position in 0..longest {
            let logits = decoder.decode(&DecodingStep {
                sources: shape,
                position,
                longest,
                tokens: &tokens,
                parents: &parents,
            })?;
            let width = logits.len() / rows;
            tokens.fill(PADDING);
            parents = (0..rows as u32).collect();
            for (at, sentence) in sentences.iter_mut().enumerate() {
                let first = at * self.beam;
                let rows = logits[first * width..].chunks(width);
                for (row, (parent, token)) in self.advance(sentence, rows).into_iter().enumerate() {
                    tokens[first + row] = token;
                    parents[first + row] = (first + parent) as u32;
                }
            }
            if sentences.iter().all(|sentence| sentence.open.is_empty()) {
                break;
            }
        }
        Ok(sentences.into_iter().map(Sentence::best).collect())
    }

    /// Extends the hypotheses of a sentence. Returns the parent and the token of each open one.
    fn advance<'a>(
        &self,
        sentence: &mut Sentence,
        logits: impl Iterator<Item = &'a [f32]>,
    ) -> Vec<(usize, u32)> {
        let Sentence { longest, open, finished } = sentence;
        let Some(position) = open.first().map(|(tokens, _)| tokens.len()) else {
            return Vec::new();
        };
        let is_last = position + 1 == *longest;
        // Sorted from the best on.
        let mut best: Vec<(f64, usize, u32)> = Vec::new();
        for (parent, ((_, before), logits)) in open.iter().zip(logits).enumerate() {
            let logits = &logits[..self.vocabulary];
            let maximum = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|&x| f64::from(x - maximum).exp()).sum();
            let offset = before - f64::from(maximum) - sum.ln();
            for (token, &logit) in (0..).zip(logits) {
                let is_allowed = match token {
                    END => position > 0 || is_last,
                    PADDING | 0 => false,
                    _ => !is_last,
                };
                let score = offset + f64::from(logit);
                let is_full = best.len() == 2 * self.beam;
                if !is_allowed || is_full && best.last().is_some_and(|worst| score <= worst.0) {
                    continue;
                }
                best.truncate(2 * self.beam - 1);
                let place = best.partition_point(|other| other.0 >= score);
                best.insert(place, (score, parent, token));
            }
        }
        let (mut next, mut continued) = (Vec::new(), Vec::new());
        for (rank, &(probability, parent, token)) in best.iter().enumerate() {
            if token == END {
                if rank < self.beam && finished.len() < self.beam {
                    let length = (position + 1) as f64;
                    let score = probability / length.powf(self.length_penalty);
                    finished.push(Translation { tokens: open[parent].0.clone(), score });
                }
            } else if next.len() < self.beam {
                let mut tokens = open[parent].0.clone();
                tokens.push(token);
                next.push((tokens, probability));
                continued.push((parent, token));
            }
        }
        if is_last || finished.len() == self.beam {
            (next, continued) = (Vec::new(), Vec::new());
        }
        *open = next;
        continued
    }
}

impl Sentence {
    /// The best finished translation, the first of equal ones.
    fn best(self) -> Translation {
        let better = |best: Translation, other: Translation| {
            if other.score > best.score { other } else { best }
        };
        self.finished.into_iter().reduce(better).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model whose logits after a token depend on nothing but that token and the source's first.
    struct Chain {
        rows: Vec<Vec<f32>>,
        first: Vec<u32>,
        beam: usize,
    }

    impl Decoder for Chain {
        fn most(&self) -> BatchShape {
            BatchShape { size: 8, sequence_length: 8 }
        }

        fn encode(&mut self, batch: &Batch) -> Result {
            let length = batch.shape.unwrap().sequence_length;
            self.first = batch.source.chunks(length).map(|source| source[0]).collect();
            Ok(())
        }

        fn decode(&mut self, step: &DecodingStep<'_>) -> Result<Vec<f32>> {
            let row = |(at, &token): (usize, &u32)| {
                let mut row = self.rows[token as usize].clone();
                row[self.first[at / self.beam] as usize] += 1.0;
                row
            };
            Ok(step.tokens.iter().enumerate().flat_map(row).collect())
        }

        fn is_interrupted(&self) -> bool {
            false
        }
    }

    /// From 4 on: 4 is followed by 5 or 6, these by the end.
    fn chain(beam: usize) -> Chain {
        let row = |likely: &[(usize, f32)]| {
            let mut row = vec![-9.0; 7];
            likely.iter().for_each(|&(token, logit)| row[token] = logit);
            row
        };
        let rows = vec![
            row(&[]),
            row(&[]),
            row(&[(4, 3.0), (5, 2.9)]),
            row(&[]),
            row(&[(5, 1.0), (6, 0.7)]),
            row(&[(2, 0.1), (4, 0.0)]),
            row(&[(2, 5.0)]),
        ];
        Chain { rows, first: Vec::new(), beam }
    }

    #[test]
    fn a_wider_beam_finds_a_more_probable_translation() {
        let of = |beam: usize, length_penalty: f64| {
            let search = BeamSearch { beam, length_penalty, vocabulary: 7 };
            let sources: [&[u32]; 2] = [&[3, END], &[6, 3, END]];
            let mut done = Vec::new();
            let found = search.translate(&mut chain(beam), &sources, |n| done.push(n)).unwrap();
            assert_eq!(done.last(), Some(&2));
            let alone = search.translate(&mut chain(beam), &sources[1..], |_| {}).unwrap();
            assert_eq!(found[1..], alone, "a sentence depends on its neighbours");
            found
        };
        // Greedy search takes 4, then 5; its end is as likely as not.
        assert_eq!(of(1, 0.0)[0].tokens[..2], [4, 5]);
        let found = of(3, 0.0);
        assert_eq!(found[0].tokens, [5]);
        assert_eq!(found[1].tokens, [4, 6], "the source prefers 6");
        assert!(of(3, 2.0)[0].tokens.len() > 1, "a length penalty prefers longer ones");
    }

    #[test]
    fn a_translation_ends_where_the_model_does() {
        let search = BeamSearch { beam: 2, length_penalty: 1.0, vocabulary: 7 };
        let mut never = chain(2);
        never.rows.iter_mut().for_each(|row| row[END as usize] = -1e9);
        let found = search.translate(&mut never, &[&[3, END]], |_| {}).unwrap();
        assert_eq!(found[0].tokens.len(), 7, "the eighth token is the end");
    }
}
