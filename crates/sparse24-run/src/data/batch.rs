//! The data that an optimizer step and an evaluation see.
//!
//! Invariant: a batch is a pure function of (seed, step, micro-step): no iterator, no position,
//! nothing to checkpoint. Deliberately absent: epochs; windows are drawn with replacement.

use sparse24_core::philox::{Purpose, Site, Stream};

use super::{Dataset, Split};
use crate::Result;
use sparse24_train::backend::op::HeadLoss;

/// Which windows a micro-step sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// Seed of the run.
    pub seed: u64,
    /// The optimizer step.
    pub step: u32,
    /// The micro-step, counted over all ranks.
    pub micro_step: u32,
    /// How many windows.
    pub sequences: usize,
    /// Tokens a window predicts.
    pub context: usize,
}

impl Dataset {
    /// Draws `sequences` windows of `context` + 1 training tokens; fills `inputs` and `targets`,
    /// `[sequences, context]` each, row-major: inputs are the first `context` tokens of a window,
    /// targets the last.
    ///
    /// With n tokens there are n - context starts. Sequence i takes words 2(i%2) (low) and 2(i%2)+1
    /// (high) of call i/2 of the stream (seed, data order, micro-step, step) as one u64 x; it
    /// starts at floor(x * (n - context) / 2^64), which is uniform to within (n - context) / 2^64.
    /// Micro-steps are global, so that ranks see different windows.
    ///
    /// # Errors
    /// Like [`Split::copy_to`].
    ///
    /// # Panics
    /// For a dataset that [`Dataset::check_context`] refuses.
    pub fn batch(&self, draw: Draw, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result {
        let Draw { seed, step, micro_step, sequences, context } = draw;
        let tokens = self.train();
        assert!(
            tokens.len() > context,
            "{} tokens should have been refused for a context of {context}",
            tokens.len()
        );
        let starts = (tokens.len() - context) as u128;
        let stream = Stream::new(seed, Site::new(Purpose::DataOrder, 0), micro_step, step);
        inputs.clear();
        targets.clear();
        for sequence in 0..sequences {
            let words = stream
                .words(u32::try_from(sequence / 2).expect("a batch has fewer than 2^33 sequences"));
            let half = 2 * (sequence % 2);
            let draw = u64::from(words[half]) | u64::from(words[half + 1]) << 32;
            let start = ((u128::from(draw) * starts) >> 64) as usize;
            tokens.copy_to(start, context, inputs)?;
            tokens.copy_to(start + 1, context, targets)?;
        }
        Ok(())
    }

    /// The validation split in windows of this context: all of it, or, if `most` is not 0, as few
    /// windows as hold that many tokens, evenly spaced.
    ///
    /// # Panics
    /// For a context of 0.
    #[must_use]
    pub fn evaluation_windows(&self, context: usize, most: usize) -> EvaluationWindows<'_> {
        assert!(context > 0, "a window has a context");
        let tokens = self.validation();
        let all = tokens.len().saturating_sub(1).div_ceil(context);
        let count = if most == 0 { all } else { all.min(most.div_ceil(context)) };
        EvaluationWindows { tokens, context, all, count }
    }
}

/// The validation tokens t_0 .. t_(n-1) in consecutive windows: window w predicts t_(wC+1) ..
/// t_((w+1)C) from t_(wC) .. t_((w+1)C-1).
///
/// So every token but the first is predicted exactly once, from the at most C tokens before it in
/// its window, and the mean loss over [`EvaluationWindows::predictions`] is that of the whole
/// split. Of `a` windows, `c` evenly spaced ones are the windows floor(k a / c) for k = 0 .. c-1.
/// The last window of the split is filled up with input 0 and target [`HeadLoss::IGNORE`]; under
/// causal attention the filling reaches no prediction that counts.
#[derive(Debug, Clone, Copy)]
pub struct EvaluationWindows<'a> {
    tokens: &'a Split,
    context: usize,
    /// Windows of the whole split.
    all: usize,
    /// Windows to evaluate.
    count: usize,
}

impl EvaluationWindows<'_> {
    /// Number of windows.
    #[must_use]
    pub fn count(self) -> usize {
        self.count
    }

    /// Number of predicted tokens.
    #[must_use]
    pub fn predictions(self) -> usize {
        (0..self.count).map(|window| self.window(window).1).sum()
    }

    /// First token and number of predictions of a window; none beyond the last.
    fn window(self, number: usize) -> (usize, usize) {
        if number >= self.count {
            return (0, 0);
        }
        let window = (number as u128 * self.all as u128 / self.count as u128) as usize;
        let start = window * self.context;
        (start, self.context.min(self.tokens.len() - 1 - start))
    }

    /// Fills `inputs` and `targets`, `[sequences, context]` each, with the windows from `first` on;
    /// beyond the last window all is filling. Returns the number of targets that count.
    ///
    /// # Errors
    /// Like [`Split::copy_to`].
    pub fn fill(
        self,
        first: usize,
        sequences: usize,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> Result<usize> {
        inputs.clear();
        targets.clear();
        let mut counted = 0;
        for window in first..first + sequences {
            let (start, length) = self.window(window);
            self.tokens.copy_to(start, length, inputs)?;
            self.tokens.copy_to(start + usize::from(length > 0), length, targets)?;
            let filled = (window - first + 1) * self.context;
            inputs.resize(filled, 0);
            targets.resize(filled, HeadLoss::IGNORE);
            counted += length;
        }
        Ok(counted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::{Corpus, Tokenizer};

    /// Training tokens 0..n, validation tokens the rest of 256.
    fn dataset(train: u8) -> Dataset {
        let text: String = (0..128_u8).map(char::from).collect();
        let corpus = Corpus::from_text(text, "ascii").unwrap();
        Dataset::from_corpus(&corpus, Tokenizer::Byte, 1.0 - f64::from(train) / 128.0).unwrap()
    }

    fn batch(
        data: &Dataset,
        seed: u64,
        step: u32,
        micro_step: u32,
        sequences: usize,
        context: usize,
    ) -> (Vec<u32>, Vec<u32>) {
        let (mut inputs, mut targets) = (vec![u32::MAX; 3], vec![u32::MAX; 3]);
        let draw = Draw { seed, step, micro_step, sequences, context };
        data.batch(draw, &mut inputs, &mut targets).unwrap();
        (inputs, targets)
    }

    #[test]
    fn windows_are_drawn_as_documented() {
        let data = dataset(100);
        let (inputs, targets) = batch(&data, 7, 3, 5, 3, 10);
        let stream = Stream::new(7, Site::new(Purpose::DataOrder, 0), 5, 3);
        let (first, second) = (stream.words(0), stream.words(1));
        let start = |low: u32, high: u32| {
            ((f64::from(high) * 2f64.powi(32) + f64::from(low)) / 2f64.powi(64) * 90.0) as u32
        };
        for (i, start) in
            [start(first[0], first[1]), start(first[2], first[3]), start(second[0], second[1])]
                .into_iter()
                .enumerate()
        {
            assert_eq!(inputs[10 * i..10 * i + 10], (start..start + 10).collect::<Vec<_>>());
            assert_eq!(targets[10 * i..10 * i + 10], (start + 1..start + 11).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_start_is_drawn_about_equally_often() {
        let data = dataset(20);
        let mut drawn = [0_u32; 16];
        for step in 0..1000 {
            let (inputs, targets) = batch(&data, 1, step, 0, 16, 4);
            inputs.chunks(4).for_each(|window| drawn[window[0] as usize] += 1);
            assert!(targets.iter().all(|&id| id < 20), "the held-out part was trained on");
        }
        // 16000 draws over 16 starts: mean 1000, standard deviation 30.6; six of them.
        assert!(drawn.iter().all(|&n| n.abs_diff(1000) <= 184), "{drawn:?}");
    }

    #[test]
    fn one_start_is_enough() {
        assert_eq!(batch(&dataset(20), 0, 0, 0, 1, 19).1, (1..20).collect::<Vec<_>>());
    }

    #[test]
    #[should_panic(expected = "should have been refused")]
    fn a_window_too_long_is_a_defect_of_the_caller() {
        batch(&dataset(20), 0, 0, 0, 1, 20);
    }

    proptest! {
        #[test]
        fn a_batch_depends_on_its_coordinates_alone(
            seed in any::<u64>(),
            step in any::<u32>(),
            micro_step in any::<u32>(),
        ) {
            let data = dataset(100);
            let whole = batch(&data, seed, step, micro_step, 8, 4);
            prop_assert_eq!(&whole, &batch(&data, seed, step, micro_step, 8, 4));
            prop_assert_eq!(&whole.0[..12], &batch(&data, seed, step, micro_step, 3, 4).0[..]);
            prop_assert_ne!(&whole, &batch(&data, seed, step.wrapping_add(1), micro_step, 8, 4));
            prop_assert_ne!(&whole, &batch(&data, seed, step, micro_step.wrapping_add(1), 8, 4));
            prop_assert_ne!(&whole, &batch(&data, seed.wrapping_add(1), step, micro_step, 8, 4));
        }

        #[test]
        fn every_validation_token_is_predicted_once(
            train in 1_u8..127,
            context in 1_usize..40,
            sequences in 1_usize..5,
        ) {
            let data = dataset(train);
            let windows = data.evaluation_windows(context, 0);
            let (mut inputs, mut targets) = (vec![7], vec![7]);
            let (mut predicted, mut counted) = (Vec::new(), 0);
            for first in (0..windows.count() + sequences).step_by(sequences) {
                counted += windows.fill(first, sequences, &mut inputs, &mut targets).unwrap();
                prop_assert_eq!([inputs.len(), targets.len()], [sequences * context; 2]);
                for (&input, &target) in inputs.iter().zip(&targets) {
                    if target == HeadLoss::IGNORE {
                        prop_assert_eq!(input, 0);
                    } else {
                        prop_assert_eq!(target, input + 1);
                        predicted.push(target);
                    }
                }
            }
            prop_assert_eq!(counted, windows.predictions());
            prop_assert_eq!(predicted, (u32::from(train) + 1..128).collect::<Vec<_>>());
        }

        #[test]
        fn a_part_of_the_windows_is_evenly_spaced(
            train in 1_u8..100,
            context in 1_usize..9,
            most in 1_usize..60,
        ) {
            let data = dataset(train);
            let (all, windows) =
                (data.evaluation_windows(context, 0), data.evaluation_windows(context, most));
            prop_assert_eq!(windows.count(), all.count().min(most.div_ceil(context)));
            let (mut inputs, mut targets) = (Vec::new(), Vec::new());
            let counted =
                windows.fill(0, windows.count(), &mut inputs, &mut targets).unwrap();
            prop_assert_eq!(counted, windows.predictions());
            for (k, window) in inputs.chunks(context).enumerate() {
                let first = k * all.count() / windows.count() * context;
                prop_assert_eq!(window[0] as usize, usize::from(train) + first);
            }
        }
    }
}
