//! The head of a fine-tuned model: a row of each sequence, a pooler, dropout, outputs; or outputs
//! of every token.

use sparse24_core::op::Activation;
use sparse24_tests::oracle::{arithmetic::Matrix, layers};
use sparse24_train::{
    backend::op::HeadLoss,
    nn::{BatchShape, Prediction},
    objective::Batch,
};

use super::pass::{HeadBackward, Pass, scattered};

/// Names of the layers, the number of the dropout, and what is predicted.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) name: &'static str,
    pub(super) pooler: Option<&'static str>,
    pub(super) dropout: usize,
    pub(super) prediction: Prediction,
    /// Label smoothing of the mix of both targets; without it, the first alone count.
    pub(super) mixed: Option<f64>,
}

impl Head {
    /// The loss; the backward pass gives the gradient of `scale` times it.
    pub(super) fn forward(
        self,
        pass: &mut Pass<'_>,
        x: &Matrix,
        batch: &Batch,
        scale: f64,
    ) -> (f64, HeadBackward) {
        let is_span = self.prediction == Prediction::Span;
        let (name, pooler) = if is_span { ("qa_outputs", None) } else { (self.name, self.pooler) };
        let height = x.nrows();
        let is_read = |row: &usize| is_span || batch.targets[*row] != HeadLoss::IGNORE;
        let rows: Vec<usize> = (0..height).filter(is_read).collect();
        let targets: Vec<u32> = rows.iter().map(|&row| batch.targets[row]).collect();
        let m = x.select(ndarray::Axis(0), &rows);
        let pooled = pooler.map(|name| (name, pass.linear(name, &m)));
        let h = match &pooled {
            Some((_, z)) => layers::activate(pass.arithmetic, Activation::Tanh, z),
            None => m.clone(),
        };
        let h = if is_span { h } else { pass.dropped(self.dropout, h) };
        let outputs = pass.linear(name, &h);
        let (sum, doutputs) = self.compared(pass, &outputs, &targets, batch, scale);
        let backward: HeadBackward = Box::new(move |pass, gradients| {
            let dh = pass.linear_backward(name, &h, &doutputs, gradients);
            let mut dm = if is_span { dh } else { pass.dropped(self.dropout, dh) };
            if let Some((name, z)) = pooled {
                let dz = layers::activate_backward(pass.arithmetic, Activation::Tanh, &z, &dm);
                dm = pass.linear_backward(name, &m, &dz, gradients);
            }
            (scattered(&dm, &rows, height), None)
        });
        (sum, backward)
    }

    fn compared(
        self,
        pass: &mut Pass<'_>,
        outputs: &Matrix,
        targets: &[u32],
        batch: &Batch,
        scale: f64,
    ) -> (f64, Matrix) {
        let a = &mut *pass.arithmetic;
        match self.prediction {
            Prediction::Class(_) => {
                let second = (&*batch.second_targets, &*batch.shares);
                let is_mixed = self.mixed.is_some() && !batch.shares.is_empty();
                let (second, smoothing) =
                    (is_mixed.then_some(second), self.mixed.unwrap_or_default());
                layers::mixed_loss(a, outputs, targets, second, smoothing, scale)
            }
            Prediction::Value => layers::squared_error(a, outputs, targets, scale),
            Prediction::Span => {
                let BatchShape { size, sequence_length } = pass.batch;
                let whole = vec![sequence_length as u32; size];
                let lengths = if batch.lengths.is_empty() { &whole } else { &batch.lengths };
                layers::span_loss(a, outputs, targets, lengths, scale)
            }
        }
    }
}
