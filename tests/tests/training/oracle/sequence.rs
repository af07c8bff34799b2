//! The head of a fine-tuned model: a row of each sequence, a pooler, dropout, outputs.

use sparse24_core::op::Activation;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers,
};
use sparse24_train::{backend::op::HeadLoss, nn::Prediction, objective::Batch};

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
        let rows: Vec<usize> =
            (0..x.nrows()).filter(|&row| batch.targets[row] != HeadLoss::IGNORE).collect();
        let targets = rows.iter().map(|&row| batch.targets[row]).collect();
        let m = x.select(ndarray::Axis(0), &rows);
        let z = self.pooler.map(|name| pass.linear(name, &m));
        let h = match &z {
            Some(z) => layers::activate(pass.arithmetic, Activation::Tanh, z),
            None => m.clone(),
        };
        let h = pass.dropped(self.dropout, h);
        let outputs = pass.linear(self.name, &h);
        Kept { rows, targets, m, z, h, outputs }
    }

    pub(super) fn loss(self, pass: &mut Pass<'_>, x: &Matrix, batch: &Batch) -> f64 {
        let Kept { outputs, targets, .. } = self.forward(pass, x, batch);
        self.compared(pass, &outputs, &targets, 0.0).0
    }

    fn compared(self, pass: &mut Pass<'_>, z: &Matrix, targets: &[u32], by: f64) -> (f64, Matrix) {
        match self.prediction {
            Prediction::Class(_) => layers::loss(pass.arithmetic, z, targets, 0.0, by),
            Prediction::Value => layers::squared_error(pass.arithmetic, z, targets, by),
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
        let Kept { rows, targets, m, z, h, outputs } = self.forward(pass, x, batch);
        let (sum, doutputs) = self.compared(pass, &outputs, &targets, scale);
        let dh = pass.linear_backward(self.name, &h, &doutputs, gradients);
        let dh = pass.dropped(self.dropout, dh);
        let dm = match (self.pooler, &z) {
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
