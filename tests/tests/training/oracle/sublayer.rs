//! A sublayer of a block, forward and backward: attention or a feed-forward, with a norm before it
//! or after the sum.
//!
//! A forward pass returns its backward pass, a closure that owns the activations.

use sparse24_core::op::{Activation, AttentionMask, AttentionShape};
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attention, Dropout},
};
use sparse24_train::nn::BatchShape;

use super::pass::Pass;

/// dX, and the gradient of the memory that the sublayer reads, from dY.
pub(super) type Backward<'a> =
    Box<dyn FnOnce(&mut Pass<'_>, &Matrix, &mut Tensors) -> (Matrix, Option<Matrix>) + 'a>;

/// The place of the norm.
#[derive(Clone, Copy)]
pub(super) enum Order {
    /// x + f(norm(x)).
    Pre,
    /// norm(x + f(x)).
    Post,
}

#[derive(Clone, Copy)]
pub(super) struct Heads<'a> {
    pub(super) count: usize,
    pub(super) mask: AttentionMask,
    pub(super) lengths: Option<&'a [u32]>,
    /// The number of the dropout of the probabilities.
    pub(super) dropout: Option<usize>,
}

pub(super) enum Function<'a> {
    /// Keys and values are projected from x, or from a memory by the linear layer of this name.
    Attention(Heads<'a>, Option<(String, Matrix)>),
    FeedForward(Activation),
}

pub(super) struct Sublayer<'a> {
    pub(super) order: Order,
    pub(super) epsilon: f32,
    pub(super) norm: String,
    /// The first and the last linear layer.
    pub(super) linear: [String; 2],
    /// The number of the dropout of f.
    pub(super) dropout: usize,
    /// Drops f for whole sequences.
    pub(super) path: Option<Dropout>,
    pub(super) function: Function<'a>,
}

impl<'a> Sublayer<'a> {
    fn forward(self, pass: &mut Pass<'_>, x: &Matrix) -> (Matrix, Backward<'a>) {
        let Self { order, epsilon, norm, linear, dropout, path, function } = self;
        let branch = |pass: &mut Pass<'_>, x| {
            let (out, backward) = match function {
                Function::Attention(heads, memory) => attention(pass, heads, memory, linear, x),
                Function::FeedForward(activation) => feed_forward(pass, activation, linear, x),
            };
            let out = pass.dropped(dropout, out);
            (pass.skipped(path, out), backward)
        };
        let branch_backward =
            move |pass: &mut Pass<'_>, dy: &Matrix, gradients: &mut _, backward: Backward<'_>| {
                let dout = pass.skipped(path, dy.clone());
                let dout = pass.dropped(dropout, dout);
                backward(pass, &dout, gradients)
            };
        match order {
            Order::Pre => {
                let normed = pass.norm(&norm, x, epsilon);
                let (out, backward) = branch(pass, normed.y.clone());
                let whole: Backward<'a> = Box::new(move |pass, dy, gradients| {
                    let (through, dmemory) = branch_backward(pass, dy, gradients, backward);
                    let through = pass.norm_backward(&norm, &normed, &through, gradients);
                    (pass.plus(dy, &through), dmemory)
                });
                (pass.plus(x, &out), whole)
            }
            Order::Post => {
                let (out, backward) = branch(pass, x.clone());
                let sum = pass.plus(x, &out);
                let normed = pass.norm(&norm, &sum, epsilon);
                let y = normed.y.clone();
                let whole: Backward<'a> = Box::new(move |pass, dy, gradients| {
                    let dsum = pass.norm_backward(&norm, &normed, dy, gradients);
                    let (through, dmemory) = branch_backward(pass, &dsum, gradients, backward);
                    (pass.plus(&dsum, &through), dmemory)
                });
                (y, whole)
            }
        }
    }
}

fn attention<'a>(
    pass: &mut Pass<'_>,
    heads: Heads<'a>,
    memory: Option<(String, Matrix)>,
    [first, last]: [String; 2],
    x: Matrix,
) -> (Matrix, Backward<'a>) {
    let projected = pass.linear(&first, &x);
    let qkv = match &memory {
        None => layers::split(&projected),
        Some((name, memory)) => {
            let [k, v] = layers::split(&pass.linear(name, memory));
            [projected, k, v]
        }
    };
    let attended = heads.over(pass, &qkv).forward(pass.arithmetic);
    let out = pass.linear(&last, &attended.o);
    let backward: Backward<'a> = Box::new(move |pass, dout, gradients| {
        let d_o = pass.linear_backward(&last, &attended.o, dout, gradients);
        let dqkv = heads.over(pass, &qkv).backward(pass.arithmetic, &attended, &d_o);
        let Some((name, memory)) = memory else {
            return (pass.linear_backward(&first, &x, &layers::join(&dqkv), gradients), None);
        };
        let [dq, dk, dv] = dqkv;
        let dx = pass.linear_backward(&first, &x, &dq, gradients);
        let dkv = layers::join(&[dk, dv]);
        (dx, Some(pass.linear_backward(&name, &memory, &dkv, gradients)))
    });
    (out, backward)
}

impl<'a> Heads<'a> {
    fn over(self, pass: &Pass<'_>, qkv: &'a [Matrix; 3]) -> Attention<'a> {
        let BatchShape { size: batch, sequence_length: queries } = pass.batch;
        let Self { count: heads, mask, lengths, dropout } = self;
        let shape = AttentionShape { batch, heads, queries, keys: queries, mask };
        let dropout = dropout.and_then(|number| pass.dropout(number));
        Attention { shape, qkv, lengths, dropout, operand_units: 0.0 }
    }
}

fn feed_forward(
    pass: &mut Pass<'_>,
    activation: Activation,
    [first, last]: [String; 2],
    x: Matrix,
) -> (Matrix, Backward<'static>) {
    let z = pass.linear(&first, &x);
    let h = layers::activate(pass.arithmetic, activation, &z);
    let out = pass.linear(&last, &h);
    let backward: Backward<'static> = Box::new(move |pass, dout, gradients| {
        let dh = pass.linear_backward(&last, &h, dout, gradients);
        let dz = layers::activate_backward(pass.arithmetic, activation, &z, &dh);
        (pass.linear_backward(&first, &x, &dz, gradients), None)
    });
    (out, backward)
}

/// The output of sublayers one after the other, and their backward passes.
pub(super) fn forward<'a>(
    pass: &mut Pass<'_>,
    sublayers: impl IntoIterator<Item = Sublayer<'a>>,
    mut x: Matrix,
) -> (Matrix, Vec<Backward<'a>>) {
    let mut passes = Vec::new();
    for sublayer in sublayers {
        let (y, backward) = sublayer.forward(pass, &x);
        x = y;
        passes.push(backward);
    }
    (x, passes)
}

/// The gradients of the input and of the memory.
pub(super) fn backward(
    pass: &mut Pass<'_>,
    passes: Vec<Backward<'_>>,
    mut dx: Matrix,
    gradients: &mut Tensors,
) -> (Matrix, Option<Matrix>) {
    let mut dmemory: Option<Matrix> = None;
    for backward in passes.into_iter().rev() {
        let (dinput, part) = backward(pass, &dx, gradients);
        dx = dinput;
        dmemory = match (dmemory, part) {
            (Some(sum), Some(part)) => Some(pass.plus(&sum, &part)),
            (sum, part) => sum.or(part),
        };
    }
    (dx, dmemory)
}
