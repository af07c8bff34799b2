//! The layers of a transformer and their gradients.
//!
//! Magnitudes handed to [`Arithmetic::rounded`] bound the f32 error of the usual evaluation of each
//! equation, in units of 2^-24.

use sparse24_core::philox::Philox4x32;
use sparse24_train::backend::Activation;

use super::arithmetic::{Arithmetic, Matrix};

/// Where random numbers are drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address {
    pub(crate) seed: u64,
    pub(crate) step: u32,
    pub(crate) micro_step: u32,
}

impl Address {
    /// Word `word` of call `call` of a site: counter = [call, site, micro-step, step], u = (word >>
    /// 8) * 2^-24.
    pub(crate) fn uniform(self, site: u32, call: u32, word: usize) -> f64 {
        let words = Philox4x32::new(self.seed).block([call, site, self.micro_step, self.step]);
        f64::from(words[word] >> 8) / f64::from(1 << 24)
    }
}

/// Inverted dropout at one place: purpose 3 of the site, element e at word e mod 4 of call e / 4.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dropout {
    pub(crate) address: Address,
    pub(crate) place: u32,
    pub(crate) p: f64,
}

impl Dropout {
    /// What element `e` is multiplied with.
    pub(crate) fn factor(self, e: usize) -> f64 {
        let u = self.address.uniform(3 << 24 | self.place, (e / 4) as u32, e % 4);
        if u >= self.p { 1.0 / (1.0 - self.p) } else { 0.0 }
    }

    /// The elements of x numbered row by row; x itself without dropout.
    pub(crate) fn apply(this: Option<Self>, a: &mut Arithmetic, x: Matrix) -> Matrix {
        let Some(dropout) = this else { return x };
        let columns = x.ncols();
        Matrix::from_shape_fn(x.dim(), |(i, j)| {
            let value = x[[i, j]] * dropout.factor(i * columns + j);
            a.rounded(value, 3.0, value)
        })
    }
}

/// Z = X W^T + b.
pub(crate) fn linear(a: &mut Arithmetic, x: &Matrix, w: &Matrix, bias: Option<&Matrix>) -> Matrix {
    let z = a.product(x, &w.t().to_owned());
    match bias {
        None => z,
        Some(bias) => Matrix::from_shape_fn(z.dim(), |(i, j)| {
            a.rounded(z[[i, j]] + bias[[0, j]], 1.0, z[[i, j]] + bias[[0, j]])
        }),
    }
}

/// LayerNorm of each row.
#[derive(Debug, Clone)]
pub(crate) struct Normed {
    /// n * gamma + beta.
    pub(crate) y: Matrix,
    /// (x - mean) * rstd.
    pub(crate) n: Matrix,
    /// 1 / sqrt(variance + 1e-5).
    pub(crate) rstd: Vec<f64>,
}

pub(crate) fn norm(
    a: &mut Arithmetic,
    x: &Matrix,
    gamma: &Matrix,
    beta: Option<&Matrix>,
) -> Normed {
    let (p, c) = x.dim();
    let (mut y, mut n, mut rstd) = (Matrix::zeros((p, c)), Matrix::zeros((p, c)), vec![0.0; p]);
    for i in 0..p {
        let mean = a.sum(x.row(i).iter().map(|x| x / c as f64));
        let variance = a.sum(x.row(i).iter().map(|x| (x - mean).powi(2) / c as f64));
        let root = (variance + f64::from(1e-5_f32)).sqrt().recip();
        rstd[i] = a.rounded(root, 4.0, root);
        for j in 0..c {
            n[[i, j]] = (x[[i, j]] - mean) * rstd[i];
            n[[i, j]] = a.rounded(n[[i, j]], 2.0, n[[i, j]]);
            let (scaled, shift) =
                (n[[i, j]] * gamma[[0, j]], beta.map_or(0.0, |beta| beta[[0, j]]));
            y[[i, j]] = a.rounded(scaled + shift, 2.0, scaled.abs() + shift.abs());
        }
    }
    Normed { y, n, rstd }
}

/// The gradients of x, gamma and beta.
pub(crate) fn norm_backward(
    a: &mut Arithmetic,
    dy: &Matrix,
    kept: &Normed,
    gamma: &Matrix,
) -> (Matrix, Matrix, Matrix) {
    let (p, c) = dy.dim();
    let mut dx = Matrix::zeros((p, c));
    for i in 0..p {
        let g: Vec<f64> = (0..c).map(|j| dy[[i, j]] * gamma[[0, j]]).collect();
        let mean = a.sum(g.iter().map(|g| g / c as f64));
        let along = a.sum((0..c).map(|j| g[j] * kept.n[[i, j]] / c as f64));
        for j in 0..c {
            let parts = [g[j], -mean, -kept.n[[i, j]] * along];
            let magnitude: f64 = parts.iter().map(|part| part.abs()).sum();
            dx[[i, j]] = kept.rstd[i] * a.rounded(parts.iter().sum(), 5.0, magnitude);
        }
    }
    let dgamma = a.column_sums(&(dy * &kept.n));
    (dx, dgamma, a.column_sums(dy))
}

/// (f(z), f'(z)) of GELU in its tanh form.
fn gelu(z: f64) -> (f64, f64) {
    let slope = (2.0 / std::f64::consts::PI).sqrt();
    let tanh = (slope * (z + 0.044715 * z.powi(3))).tanh();
    let value = 0.5 * z * (1.0 + tanh);
    (
        value,
        0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * slope * (1.0 + 3.0 * 0.044715 * z * z),
    )
}

/// (f(z), f'(z)) of SiLU.
fn silu(z: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + (-z).exp());
    (z * s, s + z * s * (1.0 - s))
}

/// Of an activation's value or slope at z: a sigmoid of an argument t of at most |t| = 2|z| + z^2/4
/// errs by 8 units and by those of t, 7 |t|; four more operations follow.
const ACTIVATION_UNITS: f64 = 20.0;

fn spread(z: f64) -> f64 {
    1.0 + 2.0 * z.abs() + 0.25 * z * z
}

/// H = act(Z); the gated ones multiply the activated first half with the second.
pub(crate) fn activate(a: &mut Arithmetic, activation: Activation, z: &Matrix) -> Matrix {
    let width = z.ncols() / activation.width();
    Matrix::from_shape_fn((z.nrows(), width), |(i, j)| {
        let (first, second) = (z[[i, j]], z[[i, (j + width) % z.ncols()]]);
        let value = match activation {
            Activation::Gelu => gelu(first).0,
            Activation::Geglu => gelu(first).0 * second,
            Activation::Swiglu => silu(first).0 * second,
        };
        a.rounded(value, ACTIVATION_UNITS, value * spread(first))
    })
}

/// dZ from dH.
pub(crate) fn activate_backward(
    a: &mut Arithmetic,
    activation: Activation,
    z: &Matrix,
    dh: &Matrix,
) -> Matrix {
    let width = dh.ncols();
    let mut dz = Matrix::zeros(z.dim());
    for ((i, j), &dh) in dh.indexed_iter() {
        let first = z[[i, j]];
        let (value, slope) =
            if activation == Activation::Swiglu { silu(first) } else { gelu(first) };
        let magnitude = dh * spread(first);
        if activation == Activation::Gelu {
            dz[[i, j]] = a.rounded(dh * slope, ACTIVATION_UNITS, magnitude);
        } else {
            let second = z[[i, j + width]];
            dz[[i, j]] = a.rounded(dh * second * slope, ACTIVATION_UNITS, magnitude * second);
            dz[[i, j + width]] = a.rounded(dh * value, ACTIVATION_UNITS, magnitude * value);
        }
    }
    dz
}

/// The geometry of causal self-attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) sequences: usize,
    pub(crate) context: usize,
    pub(crate) heads: usize,
}

/// O = dropout(softmax(Q K^T / sqrt(head width))) V, and the probabilities before dropout, one
/// matrix a sequence and head.
#[derive(Debug, Clone)]
pub(crate) struct Attended {
    pub(crate) o: Matrix,
    pub(crate) probabilities: Vec<Matrix>,
}

/// q, k and v of one sequence and head, `[context, head width]`, out of `[p, 3d]`.
fn thirds(qkv: &Matrix, at: Heads, task: usize) -> [Matrix; 3] {
    let d = qkv.ncols() / 3;
    let width = d / at.heads;
    let (row, column) = (task / at.heads * at.context, task % at.heads * width);
    [0, 1, 2].map(|third| {
        Matrix::from_shape_fn((at.context, width), |(i, j)| qkv[[row + i, third * d + column + j]])
    })
}

/// Dropout numbers the probabilities `[sequences, heads, context, context]`.
fn factor(dropout: Option<Dropout>, at: Heads, task: usize, i: usize, j: usize) -> f64 {
    dropout.map_or(1.0, |dropout| dropout.factor((task * at.context + i) * at.context + j))
}

pub(crate) fn attention(
    a: &mut Arithmetic,
    qkv: &Matrix,
    at: Heads,
    dropout: Option<Dropout>,
) -> Attended {
    let d = qkv.ncols() / 3;
    let mut o = Matrix::zeros((qkv.nrows(), d));
    let mut probabilities = Vec::new();
    for task in 0..at.sequences * at.heads {
        let [q, k, v] = thirds(qkv, at, task);
        let width = q.ncols();
        let root = (width as f64).sqrt();
        let q = a.map(&q, 2.0, |q| (q / root, q / root));
        let scores = a.product(&q, &k.t().to_owned());
        let mut p = Matrix::zeros((at.context, at.context));
        for i in 0..at.context {
            let largest = (0..=i).map(|j| scores[[i, j]]).fold(f64::NEG_INFINITY, f64::max);
            let sum = a.sum((0..=i).map(|j| (scores[[i, j]] - largest).exp()));
            for j in 0..=i {
                let below = largest - scores[[i, j]];
                let value = (-below).exp() / sum;
                p[[i, j]] = a.rounded(value, 8.0 + below, value);
            }
        }
        let dropped =
            Matrix::from_shape_fn(p.dim(), |(i, j)| p[[i, j]] * factor(dropout, at, task, i, j));
        let out = a.product(&dropped, &v);
        let (row, column) = (task / at.heads * at.context, task % at.heads * width);
        for ((i, j), &value) in out.indexed_iter() {
            o[[row + i, column + j]] = value;
        }
        probabilities.push(p);
    }
    Attended { o, probabilities }
}

/// The gradient of qkv. The probabilities are computed anew from their log-sum-exp, so they err
/// anew.
pub(crate) fn attention_backward(
    a: &mut Arithmetic,
    qkv: &Matrix,
    at: Heads,
    dropout: Option<Dropout>,
    kept: &Attended,
    d_o: &Matrix,
) -> Matrix {
    let d = d_o.ncols();
    let mut dqkv = Matrix::zeros(qkv.dim());
    for (task, probabilities) in kept.probabilities.iter().enumerate() {
        let [q, k, v] = thirds(qkv, at, task);
        let width = q.ncols();
        let root = (width as f64).sqrt();
        let p = a.map(probabilities, 16.0, |p| (p, if p > 0.0 { p * (1.0 - p.ln()) } else { 0.0 }));
        let (row, column) = (task / at.heads * at.context, task % at.heads * width);
        let dout = Matrix::from_shape_fn((at.context, width), |(i, j)| d_o[[row + i, column + j]]);
        let dp = a.product(&dout, &v.t().to_owned());
        let mut ds = Matrix::zeros(p.dim());
        for i in 0..at.context {
            let through = |j: usize| dp[[i, j]] * factor(dropout, at, task, i, j);
            let projection =
                a.sum((0..width).map(|j| dout[[i, j]] * kept.o[[row + i, column + j]]));
            for j in 0..=i {
                ds[[i, j]] = p[[i, j]] * (through(j) - projection);
                ds[[i, j]] =
                    a.rounded(ds[[i, j]], 4.0, p[[i, j]] * (through(j).abs() + projection.abs()));
            }
        }
        let dropped =
            Matrix::from_shape_fn(p.dim(), |(i, j)| p[[i, j]] * factor(dropout, at, task, i, j));
        let dq = a.product(&ds, &(&k / root));
        let dk = a.product(&ds.t().to_owned(), &(&q / root));
        let dv = a.product(&dropped.t().to_owned(), &dout);
        for (third, gradient) in [dq, dk, dv].into_iter().enumerate() {
            for ((i, j), &value) in gradient.indexed_iter() {
                dqkv[[row + i, third * d + column + j]] = value;
            }
        }
    }
    dqkv
}

/// The sum of the cross-entropies of softmax(logits) against the targets, and the gradient of
/// `scale` times it.
pub(crate) fn loss(
    a: &mut Arithmetic,
    logits: &Matrix,
    targets: &[u32],
    scale: f64,
) -> (f64, Matrix) {
    let mut sum = 0.0;
    let mut dlogits = Matrix::zeros(logits.dim());
    for (i, &target) in targets.iter().enumerate() {
        let row = logits.row(i);
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = a.sum(row.iter().map(|x| (x - largest).exp()));
        let total = a.rounded(total, 6.0, total);
        let cost = total.ln() + largest - row[target as usize];
        sum += a.rounded(cost, 2.0, cost);
        for (j, &x) in row.iter().enumerate() {
            let q = (x - largest).exp() / total;
            let wanted = if j == target as usize { 1.0 } else { 0.0 };
            dlogits[[i, j]] = a.rounded(scale * (q - wanted), 8.0 + (largest - x), scale * q)
                + a.rounded(0.0, 2.0, scale * wanted);
        }
    }
    (a.rounded(sum, 1.0, sum), dlogits)
}
