//! The batches of images.
//!
//! Invariant: a training batch is a pure function of (seed, number in the run). An epoch has as
//! many places as there are images: a permutation of them, of which `repeats` successive places
//! share one image. Reading ahead changes no result.

use std::sync::{Arc, PoisonError};

use rayon::prelude::*;
use sparse24_core::philox::{Purpose, Site, Stream};
use sparse24_train::{
    backend::op::HeadLoss,
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation, Objective},
    schedule::GradientAccumulation,
};

use super::{
    augment::{self, Input},
    draws::Draws,
    folder::{Epoch, Images, Number, Shared},
};
use crate::{Error, Result};

/// The batches of a run, and its images to evaluate on.
#[derive(Debug)]
pub struct ImageBatches<'a> {
    /// The images.
    pub images: &'a Images,
    /// Seed of the run.
    pub seed: u64,
    /// Shape of a micro-batch.
    pub shape: BatchShape,
    /// Micro-batches of a step.
    pub accumulation: GradientAccumulation,
}

impl Objective for ImageBatches<'_> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        let number = self.accumulation.before(step) + u64::from(micro_step);
        let key = Number { seed: self.seed, number, size: self.shape.size };
        let following = Number { number: number + 1, ..key };
        let shared = Arc::clone(&self.images.0);
        let make = move |key| shared.loaders.install(|| shared.training(key));
        *batch = self.images.0.ahead.take(key, following, make)?;
        Ok(())
    }
}

impl Evaluation for ImageBatches<'_> {
    fn sequences(&self) -> usize {
        self.images.0.splits[1].len()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        let shared = &self.images.0;
        let entries = &shared.splits[1][first..first + shape.size];
        let size = shared.source.size;
        let inputs = entries
            .par_iter()
            .map(|entry| Ok::<_, Error>(augment::evaluation(&*entry.image()?, size)));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        *batch = shared.batch(&inputs, entries.iter().map(|entry| entry.class));
        Ok(())
    }
}

impl Shared {
    fn training(&self, Number { seed, number, size }: Number) -> Result<Batch> {
        let source = &self.source;
        let rules = &source.augmentation;
        let count = self.splits[0].len() as u64;
        let places = number * size as u64..(number + 1) * size as u64;
        let first = (places.start / count) as u32;
        let epochs = first..=((places.end - 1) / count) as u32;
        let orders: Vec<_> = epochs.map(|epoch| self.order((seed, epoch))).collect();
        let inputs = places.into_par_iter().map(|place| {
            let (epoch, place) = ((place / count) as u32, place % count);
            let repeated = place / u64::from(rules.repeats.max(1));
            let image = orders[(epoch - first) as usize][repeated as usize];
            let entry = &self.splits[0][image as usize];
            let mut draws = Draws::of_image(seed, epoch, place);
            let input = augment::training(&*entry.image()?, source.size, rules, &mut draws);
            Ok((input, entry.class))
        });
        let inputs: Vec<(Input, u32)> = inputs.collect::<Result<_>>()?;
        let (mut inputs, classes): (Vec<_>, Vec<_>) = inputs.into_iter().unzip();
        let mut draws = Draws::of_batch(seed, number);
        let share = augment::mix(&mut inputs, source.size, rules, &mut draws);
        let mut batch = self.batch(&inputs, classes.iter().copied());
        if let Some(share) = share {
            batch.second_targets.extend(classes.iter().rev());
            batch.shares.resize(size, share);
        }
        Ok(batch)
    }

    /// The images of an epoch, sorted by word 0 of call i of the stream (seed, data order 8, 0,
    /// epoch), where i is their number; equal words by i.
    fn order(&self, epoch: Epoch) -> Arc<Vec<u32>> {
        let mut known = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = known.as_ref().filter(|(of, _)| *of == epoch) {
            return Arc::clone(order);
        }
        let stream = Stream::new(epoch.0, Site::new(Purpose::DataOrder, 8), 0, epoch.1);
        let mut order: Vec<u32> = (0..self.splits[0].len() as u32).collect();
        order.sort_by_cached_key(|&i| (stream.words(i)[0], i));
        let order = Arc::new(order);
        *known = Some((epoch, Arc::clone(&order)));
        order
    }

    /// Inputs cut into patches, with their classes at the first token of each sequence.
    fn batch(&self, inputs: &[Input], classes: impl Iterator<Item = u32>) -> Batch {
        let (size, patch) = (self.source.size, self.source.patch);
        let side = size / patch;
        let mut batch = Batch::default();
        batch.pixels.reserve(inputs.len() * 3 * size * size);
        for (input, class) in inputs.iter().zip(classes) {
            for at in 0..side * side {
                let (top, left) = (at / side * patch, at % side * patch);
                for channel in input.chunks_exact(size * size) {
                    for row in channel.chunks_exact(size).skip(top).take(patch) {
                        batch.pixels.extend(&row[left..left + patch]);
                    }
                }
            }
            batch.targets.push(class);
            batch.targets.resize(batch.targets.len() + side * side, HeadLoss::IGNORE);
            batch.counted += 1;
        }
        batch
    }
}
