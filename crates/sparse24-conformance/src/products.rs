//! Products: forward, dgrad, wgrad, logits, and the gradient of a bias.

use sparse24_backend::{
    Op, Tensor,
    op::{
        ActivationBackward, ActivationForward, BiasGrad, Gradient, LinearDgrad, LinearForward,
        LinearWgrad, Logits, Weight,
    },
};
use sparse24_core::{
    MaskKind,
    op::{Accumulate, Activation},
};

use super::{Bench, Draw, Matrix, sparse, transposed};
use crate::oracle::{arithmetic::Arithmetic, layers};

pub(super) fn accumulate(add: bool) -> Accumulate {
    if add { Accumulate::Add } else { Accumulate::Overwrite }
}

/// dW or another sum, added to what was there.
pub(super) fn added(
    a: &mut Arithmetic,
    before: Option<&Matrix>,
    sum: Matrix,
    terms: usize,
) -> Matrix {
    let Some(before) = before else { return sum };
    Matrix::from_shape_fn(sum.dim(), |at| {
        let magnitude = before[at].abs() + sum[at].abs();
        a.rounded(before[at] + sum[at], terms as f64, magnitude)
    })
}

/// z + b for each row.
pub(super) fn plus_row(a: &mut Arithmetic, z: &Matrix, b: &Matrix) -> Matrix {
    a.plus(z, &Matrix::from_shape_fn(z.dim(), |(_, j)| b[[0, j]]))
}

/// W, or S(W) under a transposable mask, as a product reads it.
fn weight(bench: &mut Bench<'_>, shape: [usize; 2], pruned: bool) -> (Weight, Tensor, Matrix) {
    let (t, w) = bench.parameter(shape);
    if !pruned {
        let read = bench.storage.rounded(&w);
        return (Weight::Dense(t), t, read);
    }
    let (id, read) = sparse::pruned(bench, t, &w, MaskKind::Transposable);
    (Weight::Pruned(id), t, read)
}

/// Sizes of a product [p, q, r]; those of a pruned weight consist of tiles.
fn sizes(bench: &Bench<'_>, draw: &Draw, pruned: bool) -> [usize; 3] {
    let [p, q, r, _] = draw.sizes;
    let tiles = if pruned { 4 } else { 1 };
    [p, bench.columns(q.next_multiple_of(tiles)), bench.columns(r.next_multiple_of(tiles))]
}

/// Z = X W^T + b, and what follows: H = act(Z).
pub(super) fn linear_forward(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [pruned, biased, activated, _] = draw.options;
    if activated {
        bench.tame();
    }
    let [p, q, r] = sizes(bench, draw, pruned);
    let (x, x_host) = bench.activation(p, q);
    let (weight, _, w_host) = weight(bench, [r, q], pruned);
    let (bias, bias_host) = bench.bias(r);
    let (z, h) = (bench.output("z", p, r), bench.output("h", p, r));
    let activation = [Activation::Gelu, Activation::GeluErf, Activation::Relu][draw.sizes[3] % 3];
    let product = LinearForward { x, weight, bias: biased.then_some(bias), z: z.tensor };
    let then = ActivationForward { activation, z: z.tensor, h: h.tensor };
    let mut ops: Vec<Op<'_>> = vec![product.into()];
    let mut outputs = vec![z];
    if activated {
        ops.push(then.into());
        outputs.push(h);
    }
    let storage = bench.storage;
    bench.check(&outputs, &ops, |a| {
        let mut z = storage.product(a, &x_host, &transposed(&w_host));
        if biased {
            z = plus_row(a, &z, &bias_host);
        }
        if !activated {
            return vec![z];
        }
        let stored = storage.between(a, &z);
        let h = layers::activate(a, activation, &stored);
        vec![z, h]
    });
}

/// dX = dZ W, and what follows: the derivative of an activation.
pub(super) fn linear_dgrad(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [pruned, activated, ..] = draw.options;
    if activated {
        bench.tame();
    }
    let [p, q, r] = sizes(bench, draw, pruned);
    let (dz, dz_host) = bench.activation(p, r);
    let (before, before_host) = bench.activation(p, q);
    let (weight, _, w_host) = weight(bench, [r, q], pruned);
    let (dx, dact) = (bench.output("dx", p, q), bench.output("dact", p, q));
    let activation = Activation::Gelu;
    let product = LinearDgrad { dz, weight, dx: dx.tensor };
    let then = ActivationBackward { activation, dh: dx.tensor, z: before, dz: dact.tensor };
    let mut ops: Vec<Op<'_>> = vec![product.into()];
    let mut outputs = vec![dx];
    if activated {
        ops.push(then.into());
        outputs.push(dact);
    }
    let storage = bench.storage;
    bench.check(&outputs, &ops, |a| {
        let dx = storage.product(a, &dz_host, &w_host);
        if !activated {
            return vec![dx];
        }
        let stored = storage.between(a, &dx);
        let dact = layers::activate_backward(a, activation, &before_host, &stored);
        vec![dx, dact]
    });
}

/// dW = dZ^T X, of dZ itself or its sample.
pub(super) fn linear_wgrad(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [add, sampled, ..] = draw.options;
    let [p, q, r] = sizes(bench, draw, false);
    if sampled && p == 0 {
        return;
    }
    let (dz, mut dz_host) = bench.activation(p, r);
    let (x, x_host) = bench.activation(p, q);
    let mut operand = Gradient::Dense(dz);
    if sampled {
        let (id, read) = sparse::sampled(bench, dz, &dz_host, draw.options[2]);
        (operand, dz_host) = (Gradient::Sampled(id), transposed(&read));
    }
    let dw = bench.sum("dw", [r, q], add);
    let op = LinearWgrad { dz: operand, x, dw: dw.tensor, accumulate: accumulate(add) };
    let (storage, before) = (bench.storage, dw.before.clone());
    bench.check(&[dw], &[op.into()], |a| {
        let sum = storage.product(a, &transposed(&dz_host), &x_host);
        vec![added(a, before.as_ref(), sum, p + 2)]
    });
}

/// db = column sums of dZ.
pub(super) fn bias_grad(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [p, _, r] = sizes(bench, draw, false);
    let (dz, dz_host) = bench.activation(p, r);
    let add = draw.options[0];
    let db = bench.sum("db", [1, r], add);
    let op = BiasGrad { dz, db: db.tensor, accumulate: accumulate(add) };
    let before = db.before.clone();
    bench.check(&[db], &[op.into()], |a| {
        let sum = a.column_sums(&dz_host);
        vec![added(a, before.as_ref(), sum, p + 2)]
    });
}

/// out = x E^T + b, a product of any number of ids.
pub(super) fn logits(bench: &mut Bench<'_>, draw: &Draw) {
    bench.finite();
    let [p, d, vocabulary, _] = draw.sizes;
    let vocabulary = vocabulary.max(2);
    let d = bench.columns(d);
    let (x, x_host) = bench.activation(p, d);
    let (embedding, e_host) = bench.parameter([vocabulary, d]);
    let e_host = bench.storage.rounded(&e_host);
    let out = bench.output("out", p, vocabulary);
    let biased = draw.options[0];
    let (bias, bias_host) = bench.bias(vocabulary);
    let op = Logits { x, embedding, bias: biased.then_some(bias), out: out.tensor };
    let storage = bench.storage;
    bench.check(&[out], &[op.into()], |a| {
        let logits = storage.product(a, &x_host, &transposed(&e_host));
        vec![if biased { plus_row(a, &logits, &bias_host) } else { logits }]
    });
}
