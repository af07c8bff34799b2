//! Losses and outputs of a model on data that it is not trained on.

use super::{Allocated, Trainer};
use crate::{
    Error,
    model::Model,
    nn::{BatchShape, Pass},
    objective::{Evaluation, Metrics},
};

impl Trainer {
    /// Evaluates all sequences, with the weights of the current phase (pruned in a sparse phase),
    /// at most `size` sequences at a time; each rank of a group evaluates its share.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; [`Error::Operand`] for a batch of another shape than was asked for;
    /// errors from the backend.
    ///
    /// # Panics
    /// If `size` is 0 or more than a micro-batch has.
    pub fn evaluate(&mut self, data: &dyn Evaluation, size: usize) -> Result<Metrics, Error> {
        self.evaluate_parts(data, size, |_, _, _| Ok(()))
    }

    /// Evaluates all sequences with a fine-tuned model, like [`Self::evaluate`]; also returns
    /// what `keep` makes of the number and the outputs of each, `[sequence_length, 2]` of a span.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that is not fine-tuned; errors of [`Self::evaluate`].
    ///
    /// # Panics
    /// Like [`Self::evaluate`].
    pub fn predict(
        &mut self,
        data: &dyn Evaluation,
        size: usize,
        keep: impl Fn(usize, &[f32]) -> Vec<f32>,
    ) -> Result<(Metrics, Vec<f32>), Error> {
        let mut kept = Vec::new();
        let metrics = self.evaluate_parts(data, size, |first, model, pass| {
            let outputs = model.outputs(pass)?;
            let each = outputs.chunks(outputs.len() / pass.batch.size).zip(first..);
            kept.extend(each.flat_map(|(outputs, number)| keep(number, outputs)));
            Ok(())
        })?;
        Ok((metrics, self.group.all_gather_floats(&kept)?.concat()))
    }

    fn evaluate_parts(
        &mut self,
        data: &dyn Evaluation,
        size: usize,
        mut each: impl FnMut(usize, &dyn Model, &mut Pass<'_>) -> Result<(), Error>,
    ) -> Result<Metrics, Error> {
        let (phase, mut parts) = (*self.phase(), Vec::new());
        assert!((1..=self.recipe.batch.size).contains(&size), "{size} sequences do not fit");
        let (rank, world) = (self.group.rank(), self.group.world());
        let (sequences, all) = (data.sequences(), data.sequences().div_ceil(size));
        for first in (rank * all / world..(rank + 1) * all / world).map(|part| part * size) {
            self.check_interrupt()?;
            let asked = BatchShape { size: size.min(sequences - first), ..self.recipe.batch };
            self.batch.clear();
            data.fill(first, asked, &mut self.batch)?;
            let shape = self.upload_batch(asked)?;
            if shape.size != asked.size {
                let [expected, found] = [asked, shape].map(|s| [s.size, s.sequence_length]);
                let (operation, operand) = ("batch", "the number of sequences");
                return Err(Error::Operand { operation, operand, expected, found });
            }
            let Self { backend, allocated: Allocated { model, .. }, recipe, batch, .. } = self;
            let mut pass = Pass { dropout: 0.0, ..recipe.pass(&mut **backend, &phase, shape) };
            model.evaluate(&mut pass)?;
            each(first, &**model, &mut pass)?;
            parts.extend([backend.download(model.loss())?[0], batch.counted as f32]);
        }
        // In the order of the sequences, so that the sum does not depend on the ranks.
        let mut metrics = Metrics::default();
        for &[loss, targets] in self.group.all_gather_floats(&parts)?.concat().as_chunks().0 {
            metrics.loss_sum += f64::from(loss);
            metrics.targets += targets as usize;
        }
        Ok(metrics)
    }
}
