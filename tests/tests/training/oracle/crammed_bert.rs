//! Crammed BERT forward and backward: pre-LN blocks, scaled sinusoidal positions, padding, and a
//! tied head behind one linear layer that reads the rows with a target.

use sparse24_core::op::AttentionMask;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attended, Normed},
};
use sparse24_train::{backend::op::HeadLoss, model::BertSpec, objective::Batch};

use super::{bert::sequence_head, pass::Pass};

const WORDS: &str = "embedding.word_embedding.weight";
const FACTOR: &str = "embedding.pos_embedding.scale_factor";
const NORMS: [&str; 2] = ["embedding.norm", "final_norm"];
const HEAD: &str = "prediction_head";
const EPSILON: f32 = 1e-12;
const MASK: AttentionMask = AttentionMask::Full;

struct Block {
    norms: [Normed; 2],
    qkv: [Matrix; 3],
    attended: Attended,
    z: Matrix,
    h: Matrix,
}

/// The pass up to the final norm.
struct Forward {
    embedded: Normed,
    blocks: Vec<Block>,
    last: Normed,
}

/// The head of masked tokens.
struct Masked {
    /// Numbers of the rows with a target.
    rows: Vec<usize>,
    targets: Vec<u32>,
    masked: Matrix,
    z: Matrix,
    logits: Matrix,
}

fn sinusoid(position: usize, j: usize, d: usize) -> f64 {
    let pair = 2 * (j / 2);
    let angle = position as f64 * 10000f64.powf(-(pair as f64) / d as f64);
    if j == pair { angle.sin() } else { angle.cos() }
}

pub(super) fn loss(pass: &mut Pass<'_>, spec: &BertSpec, batch: &Batch) -> f64 {
    let Forward { last, .. } = forward(pass, spec, batch);
    if let Some(head) = sequence_head(spec) {
        return head.loss(pass, &last.y, batch);
    }
    let Masked { logits, targets, .. } = masked(pass, &last.y, batch);
    layers::loss(pass.arithmetic, &logits, &targets, 0.0, 0.0).0
}

fn forward(pass: &mut Pass<'_>, spec: &BertSpec, batch: &Batch) -> Forward {
    let (words, factor) = (&pass.weights[WORDS], pass.weights[FACTOR][[0, 0]]);
    let length = pass.batch.sequence_length;
    let sum = Matrix::from_shape_fn((batch.tokens.len(), spec.d_model), |(i, j)| {
        // Two roundings: of the sinusoid and of the product.
        let position = factor * sinusoid(i % length, j, spec.d_model);
        let position = pass.arithmetic.rounded(position, 2.0, position);
        let value = words[[batch.tokens[i] as usize, j]] + position;
        pass.arithmetic.rounded(value, 1.0, value)
    });
    let embedded = pass.norm(NORMS[0], &sum, EPSILON);
    let mut x = pass.dropped(0, embedded.y.clone());
    let mut blocks = Vec::new();
    for layer in 0..spec.layers {
        let of = |part: &str| format!("layers.{layer}.{part}");
        let first = pass.norm(&of("norm1"), &x, EPSILON);
        let qkv = pass.linear(&of("attn.self_attention.query_key_value"), &first.y);
        let qkv = layers::split(&qkv);
        let attention = pass.attention(layer, (spec.heads, MASK), &qkv, Some(&batch.lengths));
        let attended = attention.forward(pass.arithmetic);
        let out = pass.linear(&of("attn.dense"), &attended.o);
        let out = pass.dropped(2 + 3 * layer, out);
        x = pass.plus(&x, &out);
        let second = pass.norm(&of("norm2"), &x, EPSILON);
        let z = pass.linear(&of("ffn.dense_in"), &second.y);
        let h = layers::activate(pass.arithmetic, spec.activation, &z);
        let out = pass.linear(&of("ffn.dense_out"), &h);
        let out = pass.dropped(3 + 3 * layer, out);
        x = pass.plus(&x, &out);
        blocks.push(Block { norms: [first, second], qkv, attended, z, h });
    }
    Forward { embedded, blocks, last: pass.norm(NORMS[1], &x, EPSILON) }
}

fn masked(pass: &mut Pass<'_>, x: &Matrix, batch: &Batch) -> Masked {
    let rows: Vec<usize> =
        (0..x.nrows()).filter(|&row| batch.targets[row] != HeadLoss::IGNORE).collect();
    let targets = rows.iter().map(|&row| batch.targets[row]).collect();
    let masked = x.select(ndarray::Axis(0), &rows);
    let z = pass.linear(HEAD, &masked);
    let logits = pass.logits(WORDS, &z);
    Masked { rows, targets, masked, z, logits }
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    spec: &BertSpec,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let Forward { embedded, blocks, last } = forward(pass, spec, batch);
    let (sum, dy, dhead) = match sequence_head(spec) {
        Some(head) => {
            let (sum, dy) = head.train(pass, &last.y, batch, scale, gradients);
            (sum, dy, None)
        }
        None => {
            let (sum, dy, dhead) = masked_backward(pass, &last.y, batch, scale, gradients);
            (sum, dy, Some(dhead))
        }
    };
    let mut dx = pass.norm_backward(NORMS[1], &last, &dy, gradients);
    // Both halves of a block are x + f(LayerNorm(x)).
    for (layer, kept) in blocks.iter().enumerate().rev() {
        let of = |part: &str| format!("layers.{layer}.{part}");
        let [first, second] = &kept.norms;
        let ddown = pass.dropped(3 + 3 * layer, dx.clone());
        let dh = pass.linear_backward(&of("ffn.dense_out"), &kept.h, &ddown, gradients);
        let dz = layers::activate_backward(pass.arithmetic, spec.activation, &kept.z, &dh);
        let dy = pass.linear_backward(&of("ffn.dense_in"), &second.y, &dz, gradients);
        let through = pass.norm_backward(&of("norm2"), second, &dy, gradients);
        dx = pass.plus(&dx, &through);

        let dout = pass.dropped(2 + 3 * layer, dx.clone());
        let d_o = pass.linear_backward(&of("attn.dense"), &kept.attended.o, &dout, gradients);
        let lengths = Some(&batch.lengths[..]);
        let attention = pass.attention(layer, (spec.heads, MASK), &kept.qkv, lengths);
        let dqkv = layers::join(&attention.backward(pass.arithmetic, &kept.attended, &d_o));
        let name = of("attn.self_attention.query_key_value");
        let dy = pass.linear_backward(&name, &first.y, &dqkv, gradients);
        let through = pass.norm_backward(&of("norm1"), first, &dy, gradients);
        dx = pass.plus(&dx, &through);
    }
    let dx = pass.dropped(0, dx);
    let dx = pass.norm_backward(NORMS[0], &embedded, &dx, gradients);
    let dwords = pass.table_backward(spec.vocabulary, |i| batch.tokens[i] as usize, &dx);
    let of_table = dhead.map_or_else(|| dwords.clone(), |dhead| pass.plus(&dhead, &dwords));
    pass.accumulate(gradients, WORDS, of_table);
    let length = pass.batch.sequence_length;
    let terms = dx.indexed_iter().map(|((i, j), d)| d * sinusoid(i % length, j, spec.d_model));
    let dfactor = pass.arithmetic.sum(terms);
    pass.accumulate(gradients, FACTOR, Matrix::from_elem((1, 1), dfactor));
    sum
}

/// The loss, dX, and the gradient of the tied table.
fn masked_backward(
    pass: &mut Pass<'_>,
    x: &Matrix,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> (f64, Matrix, Matrix) {
    let Masked { rows, targets, masked, z, logits } = masked(pass, x, batch);
    let (sum, dz, dhead, _) = pass.head_backward(WORDS, (&z, &logits), &targets, scale);
    let dmasked = pass.linear_backward(HEAD, &masked, &dz, gradients);
    let mut dx = Matrix::zeros(x.dim());
    for (&row, dmasked) in rows.iter().zip(dmasked.rows()) {
        dx.row_mut(row).assign(&dmasked);
    }
    (sum, dx, dhead)
}
