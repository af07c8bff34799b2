//! The head of a fine-tuned model: a row of each sequence, a pooler, dropout, outputs; or outputs
//! of every token.

use sparse24_core::op::Activation;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers,
};
use sparse24_train::{
    backend::op::HeadLoss,
    nn::{BatchShape, Prediction},
    objective::Batch,
};

use super::pass::Pass;

/// Names of the layers, the number of the dropout, and what is predicted.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) name: &'static str,
    pub(super) pooler: Option<&'static str>,
    pub(super) dropout: usize,
    pub(super) prediction: Prediction,
}

struct Kept {
    rows: Vec<usize>,
    targets: Vec<u32>,
    m: Matrix,
    z: Option<Matrix>,
    h: Matrix,
    outputs: Matrix,
}

impl Head {
    fn forward(self, pass: &mut Pass<'_>, x: &Matrix, batch: &Batch) -> Kept {
        let is_read = |row: &usize| self.is_span() || batch.targets[*row] != HeadLoss::IGNORE;
        let rows: Vec<usize> = (0..x.nrows()).filter(is_read).collect();
        let targets = rows.iter().map(|&row| batch.targets[row]).collect();
        let m = x.select(ndarray::Axis(0), &rows);
        let z = self.pooler().map(|name| pass.linear(name, &m));
        let h = match &z {
            Some(z) => layers::activate(pass.arithmetic, Activation::Tanh, z),
            None => m.clone(),
        };
        let h = if self.is_span() { h } else { pass.dropped(self.dropout, h) };
        let outputs = pass.linear(self.name(), &h);
        Kept { rows, targets, m, z, h, outputs }
    }

    pub(super) fn loss(self, pass: &mut Pass<'_>, x: &Matrix, batch: &Batch) -> f64 {
        let kept = self.forward(pass, x, batch);
        self.compared(pass, &kept, batch, 0.0).0
    }

    fn is_span(self) -> bool {
        self.prediction == Prediction::Span
    }

    fn name(self) -> &'static str {
        if self.is_span() { "qa_outputs" } else { self.name }
    }

    fn pooler(self) -> Option<&'static str> {
        self.pooler.filter(|_| !self.is_span())
    }

    fn compared(self, pass: &mut Pass<'_>, kept: &Kept, batch: &Batch, by: f64) -> (f64, Matrix) {
        let (a, z, targets) = (&mut *pass.arithmetic, &kept.outputs, &kept.targets);
        match self.prediction {
            Prediction::Class(_) => layers::loss(a, z, targets, 0.0, by),
            Prediction::Value => layers::squared_error(a, z, targets, by),
            Prediction::Span => {
                let BatchShape { size, sequence_length } = pass.batch;
                let whole = vec![sequence_length as u32; size];
                let lengths = if batch.lengths.is_empty() { &whole } else { &batch.lengths };
                layers::span_loss(a, z, targets, lengths, by)
            }
        }
    }

    /// The loss and dX.
    pub(super) fn train(
        self,
        pass: &mut Pass<'_>,
        x: &Matrix,
        batch: &Batch,
        scale: f64,
        gradients: &mut Tensors,
    ) -> (f64, Matrix) {
        let kept = self.forward(pass, x, batch);
        let (sum, doutputs) = self.compared(pass, &kept, batch, scale);
        let Kept { rows, m, z, h, .. } = kept;
        let dh = pass.linear_backward(self.name(), &h, &doutputs, gradients);
        let dh = if self.is_span() { dh } else { pass.dropped(self.dropout, dh) };
        let dm = match (self.pooler(), &z) {
            (Some(name), Some(z)) => {
                let dz = layers::activate_backward(pass.arithmetic, Activation::Tanh, z, &dh);
                pass.linear_backward(name, &m, &dz, gradients)
            }
            _ => dh,
        };
        let mut dx = Matrix::zeros(x.dim());
        for (&row, dm) in rows.iter().zip(dm.rows()) {
            dx.row_mut(row).assign(&dm);
        }
        (sum, dx)
    }
}
