//! Text from a model: the token after a prompt, and translations.

use super::{Allocated, Trainer};
use crate::{
    Error,
    backend::Copied,
    model::DecodingStep,
    nn::{BatchShape, Pass},
    objective::Batch,
};

impl Trainer {
    /// The logits after the last token of a non-empty prompt, of which the last `sequence_length`
    /// tokens are read.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not generate text; errors from the backend.
    ///
    /// # Panics
    /// If the prompt is empty.
    pub fn next_logits(&mut self, prompt: &[u32]) -> Result<Vec<f32>, Error> {
        Ok(self.start_logits(prompt)?()?.swap_remove(0))
    }

    /// Starts to compute [`Self::next_logits`], the only vector of the result.
    ///
    /// # Errors
    /// Errors of [`Self::next_logits`].
    ///
    /// # Panics
    /// If the prompt is empty.
    pub fn start_logits(&mut self, prompt: &[u32]) -> Result<Copied, Error> {
        assert!(!prompt.is_empty(), "a prompt has a token");
        let phase = *self.phase();
        let window = &prompt[prompt.len().saturating_sub(self.recipe.batch.sequence_length)..];
        let shape = BatchShape { size: 1, sequence_length: window.len() };
        let Self { backend, allocated: Allocated { model, .. }, recipe, .. } = self;
        let pass = recipe.pass(&mut **backend, &phase, shape);
        let logits = model.next_logits(&mut Pass { dropout: 0.0, ..pass }, window)?;
        backend.copy_out(&[logits], Vec::new())
    }

    /// Encodes the sources of a batch, to be decoded; its targets are not read.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not translate; [`Error::Operand`] for a batch that
    /// is not one; errors from the backend.
    pub fn encode(&mut self, batch: &Batch) -> Result<(), Error> {
        self.batch.clone_from(batch);
        let shape = self.upload_batch(self.recipe.batch)?;
        let phase = *self.phase();
        let Self { backend, allocated: Allocated { model, .. }, recipe, .. } = self;
        let pass = recipe.pass(&mut **backend, &phase, shape);
        model.encode(&mut Pass { dropout: 0.0, ..pass })
    }

    /// The logits `[hypotheses, V]` after one more token of each hypothesis. The sources are those
    /// that were encoded last, and the steps before this one were those of the same hypotheses.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not translate; [`Error::Operand`] for more tokens
    /// than a batch has; errors from the backend.
    pub fn decode(&mut self, step: &DecodingStep<'_>) -> Result<Vec<f32>, Error> {
        let (n, most) = (step.tokens.len(), self.recipe.batch);
        let longest = step.longest.clamp(step.position + 1, most.sequence_length);
        if n * longest > most.tokens() || longest != step.longest {
            return Err(Error::Operand {
                operation: "decode",
                operand: "tokens",
                expected: [most.tokens() / longest, longest],
                found: [n, step.longest],
            });
        }
        let phase = *self.phase();
        let shape = BatchShape { size: n, sequence_length: 1 };
        let Self { backend, allocated: Allocated { model, .. }, recipe, .. } = self;
        let pass = recipe.pass(&mut **backend, &phase, shape);
        model.decode(&mut Pass { dropout: 0.0, ..pass }, step)
    }
}
