//! The layers of a transformer and their gradients.
//!
//! Magnitudes passed to [`Arithmetic::rounded`] bound the f32 error of the usual evaluation of each
//! equation, in units of 2^-24.

use ndarray::{Axis, concatenate, s};
use sparse24_core::{
    op::{Activation, AttentionMask, AttentionShape},
    philox::Philox4x32,
};

use super::arithmetic::{Arithmetic, Matrix};

/// The address of random numbers, apart from their site.
#[derive(Debug, Clone, Copy)]
pub struct Address {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step, from 1.
    pub step: u32,
    /// Micro-step, from 0.
    pub micro_step: u32,
}

impl Address {
    /// Word `word` of call `call` of a site: counter = [call, site, micro-step, step], u = (word >>
    /// 8) * 2^-24.
    pub fn uniform(self, site: u32, call: u32, word: usize) -> f64 {
        let words = Philox4x32::new(self.seed).block([call, site, self.micro_step, self.step]);
        f64::from(words[word] >> 8) / f64::from(1 << 24)
    }
}

/// Inverted dropout: the site has purpose 3, element e is drawn from word e mod 4 of call e / 4.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// Seed and step.
    pub address: Address,
    /// Number of the dropout in the model.
    pub number: u32,
    /// Probability of zero.
    pub p: f64,
}

impl Dropout {
    /// The factor of element `e`.
    #[must_use]
    pub fn factor(self, e: usize) -> f64 {
        let u = self.address.uniform(3 << 24 | self.number, (e / 4) as u32, e % 4);
        if u >= self.p { 1.0 / (1.0 - self.p) } else { 0.0 }
    }

    /// Drops whole sequences of x, which take the place of elements; returns x itself without
    /// dropout.
    pub fn apply_to_sequences(
        this: Option<Self>,
        a: &mut Arithmetic,
        sequence_length: usize,
        x: Matrix,
    ) -> Matrix {
        let Some(dropout) = this else { return x };
        Matrix::from_shape_fn(x.dim(), |(i, j)| {
            let value = x[[i, j]] * dropout.factor(i / sequence_length);
            a.rounded(value, 3.0, value)
        })
    }

    /// Drops elements of x, numbered row by row; returns x itself without dropout.
    pub fn apply(this: Option<Self>, a: &mut Arithmetic, x: Matrix) -> Matrix {
        let Some(dropout) = this else { return x };
        let columns = x.ncols();
        Matrix::from_shape_fn(x.dim(), |(i, j)| {
            let value = x[[i, j]] * dropout.factor(i * columns + j);
            a.rounded(value, 3.0, value)
        })
    }
}

/// Z = X W^T + b.
pub fn linear(a: &mut Arithmetic, x: &Matrix, w: &Matrix, bias: Option<&Matrix>) -> Matrix {
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
pub struct Normed {
    /// n * gamma + beta.
    pub y: Matrix,
    /// (x - mean) * rstd.
    pub n: Matrix,
    /// 1 / sqrt(variance + epsilon).
    pub rstd: Vec<f64>,
}

/// y = LayerNorm(x) gamma + beta.
pub fn norm(
    a: &mut Arithmetic,
    x: &Matrix,
    gamma: &Matrix,
    beta: Option<&Matrix>,
    epsilon: f32,
) -> Normed {
    let (p, c) = x.dim();
    let (mut y, mut n, mut rstd) = (Matrix::zeros((p, c)), Matrix::zeros((p, c)), vec![0.0; p]);
    for i in 0..p {
        let mean = a.sum(x.row(i).iter().map(|x| x / c as f64));
        let variance = a.sum(x.row(i).iter().map(|x| (x - mean).powi(2) / c as f64));
        let root = (variance + f64::from(epsilon)).sqrt().recip();
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
pub fn norm_backward(
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

/// (f(z), f'(z)) of GELU in its erf form.
fn gelu_erf(z: f64) -> (f64, f64) {
    let normal = 0.5 * libm::erfc(-z / std::f64::consts::SQRT_2);
    let density = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    (z * normal, normal + z * density)
}

/// (f(z), f'(z)) of SiLU.
fn silu(z: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + (-z).exp());
    (z * s, s + z * s * (1.0 - s))
}

/// (f(z), f'(z)) of tanh.
fn tanh(z: f64) -> (f64, f64) {
    let value = z.tanh();
    (value, 1.0 - value * value)
}

/// (f(z), f'(z)) of ReLU.
fn relu(z: f64) -> (f64, f64) {
    let value = if z <= 0.0 { 0.0 } else { z };
    (value, if value > 0.0 { 1.0 } else { value })
}

fn nonlinearity(activation: Activation) -> fn(f64) -> (f64, f64) {
    match activation {
        Activation::Gelu | Activation::Geglu => gelu,
        Activation::GeluErf => gelu_erf,
        Activation::Swiglu => silu,
        Activation::Tanh => tanh,
        Activation::Relu => relu,
        other => panic!("the oracle has no {other:?}"),
    }
}

fn gated(activation: Activation) -> bool {
    activation.columns_in() == 2
}

/// Units of error of an activation's value or slope at z: a sigmoid of an argument t of at most |t|
/// = 2|z| + z^2/4 errs by 8 units and by those of t, 7 |t|; four more operations follow. The tail
/// of the normal distribution errs by 16 units and by those of its exponent, z^2.
const ACTIVATION_UNITS: f64 = 20.0;

fn spread(z: f64) -> f64 {
    1.0 + 2.0 * z.abs() + 0.25 * z * z
}

/// The magnitude of the error of a sigmoid that is held at 2^-120, times z or the slope's z^3.
fn saturated(z: f64) -> f64 {
    2.0_f64.powi(-100) * (1.0 + z.abs().powi(3))
}

/// H = act(Z); gated activations multiply the activated first half of the columns by the second.
pub fn activate(a: &mut Arithmetic, activation: Activation, z: &Matrix) -> Matrix {
    let width = z.ncols() / activation.columns_in();
    Matrix::from_shape_fn((z.nrows(), width), |(i, j)| {
        let (first, second) = (z[[i, j]], z[[i, (j + width) % z.ncols()]]);
        let (value, _) = nonlinearity(activation)(first);
        let factor = if gated(activation) { second } else { 1.0 };
        let magnitude = value.abs() * spread(first) + saturated(first);
        a.rounded(value * factor, ACTIVATION_UNITS, magnitude * factor)
    })
}

/// dZ from dH.
pub fn activate_backward(
    a: &mut Arithmetic,
    activation: Activation,
    z: &Matrix,
    dh: &Matrix,
) -> Matrix {
    let width = dh.ncols();
    let mut dz = Matrix::zeros(z.dim());
    for ((i, j), &dh) in dh.indexed_iter() {
        let first = z[[i, j]];
        let (value, slope) = nonlinearity(activation)(first);
        let magnitude = dh * spread(first);
        if !gated(activation) {
            dz[[i, j]] = a.rounded(dh * slope, ACTIVATION_UNITS, magnitude);
        } else {
            let second = z[[i, j + width]];
            dz[[i, j]] = a.rounded(dh * second * slope, ACTIVATION_UNITS, magnitude * second);
            let magnitude = dh * (value.abs() * spread(first) + saturated(first));
            dz[[i, j + width]] = a.rounded(dh * value, ACTIVATION_UNITS, magnitude);
        }
    }
    dz
}

/// O = dropout(softmax(mask(Q K^T / sqrt(head_dim)))) V.
#[derive(Debug, Clone)]
pub struct Attended {
    /// `[p, d]`.
    pub o: Matrix,
    /// The probabilities before dropout `[queries, keys]`, one matrix per sequence and head.
    pub probabilities: Vec<Matrix>,
    /// Log of the sum of exponentials `[batch * heads, queries]`; minus infinity without a key.
    pub lse: Matrix,
}

/// The operands of attention.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Geometry.
    pub shape: AttentionShape,
    /// Queries, keys and values.
    pub qkv: &'a [Matrix; 3],
    /// Keys of each sequence that are not padding; all if absent.
    pub lengths: Option<&'a [u32]>,
    /// Dropout of the probabilities, numbered `[batch, heads, queries, keys]`.
    pub dropout: Option<Dropout>,
    /// Additional error, in units of 2^-24, of operands that are computed in between: 0 for f32.
    pub operand_units: f64,
}

impl Attention<'_> {
    /// One head of one sequence of a `[p, d]` matrix with `rows` rows per sequence.
    fn head(&self, of: &Matrix, rows: usize, task: usize) -> Matrix {
        let heads = self.shape.heads;
        let width = of.ncols() / heads;
        let (row, column) = (task / heads * rows, task % heads * width);
        Matrix::from_shape_fn((rows, width), |(i, j)| of[[row + i, column + j]])
    }

    /// The inverse of [`Self::head`].
    fn set_head(&self, into: &mut Matrix, head: &Matrix, task: usize) {
        let (rows, width) = head.dim();
        let (row, column) = (task / self.shape.heads * rows, task % self.shape.heads * width);
        for ((i, j), &value) in head.indexed_iter() {
            into[[row + i, column + j]] = value;
        }
    }

    fn heads(&self, task: usize) -> [Matrix; 3] {
        let AttentionShape { queries, keys, .. } = self.shape;
        let [q, k, v] = self.qkv;
        [self.head(q, queries, task), self.head(k, keys, task), self.head(v, keys, task)]
    }

    /// The number of keys that query i attends to.
    fn visible(&self, task: usize, i: usize) -> usize {
        let AttentionShape { heads, queries, keys, mask, .. } = self.shape;
        let length = self.lengths.map_or(keys, |lengths| lengths[task / heads] as usize);
        match mask {
            AttentionMask::Causal => length.min((i + 1 + keys).saturating_sub(queries)),
            AttentionMask::Full => length,
        }
    }

    fn dropped(&self, p: &Matrix, task: usize) -> Matrix {
        let AttentionShape { queries, keys, .. } = self.shape;
        Matrix::from_shape_fn(p.dim(), |(i, j)| {
            p[[i, j]] * self.dropout.map_or(1.0, |d| d.factor((task * queries + i) * keys + j))
        })
    }

    fn operand(&self, a: &mut Arithmetic, x: Matrix) -> Matrix {
        if self.operand_units == 0.0 { x } else { a.map(&x, self.operand_units, |x| (x, x)) }
    }

    /// The forward pass.
    #[must_use]
    pub fn forward(&self, a: &mut Arithmetic) -> Attended {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let mut o = Matrix::zeros(self.qkv[0].dim());
        let mut lse = Matrix::from_elem((batch * heads, queries), f64::NEG_INFINITY);
        let mut probabilities = Vec::new();
        for task in 0..batch * heads {
            let [q, k, v] = self.heads(task);
            let root = (q.ncols() as f64).sqrt();
            let q = a.map(&q, 2.0, |q| (q / root, q / root));
            let scores = a.product(&q, &k.t().to_owned());
            let mut p = Matrix::zeros((queries, keys));
            for i in 0..queries {
                let visible = self.visible(task, i);
                if visible == 0 {
                    continue;
                }
                let largest =
                    (0..visible).map(|j| scores[[i, j]]).fold(f64::NEG_INFINITY, f64::max);
                let sum = a.sum((0..visible).map(|j| (scores[[i, j]] - largest).exp()));
                let log = sum.ln() + largest;
                lse[[task, i]] = a.rounded(log, 8.0, 1.0 + log.abs() + largest.abs());
                for j in 0..visible {
                    let below = largest - scores[[i, j]];
                    let value = (-below).exp() / sum;
                    p[[i, j]] = a.rounded(value, 8.0 + below, value);
                }
            }
            let operand = self.operand(a, self.dropped(&p, task));
            let out = a.product(&operand, &v);
            self.set_head(&mut o, &out, task);
            probabilities.push(p);
        }
        Attended { o, probabilities, lse }
    }

    /// The gradients of q, k and v. The probabilities are computed again from their log-sum-exp, so
    /// they err again.
    #[must_use]
    pub fn backward(&self, a: &mut Arithmetic, kept: &Attended, d_o: &Matrix) -> [Matrix; 3] {
        let AttentionShape { queries, .. } = self.shape;
        let mut gradients = [0, 1, 2].map(|part| Matrix::zeros(self.qkv[part].dim()));
        for (task, probabilities) in kept.probabilities.iter().enumerate() {
            let [q, k, v] = self.heads(task);
            let root = (q.ncols() as f64).sqrt();
            let p =
                a.map(probabilities, 16.0, |p| (p, if p > 0.0 { p * (1.0 - p.ln()) } else { 0.0 }));
            let [o, d_o] = [&kept.o, d_o].map(|of| self.head(of, queries, task));
            let dp = a.product(&d_o, &v.t().to_owned());
            let through = self.dropped(&dp, task);
            let mut ds = Matrix::zeros(p.dim());
            for i in 0..queries {
                let projection = a.sum(d_o.row(i).iter().zip(o.row(i)).map(|(d_o, o)| d_o * o));
                for j in 0..self.visible(task, i) {
                    let (p, through) = (p[[i, j]], through[[i, j]]);
                    let magnitude = p * (through.abs() + projection.abs());
                    ds[[i, j]] = a.rounded(p * (through - projection), 4.0, magnitude);
                }
            }
            let ds = self.operand(a, ds);
            let dq = a.product(&ds, &(&k / root));
            let dk = a.product(&ds.t().to_owned(), &(&q / root));
            let dropped = self.operand(a, self.dropped(&p, task));
            let dv = a.product(&dropped.t().to_owned(), &d_o);
            for (gradient, part) in gradients.iter_mut().zip([dq, dk, dv]) {
                self.set_head(gradient, &part, task);
            }
        }
        gradients
    }
}

/// N equal column ranges.
#[must_use]
pub fn split<const N: usize>(x: &Matrix) -> [Matrix; N] {
    let width = x.ncols() / N;
    std::array::from_fn(|part| x.slice(s![.., part * width..(part + 1) * width]).to_owned())
}

/// The inverse of [`split`].
///
/// # Panics
/// If the numbers of rows differ.
#[must_use]
pub fn join(parts: &[Matrix]) -> Matrix {
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    concatenate(Axis(1), &views).expect("as many rows each")
}

/// A target that contributes nothing.
pub const IGNORE: u32 = u32::MAX;

/// The sum of the cross-entropies of softmax(logits) against the targets, and the gradient of
/// `scale` times it. With label smoothing s, the wanted distribution is (1 - s) at the target plus
/// s / V everywhere.
pub fn loss(
    a: &mut Arithmetic,
    logits: &Matrix,
    targets: &[u32],
    smoothing: f64,
    scale: f64,
) -> (f64, Matrix) {
    mixed_loss(a, logits, targets, None, smoothing, scale)
}

/// [`loss`] with, if there are any, second targets and the shares of the first: 1 - s is divided
/// between the two.
pub fn mixed_loss(
    a: &mut Arithmetic,
    logits: &Matrix,
    targets: &[u32],
    mixed: Option<(&[u32], &[f32])>,
    smoothing: f64,
    scale: f64,
) -> (f64, Matrix) {
    let mut sum = 0.0;
    let mut dlogits = Matrix::zeros(logits.dim());
    let uniform = smoothing / logits.ncols() as f64;
    for (i, &target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORE) {
        let row = logits.row(i);
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = a.sum(row.iter().map(|x| (x - largest).exp()));
        let total = a.rounded(total, 6.0, total);
        let log = total.ln() + largest;
        let (second, share) =
            mixed.map_or((target, 1.0), |(seconds, shares)| (seconds[i], f64::from(shares[i])));
        let wanted = |j: usize| {
            let of = |id: u32, share: f64| if j == id as usize { share } else { 0.0 };
            uniform + (1.0 - smoothing) * (of(target, share) + of(second, 1.0 - share))
        };
        let cost: f64 = row
            .iter()
            .enumerate()
            .map(|(j, &x)| if wanted(j) > 0.0 { wanted(j) * (log - x) } else { 0.0 })
            .sum();
        let spread =
            if smoothing > 0.0 { row.iter().map(|x| uniform * (log - x).abs()).sum() } else { 0.0 };
        sum += a.rounded(cost, 2.0, cost);
        sum = a.rounded(sum, row.len() as f64, spread);
        for (j, &x) in row.iter().enumerate() {
            let q = (x - largest).exp() / total;
            dlogits[[i, j]] = a.rounded(scale * (q - wanted(j)), 8.0 + (largest - x), scale * q)
                + a.rounded(0.0, 2.0, scale * wanted(j));
        }
    }
    (a.rounded(sum, 1.0, sum), dlogits)
}

/// The sum of (z - t)^2 over the rows of one column z, where a target has the bits of the f32 t,
/// and the gradient of `scale` times it.
pub fn squared_error(a: &mut Arithmetic, z: &Matrix, targets: &[u32], scale: f64) -> (f64, Matrix) {
    let mut sum = 0.0;
    let mut dz = Matrix::zeros(z.dim());
    for (i, &target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORE) {
        let wanted = f64::from(f32::from_bits(target));
        let difference = a.rounded(z[[i, 0]] - wanted, 1.0, z[[i, 0]] - wanted);
        sum += a.rounded(difference * difference, 1.0, difference * difference);
        dz[[i, 0]] = a.rounded(2.0 * scale * difference, 2.0, 2.0 * scale * difference);
    }
    (a.rounded(sum, 1.0, sum), dz)
}

/// The sum over n sequences of (-ln q_0(first) - ln q_1(last)) / 2, where q is the softmax of a
/// column of z `[p, 2]` over the first `lengths[i]` rows of sequence i, and the gradient of `scale`
/// times it. The first target of a sequence is in the row of its first token, and is its last one.
pub fn span_loss(
    a: &mut Arithmetic,
    z: &Matrix,
    targets: &[u32],
    lengths: &[u32],
    scale: f64,
) -> (f64, Matrix) {
    let rows = targets.len() / lengths.len().max(1);
    let mut sum = 0.0;
    let mut dz = Matrix::zeros(z.dim());
    for (i, &length) in lengths.iter().enumerate() {
        let before = i * rows;
        let first = (0..rows).find(|row| targets[before + row] != IGNORE);
        let Some(first) = first else { continue };
        let tokens = before..before + length as usize;
        for (column, at) in [first as u32, targets[before + first]].into_iter().enumerate() {
            let logits = Matrix::from_shape_fn((1, tokens.len()), |(_, j)| z[[before + j, column]]);
            let (loss, gradient) = self::loss(a, &logits, &[at], 0.0, scale / 2.0);
            sum = a.rounded(sum + loss / 2.0, 1.0, sum + loss / 2.0);
            tokens.clone().for_each(|row| dz[[row, column]] = gradient[[0, row - before]]);
        }
    }
    (a.rounded(sum, 1.0, sum), dz)
}
