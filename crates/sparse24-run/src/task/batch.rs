//! The batches of a task.
//!
//! Invariant: a batch is a pure function of (seed, step, micro-step). Step s takes the next
//! examples of a sequence of epochs, each a permutation of the training split of its own.

use std::{borrow::Cow, cell::RefCell};

use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_train::{
    backend::op::HeadLoss,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation, Objective},
    schedule::GradientAccumulation,
};

use super::{Example, Examples, Labels, Layout, TaskSource, example::Target};

/// The batches of a run, and its validation split.
#[derive(Debug)]
pub struct TaskBatches<'a> {
    examples: &'a Examples,
    seed: u64,
    /// Shape of a micro-batch.
    shape: BatchShape,
    accumulation: GradientAccumulation,
    /// The permutation of an epoch.
    epoch: RefCell<Option<(u32, Vec<u32>)>>,
}

impl<'a> TaskBatches<'a> {
    /// The batches of a run.
    #[must_use]
    pub fn new(
        examples: &'a Examples,
        seed: u64,
        shape: BatchShape,
        accumulation: GradientAccumulation,
    ) -> Self {
        Self { examples, seed, shape, accumulation, epoch: RefCell::default() }
    }

    /// Appends an example, filled up to the sequence length. The target stands at the token that
    /// the head reads: BERT's first, GPT-2's last; that of a span at its first token.
    fn push(&self, example: &Example, batch: &mut Batch) {
        let Example { tokens, second, target } = example;
        let (length, room) = (tokens.len(), self.shape.sequence_length);
        let TaskSource { task, layout, .. } = &self.examples.source;
        let (read, target) = match (*target, task.labels, layout) {
            (Target::Span([first, last]), ..) => (first as usize, last),
            (Target::Label(label), labels, layout) => {
                let is_value = labels == Labels::Value;
                let target = if is_value { (label as f32).to_bits() } else { label as u32 };
                (if *layout == Layout::Gpt2 { length - 1 } else { 0 }, target)
            }
        };
        let first = batch.tokens.len();
        batch.tokens.extend(tokens);
        batch.tokens.resize(first + room, 0);
        batch.targets.resize(first + room, HeadLoss::IGNORE);
        batch.targets[first + read] = target;
        if *layout == Layout::Bert {
            batch.segments.resize(first + second, 0);
            batch.segments.resize(first + length, 1);
            batch.segments.resize(first + room, 0);
        }
        batch.lengths.push(length as u32);
        batch.counted += 1;
    }

    /// The training example at a place of the sequence of epochs. In epoch e, examples are sorted
    /// by word 0 of call i of the stream (seed, data order 2, 0, e), where i is their number; equal
    /// words by i.
    fn example(&self, place: u64) -> Cow<'_, Example> {
        let examples = &self.examples.train;
        let (epoch, at) =
            ((place / examples.len() as u64) as u32, (place % examples.len() as u64) as usize);
        let mut known = self.epoch.borrow_mut();
        if known.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let stream = Stream::new(self.seed, Site::new(Purpose::DataOrder, 2), 0, epoch);
            let mut order: Vec<u32> = (0..examples.len() as u32).collect();
            order.sort_by_cached_key(|&i| (stream.words(i)[0], i));
            *known = Some((epoch, order));
        }
        let (_, order) = known.as_ref().expect("it was made");
        examples.example(order[at] as usize)
    }
}

impl Objective for TaskBatches<'_> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        batch.clear();
        let before = self.accumulation.before(step) + u64::from(micro_step);
        let size = self.shape.size as u64;
        for place in before * size..(before + 1) * size {
            self.push(&self.example(place), batch);
        }
        Ok(())
    }
}

impl Evaluation for TaskBatches<'_> {
    fn sequences(&self) -> usize {
        self.examples.validation.len()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        batch.clear();
        let examples = &self.examples.validation;
        (first..first + shape.size).for_each(|number| self.push(&examples.example(number), batch));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, num::NonZeroU32};

    use super::*;
    use crate::{
        Error,
        data::Tokenizer,
        task::{TaskSource, find},
    };

    /// A run of CoLA in a folder with these files, of 5 training and 3 validation examples.
    fn examples(layout: Layout, files: [&str; 2]) -> Result<Examples, Error> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in ["train.tsv", "dev.tsv"].into_iter().zip(files) {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let (task, folder) = (find("cola").unwrap(), folder.path().to_owned());
        let source =
            TaskSource { task, folder, layout, classes: Vec::new(), max_length: 8, stride: 0 };
        Examples::open(source, &Tokenizer::Byte)
    }

    fn constant(micro_steps: u32) -> GradientAccumulation {
        GradientAccumulation::constant(NonZeroU32::new(micro_steps).unwrap())
    }

    const TRAIN: &str = "a\t1\t\tone\nb\t0\t*\ttwo\nc\t1\t\tthree\nd\t0\t*\tfour\ne\t1\t\tfive\n";
    const DEV: &str = "a\t1\t\tsix\nb\t0\t*\tseven is long\nc\t1\t\t\"q\n";

    #[test]
    fn an_epoch_has_every_example_once() {
        let examples = examples(Layout::Bert, [TRAIN, DEV]).unwrap();
        let shape = BatchShape { size: 2, sequence_length: 8 };
        let of = |step, micro_step| {
            let mut batch = Batch::default();
            let batches = TaskBatches::new(&examples, 3, shape, constant(2));
            Objective::fill(&batches, step, micro_step, &mut batch).unwrap();
            batch
        };
        // Ten micro-batches are four epochs of five examples.
        let micro_steps = (1..=5).flat_map(|step| [(step, 0), (step, 1)]);
        let batches: Vec<Batch> =
            micro_steps.map(|(step, micro_step)| of(step, micro_step)).collect();
        let rows: Vec<&[u32]> = batches.iter().flat_map(|batch| batch.tokens.chunks(8)).collect();
        let epochs: Vec<&[&[u32]]> = rows.chunks(5).collect();
        let sets: Vec<BTreeSet<_>> = epochs.iter().map(|epoch| epoch.iter().collect()).collect();
        assert!(sets.iter().all(|set| set.len() == 5 && *set == sets[0]), "{rows:?}");
        assert!(epochs.windows(2).any(|pair| pair[0] != pair[1]), "every epoch has one order");
        assert_eq!(of(4, 1), batches[7], "a batch is a function of its coordinates");
    }

    #[test]
    fn an_example_is_laid_out_for_its_model() {
        let shape = BatchShape { size: 3, sequence_length: 8 };
        for (layout, tokens, at) in [
            (Layout::Bert, vec![256, 115, 105, 120, 256, 0, 0, 0], 0),
            (Layout::CrammedBert, vec![256, 115, 105, 120, 256, 0, 0, 0], 0),
            (Layout::Gpt2, vec![115, 105, 120, 0, 0, 0, 0, 0], 2),
        ] {
            let examples = examples(layout, [TRAIN, DEV]).unwrap();
            let mut batch = Batch::default();
            TaskBatches::new(&examples, 0, shape, constant(1)).evaluate(&mut batch, shape);
            assert_eq!(batch.tokens[..8], tokens);
            let targets = (0..8).map(|i| if i == at { 1 } else { HeadLoss::IGNORE });
            assert_eq!(batch.targets[..8], targets.collect::<Vec<_>>());
            assert_eq!((batch.counted, examples.cut), (3, 1));
            assert_eq!(batch.lengths[1], 8, "the long one is cut");
            assert_eq!(batch.segments.is_empty(), layout != Layout::Bert);
        }
    }

    impl TaskBatches<'_> {
        fn evaluate(&self, batch: &mut Batch, shape: BatchShape) {
            Evaluation::fill(self, 0, shape, batch).unwrap();
        }
    }

    #[test]
    fn files_that_are_not_the_tasks_are_refused_by_line() {
        for (train, expected) in [
            ("", "holds no example"),
            (
                "a\t1\n",
                "line 1: does not name the columns sentence or text, label, and has 2 columns",
            ),
            ("a\t1\t\tone\nb\t2\t\ttwo\n", "line 2: has the label \"2\", expected 0 or 1"),
            ("a\t1\t\tone\nb\t1\n", "line 2: has 2 columns, expected 4; fix"),
            ("a\t1\t\tone\nb\t1\t\t\n", "line 2: has no sentence"),
            ("a\t1\t\tone\nb\t\t\ttwo\n", "line 2: has no label"),
            (
                &format!("a\t1\t\t{}\n", "x".repeat(1_048_577)),
                "line 1: has a text of 1048577 bytes",
            ),
        ] {
            let error = examples(Layout::Bert, [train, DEV]).unwrap_err().to_string();
            assert!(error.contains(expected), "{train:?}: {error}");
        }
    }
}
