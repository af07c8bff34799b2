//! Observes a run and controls it.

use std::cell::RefCell;

use super::StepMetrics;
use sparse24_train::{
    nn::BatchShape,
    objective::{Batch, DataError, Evaluation, Objective},
};

/// Observes a run and controls it, on a thread of the run's pool. Every method has a default that
/// does nothing.
pub trait Observer: Send {
    /// Called once per optimizer step, after the evaluation that follows it, if any.
    fn stepped(&mut self, _metrics: &StepMetrics) {}

    /// Called in steps and evaluations, as often as a batch is made: so many of the part's
    /// micro-steps or sequences are `done`.
    fn working(&mut self, _part: Part, _done: usize, _of: usize) {}

    /// Called with a message for the user.
    fn said(&mut self, _line: &str) {}

    /// Returns a pending request, once, and clears the flag of [`Run::interrupt_on`], which is set
    /// together with the request.
    ///
    /// [`Run::interrupt_on`]: super::Run::interrupt_on
    fn asked(&mut self) -> Asked {
        Asked::Nothing
    }
}

/// Ignores everything and asks for nothing.
impl Observer for () {}

/// A part of a run that may take long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// An optimizer step, in micro-steps.
    Step,
    /// An evaluation, in sequences.
    Evaluation,
    /// The translations of the final BLEU, in sentences.
    Translation,
}

/// Request of an [`Observer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Continue.
    Nothing,
    /// Save the state of the last optimizer-step boundary and continue.
    Save,
    /// Save it and stop.
    Stop,
}

/// Data that an observer sees being used.
pub(super) struct Shown<'a, T> {
    data: T,
    part: Part,
    of: usize,
    observer: RefCell<&'a mut dyn Observer>,
}

impl<'a, T> Shown<'a, T> {
    pub(super) fn new(data: T, part: Part, of: usize, observer: &'a mut dyn Observer) -> Self {
        Self { data, part, of, observer: RefCell::new(observer) }
    }

    fn show(&self, done: usize) {
        self.observer.borrow_mut().working(self.part, done, self.of);
    }
}

impl<T: Objective> Objective for Shown<'_, T> {
    fn fill(&self, step: u32, micro_step: u32, batch: &mut Batch) -> Result<(), DataError> {
        self.show(micro_step as usize);
        self.data.fill(step, micro_step, batch)
    }
}

impl<T: Evaluation> Evaluation for Shown<'_, T> {
    fn sequences(&self) -> usize {
        self.data.sequences()
    }

    fn fill(&self, first: usize, shape: BatchShape, batch: &mut Batch) -> Result<(), DataError> {
        self.show(first);
        self.data.fill(first, shape, batch)
    }
}
