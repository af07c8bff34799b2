//! Text from a model: the token after a prompt, and translations.

use super::{Allocated, Trainer};
use crate::{
    Error, Result,
    backend::Copied,
    model::{DecodingStep, no_translation},
    nn::{BatchShape, Pass},
    objective::{Batch, Inputs},
};

/// Contents of the buffers of a translating model.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Decoding {
    /// Size and length of the sources that are encoded; 0 if none are.
    sources: [usize; 2],
    /// The number of hypotheses, their most tokens, and those that are decoded.
    done: [usize; 3],
}

impl Trainer {
    /// The logits after the last token of a non-empty prompt, of which the last `sequence_length`
    /// tokens are read.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not generate text; errors from the backend.
    ///
    /// # Panics
    /// If the prompt is empty.
    pub fn next_logits(&mut self, prompt: &[u32]) -> Result<Vec<f32>> {
        Ok(self.start_logits(prompt)?()?.swap_remove(0))
    }

    /// Starts to compute [`Self::next_logits`], the only vector of the result.
    ///
    /// # Errors
    /// Errors of [`Self::next_logits`].
    ///
    /// # Panics
    /// If the prompt is empty.
    pub fn start_logits(&mut self, prompt: &[u32]) -> Result<Copied> {
        assert!(!prompt.is_empty(), "a prompt has a token");
        self.check_whole()?;
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
    pub fn encode(&mut self, batch: &Batch) -> Result {
        self.check_translates()?;
        self.batch.clone_from(batch);
        let sources = self.upload_batch(self.recipe.batch)?;
        let phase = *self.phase();
        let Self { backend, allocated: Allocated { model, .. }, recipe, .. } = self;
        let pass = recipe.pass(&mut **backend, &phase, sources);
        model.encode(&mut Pass { dropout: 0.0, ..pass })?;
        self.decoding.sources = [sources.size, sources.sequence_length];
        Ok(())
    }

    /// The logits `[hypotheses, V]` after one more token of each hypothesis. The sources are those
    /// that were encoded last, and the steps before this one were those of the same hypotheses.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that does not translate; [`Error::Operand`] for sources that
    /// are not encoded (training and evaluations overwrite them), a position that does not follow
    /// the one before, more tokens than a batch has, or an unknown parent; errors from the backend.
    pub fn decode(&mut self, step: &DecodingStep<'_>) -> Result<Vec<f32>> {
        self.check_translates()?;
        let &DecodingStep { sources, position, longest, tokens, parents } = step;
        let (n, most, sources) =
            (tokens.len(), self.recipe.batch, [sources.size, sources.sequence_length]);
        let Decoding { sources: encoded, done } = self.decoding;
        let fits = longest <= most.sequence_length && n.saturating_mul(longest) <= most.tokens();
        let fits = fits && n > 0 && longest > 0 && n.is_multiple_of(sources[0]);
        let follows = position < longest && (position == 0 || done == [n, longest, position]);
        let last = parents.iter().max().map_or(0, |&parent| parent as usize);
        for (operand, is_fine, expected, found) in [
            ("the sources", sources == encoded && sources[0] > 0, encoded, sources),
            ("tokens", fits, [most.tokens() / longest.max(1), longest.max(1)], [n, longest]),
            ("the position", follows, [done[2], done[1]], [position, longest]),
            ("parents", parents.len() == n, [n, 1], [parents.len(), 1]),
            ("the largest parent", last < n, [n.saturating_sub(1), 1], [last, 1]),
        ] {
            if !is_fine {
                return Err(Error::Operand { operation: "decode", operand, expected, found });
            }
        }
        self.decoding.done = [0; 3];
        let phase = *self.phase();
        let shape = BatchShape { size: n, sequence_length: 1 };
        let Self { backend, allocated: Allocated { model, .. }, recipe, .. } = self;
        let pass = recipe.pass(&mut **backend, &phase, shape);
        let logits = model.decode(&mut Pass { dropout: 0.0, ..pass }, step)?;
        self.decoding.done = [n, longest, position + 1];
        Ok(logits)
    }

    fn check_translates(&self) -> Result {
        self.check_whole()?;
        let translates = self.recipe.model.inputs() == Inputs::Translation;
        if translates { Ok(()) } else { Err(no_translation()) }
    }
}
