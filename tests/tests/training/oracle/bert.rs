//! BERT forward and backward: post-LN blocks, learned positions, segments, padding, and a tied head
//! with a transform and a bias that reads the rows with a target.

use sparse24_core::op::AttentionMask;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attended, Normed},
};
use sparse24_train::{backend::op::HeadLoss, model::BertSpec, objective::Batch};

use super::{pass::Pass, sequence::Head};

const EMBEDDING: [&str; 2] =
    ["embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"];
const SEGMENTS: &str = "embeddings.token_type_embeddings.weight";
const NORM: &str = "embeddings.LayerNorm";
const TRANSFORM: [&str; 2] =
    ["cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"];
const BIAS: &str = "cls.predictions.bias";
const EPSILON: f32 = 1e-12;
const MASK: AttentionMask = AttentionMask::Full;

struct Block {
    x: Matrix,
    qkv: [Matrix; 3],
    attended: Attended,
    norms: [Normed; 2],
    z: Matrix,
    h: Matrix,
}

/// The pass up to the last block.
struct Forward {
    embedded: Normed,
    blocks: Vec<Block>,
    x: Matrix,
}

/// The head of masked tokens.
struct Masked {
    /// Numbers of the rows with a target.
    rows: Vec<usize>,
    targets: Vec<u32>,
    masked: Matrix,
    z: Matrix,
    normed: Normed,
    logits: Matrix,
}

pub(super) fn sequence_head(spec: &BertSpec) -> Option<Head> {
    let (name, pooler, dropout) = ("classifier", Some("pooler.dense"), 1 + 3 * spec.layers);
    spec.prediction.map(|prediction| Head { name, pooler, dropout, prediction })
}

pub(super) fn loss(pass: &mut Pass<'_>, spec: &BertSpec, batch: &Batch) -> f64 {
    let Forward { x, .. } = forward(pass, spec, batch);
    if let Some(head) = sequence_head(spec) {
        return head.loss(pass, &x, batch);
    }
    let Masked { logits, targets, .. } = masked(pass, spec, &x, batch);
    layers::loss(pass.arithmetic, &logits, &targets, 0.0, 0.0).0
}

fn forward(pass: &mut Pass<'_>, spec: &BertSpec, batch: &Batch) -> Forward {
    let words = pass.embed(EMBEDDING, &batch.tokens);
    let table = &pass.weights[SEGMENTS];
    let segments =
        Matrix::from_shape_fn(words.dim(), |(i, j)| table[[batch.segments[i] as usize, j]]);
    let sum = pass.plus(&words, &segments);
    let embedded = pass.norm(NORM, &sum, EPSILON);
    let mut x = pass.dropped(0, embedded.y.clone());
    let mut blocks = Vec::new();
    for layer in 0..spec.layers {
        let of = |part: &str| format!("encoder.layer.{layer}.{part}");
        let qkv = layers::split(&pass.linear(&of("attention.self.qkv"), &x));
        let attention = pass.attention(layer, (spec.heads, MASK), &qkv, Some(&batch.lengths));
        let attended = attention.forward(pass.arithmetic);
        let out = pass.linear(&of("attention.output.dense"), &attended.o);
        let out = pass.dropped(2 + 3 * layer, out);
        let sum = pass.plus(&x, &out);
        let first = pass.norm(&of("attention.output.LayerNorm"), &sum, EPSILON);
        let z = pass.linear(&of("intermediate.dense"), &first.y);
        let h = layers::activate(pass.arithmetic, spec.activation, &z);
        let out = pass.linear(&of("output.dense"), &h);
        let out = pass.dropped(3 + 3 * layer, out);
        let sum = pass.plus(&first.y, &out);
        let second = pass.norm(&of("output.LayerNorm"), &sum, EPSILON);
        let input = std::mem::replace(&mut x, second.y.clone());
        blocks.push(Block { x: input, qkv, attended, norms: [first, second], z, h });
    }
    Forward { embedded, blocks, x }
}

fn masked(pass: &mut Pass<'_>, spec: &BertSpec, x: &Matrix, batch: &Batch) -> Masked {
    let rows: Vec<usize> =
        (0..x.nrows()).filter(|&row| batch.targets[row] != HeadLoss::IGNORE).collect();
    let targets = rows.iter().map(|&row| batch.targets[row]).collect();
    let masked = x.select(ndarray::Axis(0), &rows);
    let z = pass.linear(TRANSFORM[0], &masked);
    let h = layers::activate(pass.arithmetic, spec.activation, &z);
    let normed = pass.norm(TRANSFORM[1], &h, EPSILON);
    let logits = pass.logits(EMBEDDING[0], &normed.y);
    let bias = &pass.weights[BIAS];
    let logits = pass.plus(&logits, &Matrix::from_shape_fn(logits.dim(), |(_, j)| bias[[0, j]]));
    Masked { rows, targets, masked, z, normed, logits }
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    spec: &BertSpec,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let Forward { embedded, blocks, x } = forward(pass, spec, batch);
    let (sum, mut dx, dhead) = match sequence_head(spec) {
        Some(head) => {
            let (sum, dx) = head.train(pass, &x, batch, scale, gradients);
            (sum, dx, None)
        }
        None => {
            let (sum, dx, dhead) = masked_backward(pass, spec, &x, batch, scale, gradients);
            (sum, dx, Some(dhead))
        }
    };
    // Both halves of a block are LayerNorm(x + f(x)).
    for (layer, kept) in blocks.iter().enumerate().rev() {
        let of = |part: &str| format!("encoder.layer.{layer}.{part}");
        let [first, second] = &kept.norms;
        let dsum = pass.norm_backward(&of("output.LayerNorm"), second, &dx, gradients);
        let ddown = pass.dropped(3 + 3 * layer, dsum.clone());
        let dh = pass.linear_backward(&of("output.dense"), &kept.h, &ddown, gradients);
        let dz = layers::activate_backward(pass.arithmetic, spec.activation, &kept.z, &dh);
        let through = pass.linear_backward(&of("intermediate.dense"), &first.y, &dz, gradients);
        let dy = pass.plus(&dsum, &through);

        let dsum = pass.norm_backward(&of("attention.output.LayerNorm"), first, &dy, gradients);
        let dout = pass.dropped(2 + 3 * layer, dsum.clone());
        let name = of("attention.output.dense");
        let d_o = pass.linear_backward(&name, &kept.attended.o, &dout, gradients);
        let lengths = Some(&batch.lengths[..]);
        let attention = pass.attention(layer, (spec.heads, MASK), &kept.qkv, lengths);
        let dqkv = attention.backward(pass.arithmetic, &kept.attended, &d_o);
        let dqkv = layers::join(&dqkv);
        let through = pass.linear_backward(&of("attention.self.qkv"), &kept.x, &dqkv, gradients);
        dx = pass.plus(&dsum, &through);
    }
    let dx = pass.dropped(0, dx);
    let dx = pass.norm_backward(NORM, &embedded, &dx, gradients);
    let [dwords, dpositions] = pass.embed_backward(EMBEDDING, &batch.tokens, &dx);
    let of_table = dhead.map_or_else(|| dwords.clone(), |dhead| pass.plus(&dhead, &dwords));
    pass.accumulate(gradients, EMBEDDING[0], of_table);
    pass.accumulate(gradients, EMBEDDING[1], dpositions);
    let dsegments = pass.table_backward(2, |i| batch.segments[i] as usize, &dx);
    pass.accumulate(gradients, SEGMENTS, dsegments);
    sum
}

/// The loss, dX, and the gradient of the tied table.
fn masked_backward(
    pass: &mut Pass<'_>,
    spec: &BertSpec,
    x: &Matrix,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> (f64, Matrix, Matrix) {
    let Masked { rows, targets, masked, z, normed, logits } = masked(pass, spec, x, batch);
    let of_head = (&normed.y, &logits);
    let (sum, dy, dhead, dlogits) = pass.head_backward(EMBEDDING[0], of_head, &targets, scale);
    let dbias = pass.arithmetic.column_sums(&dlogits);
    pass.accumulate(gradients, BIAS, dbias);
    let dh = pass.norm_backward(TRANSFORM[1], &normed, &dy, gradients);
    let dz = layers::activate_backward(pass.arithmetic, spec.activation, &z, &dh);
    let dmasked = pass.linear_backward(TRANSFORM[0], &masked, &dz, gradients);
    let mut dx = Matrix::zeros(x.dim());
    for (&row, dmasked) in rows.iter().zip(dmasked.rows()) {
        dx.row_mut(row).assign(&dmasked);
    }
    (sum, dx, dhead)
}
