//! The Transformer forward and backward: post-LN encoder and decoder, attention to the encoder's
//! output, fixed sinusoids, a factor of the embeddings, one table, and label smoothing.

use sparse24_core::op::{AttentionMask, AttentionShape};
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers::{self, Attended, Attention, Normed},
};
use sparse24_train::{model::TransformerSpec, nn::BatchShape, objective::Batch};

use super::pass::Pass;

const TABLE: &str = "encoder.embed_tokens.weight";
const EPSILON: f32 = 1e-5;

struct Block {
    x: Matrix,
    qkv: [Matrix; 3],
    attended: Attended,
    norm: Normed,
    cross: Option<Cross>,
    z: Matrix,
    h: Matrix,
    last: Normed,
}

struct Cross {
    qkv: [Matrix; 3],
    attended: Attended,
    norm: Normed,
}

/// The names, the mask and the first dropout of a stack.
#[derive(Clone, Copy)]
struct Stack {
    name: &'static str,
    mask: AttentionMask,
    /// The numbers of the dropouts: of the embedding; of a block's attention, of the sum after it,
    /// the same of its attention to the encoder, and of its last sum.
    dropout: usize,
    per_block: usize,
}

fn stacks(spec: &TransformerSpec) -> [Stack; 2] {
    let (causal, full) = (AttentionMask::Causal, AttentionMask::Full);
    [
        Stack { name: "encoder", mask: full, dropout: 0, per_block: 3 },
        Stack { name: "decoder", mask: causal, dropout: 1 + 3 * spec.layers, per_block: 5 },
    ]
}

impl Stack {
    fn of(&self, layer: usize, part: &str) -> String {
        format!("{}.layers.{layer}.{part}", self.name)
    }

    /// The dropout of the k-th sum of a block.
    fn sum(&self, layer: usize, k: usize) -> usize {
        let last = self.per_block - 1;
        self.dropout + 1 + self.per_block * layer + (2 * k + 1).min(last)
    }
}

fn position([p, j]: [usize; 2], d: usize) -> f64 {
    let (half, place) = (d / 2, (p + 2) as f64);
    let angle = place * 10000_f64.powf(-((j % half) as f64) / (half - 1) as f64);
    f64::from((if j < half { angle.sin() } else { angle.cos() }) as f32)
}

fn embed(pass: &mut Pass<'_>, tokens: &[u32]) -> Matrix {
    let (table, length) = (&pass.weights[TABLE], pass.batch.sequence_length);
    let d = table.ncols();
    let scale = f64::from((d as f64).sqrt() as f32);
    Matrix::from_shape_fn((tokens.len(), d), |(i, j)| {
        let scaled = scale * table[[tokens[i] as usize, j]];
        let value = scaled + position([i % length, j], d);
        pass.arithmetic.rounded(value, 1.0, value.abs() + scaled.abs())
    })
}

/// The gradient of the table from the rows that were embedded.
fn embed_backward(pass: &mut Pass<'_>, tokens: &[u32], dx: &Matrix) -> Matrix {
    let rows = pass.weights[TABLE].nrows();
    let sums = pass.table_backward(rows, |i| tokens[i] as usize, dx);
    let scale = f64::from((dx.ncols() as f64).sqrt() as f32);
    sums.mapv(|sum| pass.arithmetic.rounded(scale * sum, 1.0, scale * sum))
}

fn attention<'a>(
    pass: &Pass<'_>,
    (heads, mask): (usize, AttentionMask),
    qkv: &'a [Matrix; 3],
    lengths: Option<&'a [u32]>,
) -> Attention<'a> {
    let BatchShape { size: batch, sequence_length: queries } = pass.batch;
    let shape = AttentionShape { batch, heads, queries, keys: queries, mask };
    Attention { shape, qkv, lengths, dropout: None, operand_units: 0.0 }
}

/// The outputs of a stack's blocks, and the last one's.
fn run(
    pass: &mut Pass<'_>,
    spec: &TransformerSpec,
    stack: Stack,
    (tokens, lengths): (&[u32], Option<&[u32]>),
    memory: Option<(&Matrix, &[u32])>,
) -> (Vec<Block>, Matrix) {
    let embedded = embed(pass, tokens);
    let mut x = pass.dropped(stack.dropout, embedded);
    let mut blocks = Vec::new();
    for layer in 0..spec.layers {
        let of = |part: &str| stack.of(layer, part);
        let qkv = layers::split(&pass.linear(&of("self_attn.qkv_proj"), &x));
        let attended =
            attention(pass, (spec.heads, stack.mask), &qkv, lengths).forward(pass.arithmetic);
        let out = pass.linear(&of("self_attn.out_proj"), &attended.o);
        let out = pass.dropped(stack.sum(layer, 0), out);
        let sum = pass.plus(&x, &out);
        let norm = pass.norm(&of("self_attn_layer_norm"), &sum, EPSILON);
        let mut y = norm.y.clone();
        let cross = memory.map(|(memory, lengths)| {
            let q = pass.linear(&of("encoder_attn.q_proj"), &y);
            let [k, v] = layers::split(&pass.linear(&of("encoder_attn.kv_proj"), memory));
            let qkv = [q, k, v];
            let full = (spec.heads, AttentionMask::Full);
            let attended = attention(pass, full, &qkv, Some(lengths)).forward(pass.arithmetic);
            let out = pass.linear(&of("encoder_attn.out_proj"), &attended.o);
            let out = pass.dropped(stack.sum(layer, 1), out);
            let sum = pass.plus(&y, &out);
            let norm = pass.norm(&of("encoder_attn_layer_norm"), &sum, EPSILON);
            y = norm.y.clone();
            Cross { qkv, attended, norm }
        });
        let z = pass.linear(&of("fc1"), &y);
        let h = layers::activate(pass.arithmetic, spec.activation, &z);
        let out = pass.linear(&of("fc2"), &h);
        let out = pass.dropped(stack.sum(layer, 2), out);
        let sum = pass.plus(&y, &out);
        let last = pass.norm(&of("final_layer_norm"), &sum, EPSILON);
        let input = std::mem::replace(&mut x, last.y.clone());
        blocks.push(Block { x: input, qkv, attended, norm, cross, z, h, last });
    }
    (blocks, x)
}

/// Every block of both stacks, the encoder's output and the decoder's.
fn forward(
    pass: &mut Pass<'_>,
    spec: &TransformerSpec,
    batch: &Batch,
) -> ([Vec<Block>; 2], [Matrix; 2]) {
    let ([encoder, decoder], lengths) = (stacks(spec), &batch.lengths[..]);
    let (encoded, memory) = run(pass, spec, encoder, (&batch.source, Some(lengths)), None);
    let of_source = Some((&memory, lengths));
    let (decoded, y) = run(pass, spec, decoder, (&batch.tokens, None), of_source);
    ([encoded, decoded], [memory, y])
}

/// Validation losses have no label smoothing.
pub(super) fn loss(pass: &mut Pass<'_>, spec: &TransformerSpec, batch: &Batch) -> f64 {
    let logits = logits(pass, spec, batch);
    layers::loss(pass.arithmetic, &logits, &batch.targets, 0.0, 0.0).0
}

/// The logits after each token of the decoder.
pub(crate) fn logits(pass: &mut Pass<'_>, spec: &TransformerSpec, batch: &Batch) -> Matrix {
    let (_, [_, y]) = forward(pass, spec, batch);
    pass.logits(TABLE, &y)
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    spec: &TransformerSpec,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let ([encoded, decoded], [memory, y]) = forward(pass, spec, batch);
    let logits = pass.logits(TABLE, &y);
    let smoothing = f64::from(spec.label_smoothing);
    let (sum, dlogits) = layers::loss(pass.arithmetic, &logits, &batch.targets, smoothing, scale);
    let mut dtable = pass.arithmetic.product(&dlogits.t().to_owned(), &y);
    let dy = pass.arithmetic.product(&dlogits, &pass.weights[TABLE]);
    let ([encoder, decoder], lengths) = (stacks(spec), &batch.lengths[..]);
    let of_source = Some((&memory, lengths));
    let (dx, dmemory) = backward(pass, spec, decoder, (&decoded, None), of_source, dy, gradients);
    let part = embed_backward(pass, &batch.tokens, &dx);
    dtable = pass.plus(&dtable, &part);
    let dmemory = dmemory.expect("the decoder has blocks");
    let blocks = (&encoded[..], Some(lengths));
    let (dx, _) = backward(pass, spec, encoder, blocks, None, dmemory, gradients);
    let part = embed_backward(pass, &batch.source, &dx);
    dtable = pass.plus(&dtable, &part);
    pass.accumulate(gradients, TABLE, dtable);
    sum
}

/// The gradients of a stack's embedded input and of the memory.
fn backward(
    pass: &mut Pass<'_>,
    spec: &TransformerSpec,
    stack: Stack,
    (blocks, lengths): (&[Block], Option<&[u32]>),
    memory: Option<(&Matrix, &[u32])>,
    mut dx: Matrix,
    gradients: &mut Tensors,
) -> (Matrix, Option<Matrix>) {
    let mut dmemory: Option<Matrix> = None;
    for (layer, kept) in blocks.iter().enumerate().rev() {
        let of = |part: &str| stack.of(layer, part);
        let before = kept.cross.as_ref().map_or(&kept.norm.y, |cross| &cross.norm.y);
        let dsum = pass.norm_backward(&of("final_layer_norm"), &kept.last, &dx, gradients);
        let dout = pass.dropped(stack.sum(layer, 2), dsum.clone());
        let dh = pass.linear_backward(&of("fc2"), &kept.h, &dout, gradients);
        let dz = layers::activate_backward(pass.arithmetic, spec.activation, &kept.z, &dh);
        let through = pass.linear_backward(&of("fc1"), before, &dz, gradients);
        dx = pass.plus(&dsum, &through);

        if let (Some(cross), Some((memory, lengths))) = (&kept.cross, memory) {
            let name = of("encoder_attn_layer_norm");
            let dsum = pass.norm_backward(&name, &cross.norm, &dx, gradients);
            let dout = pass.dropped(stack.sum(layer, 1), dsum.clone());
            let name = of("encoder_attn.out_proj");
            let d_o = pass.linear_backward(&name, &cross.attended.o, &dout, gradients);
            let full = (spec.heads, AttentionMask::Full);
            let [dq, dk, dv] = attention(pass, full, &cross.qkv, Some(lengths)).backward(
                pass.arithmetic,
                &cross.attended,
                &d_o,
            );
            let name = of("encoder_attn.q_proj");
            let through = pass.linear_backward(&name, &kept.norm.y, &dq, gradients);
            let name = of("encoder_attn.kv_proj");
            let part = pass.linear_backward(&name, memory, &layers::join(&[dk, dv]), gradients);
            dmemory = Some(match dmemory {
                None => part,
                Some(sum) => pass.plus(&sum, &part),
            });
            dx = pass.plus(&dsum, &through);
        }

        let dsum = pass.norm_backward(&of("self_attn_layer_norm"), &kept.norm, &dx, gradients);
        let dout = pass.dropped(stack.sum(layer, 0), dsum.clone());
        let d_o =
            pass.linear_backward(&of("self_attn.out_proj"), &kept.attended.o, &dout, gradients);
        let dqkv = attention(pass, (spec.heads, stack.mask), &kept.qkv, lengths).backward(
            pass.arithmetic,
            &kept.attended,
            &d_o,
        );
        let dqkv = layers::join(&dqkv);
        let through = pass.linear_backward(&of("self_attn.qkv_proj"), &kept.x, &dqkv, gradients);
        dx = pass.plus(&dsum, &through);
    }
    (pass.dropped(stack.dropout, dx), dmemory)
}
