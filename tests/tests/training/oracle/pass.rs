//! Parts of every model's pass: operands of products, linear layers, norms, embeddings.
//!
//! [`Operands`] are the weight of each product and the output gradient of each weight gradient.

use sparse24_tests::oracle::{
    arithmetic::{Arithmetic, Matrix, Tensors},
    layers::{self, Address, Dropout, Normed},
};
use sparse24_train::{model::ModelSpec, nn::BatchShape, objective::Batch};

use super::{models, transformer};

/// The operands of the products of a linear layer, by the name of its weight.
pub(crate) trait Operands {
    /// W or S(W) of the forward pass.
    fn forward(&self, name: &str) -> Matrix;
    /// W or S(W) of the input gradient.
    fn dgrad(&self, name: &str) -> Matrix;
    /// dZ `[p, r]`, or its sample.
    fn wgrad(&mut self, a: &mut Arithmetic, address: Address, name: &str, dz: &Matrix) -> Matrix;
}

/// Every product is dense.
pub(crate) struct Dense<'a>(pub(crate) &'a Tensors);

impl Operands for Dense<'_> {
    fn forward(&self, name: &str) -> Matrix {
        self.0[name].clone()
    }

    fn dgrad(&self, name: &str) -> Matrix {
        self.0[name].clone()
    }

    fn wgrad(&mut self, _: &mut Arithmetic, _: Address, _: &str, dz: &Matrix) -> Matrix {
        dz.clone()
    }
}

/// The backward pass of a head: dX, and the gradient of the token table if it is tied.
pub(super) type HeadBackward =
    Box<dyn FnOnce(&mut Pass<'_>, &mut Tensors) -> (Matrix, Option<Matrix>)>;

/// A matrix of `height` rows, zero except for these.
pub(super) fn scattered(x: &Matrix, rows: &[usize], height: usize) -> Matrix {
    let mut all = Matrix::zeros((height, x.ncols()));
    for (&row, x) in rows.iter().zip(x.rows()) {
        all.row_mut(row).assign(&x);
    }
    all
}

/// Names and shapes of all parameters, in order of declaration.
pub(crate) fn parameters(spec: &ModelSpec) -> Vec<(String, [usize; 2])> {
    let all = spec.parameters().expect("a possible shape").into_iter();
    all.map(|parameter| (parameter.name, parameter.shape)).collect()
}

/// One forward and backward.
pub(crate) struct Pass<'a> {
    pub(crate) arithmetic: &'a mut Arithmetic,
    pub(crate) spec: &'a ModelSpec,
    pub(crate) weights: &'a Tensors,
    pub(crate) operands: &'a mut dyn Operands,
    pub(crate) batch: BatchShape,
    pub(crate) dropout: f64,
    pub(crate) address: Address,
}

impl Pass<'_> {
    /// The sum of the targets' losses.
    pub(crate) fn loss(&mut self, batch: &Batch) -> f64 {
        match self.spec {
            ModelSpec::Transformer(spec) => transformer::loss(self, spec, batch),
            _ => models::loss(self, batch),
        }
    }

    /// The sum of the targets' losses; the gradients of `scale` times it are added to `gradients`.
    pub(crate) fn train(&mut self, batch: &Batch, scale: f64, gradients: &mut Tensors) -> f64 {
        match self.spec {
            ModelSpec::Transformer(spec) => transformer::train(self, spec, batch, scale, gradients),
            _ => models::train(self, batch, scale, gradients),
        }
    }

    /// The gradient of a table, row `row_of(i)` of which is added to row i of x.
    pub(super) fn table_backward(
        &mut self,
        name: &str,
        row_of: impl Fn(usize) -> usize,
        dx: &Matrix,
    ) -> Matrix {
        Matrix::from_shape_fn((self.weights[name].nrows(), dx.ncols()), |(row, j)| {
            let mine = (0..dx.nrows()).filter(|&i| row_of(i) == row);
            self.arithmetic.sum(mine.map(|i| dx[[i, j]]))
        })
    }

    pub(super) fn accumulate(&mut self, gradients: &mut Tensors, name: &str, gradient: Matrix) {
        let tokens = self.batch.tokens();
        self.arithmetic.accumulate(gradients, name, gradient, tokens);
    }

    pub(super) fn logits(&mut self, head: &str, x: &Matrix) -> Matrix {
        self.arithmetic.product(x, &self.weights[head].t().to_owned())
    }

    pub(super) fn linear(&mut self, name: &str, x: &Matrix) -> Matrix {
        let w = self.operands.forward(&format!("{name}.weight"));
        layers::linear(self.arithmetic, x, &w, self.weights.get(&format!("{name}.bias")))
    }

    /// dX = dZ W; dW = sample(dZ)^T X; db = column sums of dZ.
    pub(super) fn linear_backward(
        &mut self,
        name: &str,
        x: &Matrix,
        dz: &Matrix,
        gradients: &mut Tensors,
    ) -> Matrix {
        let [weight, bias] = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        let sampled = self.operands.wgrad(self.arithmetic, self.address, &weight, dz);
        let dw = self.arithmetic.product(&sampled.t().to_owned(), x);
        self.arithmetic.accumulate(gradients, &weight, dw, x.nrows());
        if self.weights.contains_key(&bias) {
            let db = self.arithmetic.column_sums(dz);
            self.arithmetic.accumulate(gradients, &bias, db, x.nrows());
        }
        self.arithmetic.product(dz, &self.operands.dgrad(&weight))
    }

    pub(super) fn norm(&mut self, name: &str, x: &Matrix, epsilon: f32) -> Normed {
        let beta = self.weights.get(&format!("{name}.bias"));
        layers::norm(self.arithmetic, x, &self.weights[&format!("{name}.weight")], beta, epsilon)
    }

    pub(super) fn norm_backward(
        &mut self,
        name: &str,
        kept: &Normed,
        dy: &Matrix,
        gradients: &mut Tensors,
    ) -> Matrix {
        let [weight, bias] = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        let (dx, dgamma, dbeta) =
            layers::norm_backward(self.arithmetic, dy, kept, &self.weights[&weight]);
        self.arithmetic.accumulate(gradients, &weight, dgamma, dy.nrows());
        if self.weights.contains_key(&bias) {
            self.arithmetic.accumulate(gradients, &bias, dbeta, dy.nrows());
        }
        dx
    }

    pub(super) fn plus(&mut self, x: &Matrix, y: &Matrix) -> Matrix {
        self.arithmetic.plus(x, y)
    }

    /// x with dropout `number`: 0 the embedding; in a block 1 + 3 layer + {0 the probabilities, 1
    /// after the projection, 2 after the feed-forward}.
    pub(super) fn dropped(&mut self, number: usize, x: Matrix) -> Matrix {
        Dropout::apply(self.dropout(number), self.arithmetic, x)
    }

    /// x without the sequences that this dropout drops.
    pub(super) fn skipped(&mut self, dropout: Option<Dropout>, x: Matrix) -> Matrix {
        let length = self.batch.sequence_length;
        Dropout::apply_to_sequences(dropout, self.arithmetic, length, x)
    }

    pub(super) fn dropout(&self, number: usize) -> Option<Dropout> {
        (self.dropout > 0.0).then_some(Dropout {
            address: self.address,
            number: number as u32,
            p: self.dropout,
        })
    }
}
