//! Reads the next batch while the present one is trained on, for tokens on disk.
//!
//! Invariant: which batch is read ahead changes no result, only when the disk is waited for.

use std::{
    panic::resume_unwind,
    sync::{Mutex, PoisonError},
    thread::{Builder, JoinHandle},
};

use super::{Dataset, Draw};
use crate::Error;
use sparse24_train::schedule::GradientAccumulation;

/// Inputs and targets.
type Drawn = [Vec<u32>; 2];

/// A batch that a thread reads.
type Reading = (Draw, JoinHandle<Result<Drawn, Error>>);

/// The batch that is expected next, on a thread of its own.
#[derive(Debug)]
pub struct ReadAhead {
    accumulation: GradientAccumulation,
    next: Mutex<Option<Reading>>,
}

impl ReadAhead {
    /// For steps of so many micro-steps.
    #[must_use]
    pub fn new(accumulation: GradientAccumulation) -> Self {
        Self { accumulation, next: Mutex::new(None) }
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
    ) -> Result<(), Error> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        match next.take() {
            Some((read, thread)) if read == draw => {
                [*inputs, *targets] = thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            }
            _ => dataset.batch(draw, inputs, targets)?,
        }
        let following = match draw.micro_step + 1 {
            micro_step if micro_step < self.accumulation.of(draw.step) => {
                Draw { micro_step, ..draw }
            }
            _ => Draw { step: draw.step.wrapping_add(1), micro_step: 0, ..draw },
        };
        let dataset = dataset.clone();
        let read = move || {
            let mut drawn = Drawn::default();
            let [inputs, targets] = &mut drawn;
            dataset.batch(following, inputs, targets).map(|()| drawn)
        };
        // Without a thread, the batch is read when it is needed.
        let thread = Builder::new().name("batch".to_owned()).spawn(read);
        *next = thread.ok().map(|thread| (following, thread));
        Ok(())
    }
}
