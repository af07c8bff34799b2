//! The bidirectional encoder forward and backward: post-LN blocks, learned positions, separate
//! projections of queries and of keys and values, padding, and an untied, smoothed head.

use sparse24_core::op::AttentionMask;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attended, Normed},
};
use sparse24_train::{model::EncoderSpec, objective::Batch};

use super::pass::Pass;

const EMBEDDING: [&str; 2] = ["word.weight", "position.weight"];
const HEAD: &str = "decoder.weight";
const MASK: AttentionMask = AttentionMask::Full;

struct Block {
    x: Matrix,
    qkv: [Matrix; 3],
    attended: Attended,
    norms: [Normed; 2],
    z: Matrix,
    h: Matrix,
}

pub(super) struct Forward {
    embedded: Normed,
    blocks: Vec<Block>,
    x: Matrix,
    pub(super) logits: Matrix,
}

pub(super) fn forward(pass: &mut Pass<'_>, spec: &EncoderSpec, batch: &Batch) -> Forward {
    let rows = pass.embed(EMBEDDING, &batch.tokens);
    let embedded = pass.norm("norm", &rows);
    let mut x = pass.dropped(0, embedded.y.clone());
    let mut blocks = Vec::new();
    for layer in 0..spec.layers {
        let of = |part: &str| format!("layer.{layer}.{part}");
        let q = pass.linear(&of("attention.q"), &x);
        let [k, v] = layers::split(&pass.linear(&of("attention.kv"), &x));
        let qkv = [q, k, v];
        let attention = pass.attention(layer, (spec.heads, MASK), &qkv, Some(&batch.lengths));
        let attended = attention.forward(pass.arithmetic);
        let out = pass.linear(&of("attention.out"), &attended.o);
        let out = pass.dropped(2 + 3 * layer, out);
        let sum = pass.plus(&x, &out);
        let first = pass.norm(&of("norm_1"), &sum);
        let z = pass.linear(&of("mlp.up"), &first.y);
        let h = layers::activate(pass.arithmetic, spec.activation, &z);
        let out = pass.linear(&of("mlp.down"), &h);
        let out = pass.dropped(3 + 3 * layer, out);
        let sum = pass.plus(&first.y, &out);
        let second = pass.norm(&of("norm_2"), &sum);
        let input = std::mem::replace(&mut x, second.y.clone());
        blocks.push(Block { x: input, qkv, attended, norms: [first, second], z, h });
    }
    let logits = pass.logits(HEAD, &x);
    Forward { embedded, blocks, x, logits }
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    spec: &EncoderSpec,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let Forward { embedded, blocks, x, logits } = forward(pass, spec, batch);
    let smoothing = f64::from(spec.smoothing);
    let (sum, mut dx, dhead) =
        pass.head_backward(HEAD, (&x, &logits), &batch.targets, (smoothing, scale));
    pass.accumulate(gradients, HEAD, dhead);
    // Both halves of a block are LayerNorm(x + f(x)).
    for (layer, kept) in blocks.iter().enumerate().rev() {
        let of = |part: &str| format!("layer.{layer}.{part}");
        let [first, second] = &kept.norms;
        let dsum = pass.norm_backward(&of("norm_2"), second, &dx, gradients);
        let ddown = pass.dropped(3 + 3 * layer, dsum.clone());
        let dh = pass.linear_backward(&of("mlp.down"), &kept.h, &ddown, gradients);
        let dz = layers::activate_backward(pass.arithmetic, spec.activation, &kept.z, &dh);
        let through = pass.linear_backward(&of("mlp.up"), &first.y, &dz, gradients);
        let dy = pass.plus(&dsum, &through);

        let dsum = pass.norm_backward(&of("norm_1"), first, &dy, gradients);
        let dout = pass.dropped(2 + 3 * layer, dsum.clone());
        let d_o = pass.linear_backward(&of("attention.out"), &kept.attended.o, &dout, gradients);
        let lengths = Some(&batch.lengths[..]);
        let attention = pass.attention(layer, (spec.heads, MASK), &kept.qkv, lengths);
        let [dq, dk, dv] = attention.backward(pass.arithmetic, &kept.attended, &d_o);
        let of_q = pass.linear_backward(&of("attention.q"), &kept.x, &dq, gradients);
        let dkv = layers::join(&[dk, dv]);
        let of_kv = pass.linear_backward(&of("attention.kv"), &kept.x, &dkv, gradients);
        let through = pass.plus(&of_q, &of_kv);
        dx = pass.plus(&dsum, &through);
    }
    let dx = pass.dropped(0, dx);
    let dx = pass.norm_backward("norm", &embedded, &dx, gradients);
    let tables = pass.embed_backward(EMBEDDING, &batch.tokens, &dx);
    for (name, gradient) in EMBEDDING.into_iter().zip(tables) {
        pass.accumulate(gradients, name, gradient);
    }
    sum
}
