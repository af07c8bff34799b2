//! Reads the next batch while the present one is trained on, for tokens on disk and for images.
//!
//! Invariant: which batch is read ahead changes no result, only when the disk is waited for.

use std::{
    panic::resume_unwind,
    sync::{Mutex, PoisonError},
    thread::{Builder, JoinHandle},
};

use super::{Dataset, Draw};
use crate::Result;
use sparse24_train::schedule::GradientAccumulation;

/// Reads the value that is expected next, by its key, on a thread of its own.
#[derive(Debug)]
pub(crate) struct Ahead<K, T>(Mutex<Option<Reading<K, T>>>);

/// The key of a value, and the thread that reads it.
type Reading<K, T> = (K, JoinHandle<Result<T>>);

impl<K, T> Default for Ahead<K, T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<K: Copy + PartialEq + Send + 'static, T: Send + 'static> Ahead<K, T> {
    /// Returns `read(key)`, which is ready if it was expected, and starts to read `following`.
    ///
    /// # Errors
    /// Errors of `read`.
    pub(crate) fn take(
        &self,
        key: K,
        following: K,
        read: impl Fn(K) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut next = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = match next.take() {
            Some((expected, thread)) if expected == key => {
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))?
            }
            _ => read(key)?,
        };
        // Without a thread, it is read when it is needed.
        let thread = Builder::new().name("batch".to_owned()).spawn(move || read(following));
        *next = thread.ok().map(|thread| (following, thread));
        Ok(taken)
    }
}

/// The batch of tokens that is expected next.
#[derive(Debug)]
pub struct ReadAhead {
    accumulation: GradientAccumulation,
    rank: usize,
    world: usize,
    next: Ahead<Draw, [Vec<u32>; 2]>,
}

impl ReadAhead {
    /// For steps of so many micro-steps, of which a rank does its share.
    #[must_use]
    pub fn new(accumulation: GradientAccumulation, rank: usize, world: usize) -> Self {
        Self { accumulation, rank, world, next: Ahead::default() }
    }

    /// [`Dataset::batch`], read ahead if the batch before it was drawn here; begins to read the one
    /// after it.
    ///
    /// # Errors
    /// Like [`Dataset::batch`].
    ///
    /// # Panics
    /// Like [`Dataset::batch`].
    pub fn batch(
        &self,
        dataset: &Dataset,
        draw: Draw,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> Result {
        let share = |step| self.accumulation.share(step, self.rank, self.world);
        let following = match draw.micro_step + 1 {
            micro_step if micro_step < share(draw.step).end => Draw { micro_step, ..draw },
            _ => {
                let step = draw.step.wrapping_add(1);
                Draw { step, micro_step: share(step).start, ..draw }
            }
        };
        let dataset = dataset.clone();
        [*inputs, *targets] = self.next.take(draw, following, move |draw| {
            let mut drawn = [Vec::new(), Vec::new()];
            let [inputs, targets] = &mut drawn;
            dataset.batch(draw, inputs, targets).map(|()| drawn)
        })?;
        Ok(())
    }
}
