//! The exponential moving averages of all weights over optimizer steps, as timm's `ModelEma` keeps
//! them: they start at the initial weights, and no step of the training reads them.

use std::{iter::Copied, slice::Iter};

use super::Recipe;
use crate::{
    Result,
    backend::{
        Backend, Region, Tensor,
        op::{Copy, MovingAverage},
    },
    nn::Parameters,
};

/// One average per parameter, in order; none without [`Recipe::ema_decay`].
#[derive(Debug)]
pub(super) struct Averages {
    decay: f32,
    all: Vec<Tensor>,
}

impl Averages {
    pub(super) fn new(
        backend: &mut dyn Backend,
        parameters: &Parameters,
        recipe: &Recipe,
    ) -> Result<Self> {
        let Some(decay) = recipe.ema_decay else {
            return Ok(Self { decay: 0.0, all: Vec::new() });
        };
        Ok(Self { decay, all: parameters.beside(backend, "average", Region::Moments)? })
    }

    pub(super) fn iter(&self) -> Copied<Iter<'_, Tensor>> {
        self.all.iter().copied()
    }

    /// average = w.
    pub(super) fn start(&self, backend: &mut dyn Backend, parameters: &Parameters) -> Result {
        let mut all = parameters.iter().zip(self.iter());
        all.try_for_each(|(parameter, to)| backend.run(Copy { from: parameter.weight, to }))
    }

    /// Follows the weights after their step.
    pub(super) fn follow(&self, backend: &mut dyn Backend, parameters: &Parameters) -> Result {
        let decay = self.decay;
        parameters.iter().zip(self.iter()).try_for_each(|(parameter, average)| {
            backend.run(MovingAverage { w: parameter.weight, average, decay })
        })
    }
}
