//! The Transformer forward and backward: post-LN encoder and decoder, attention to the encoder's
//! output, fixed sinusoids, a factor of the embeddings, one table, and label smoothing.

use sparse24_core::op::AttentionMask;
use sparse24_tests::oracle::{
    arithmetic::{Matrix, Tensors},
    layers,
};
use sparse24_train::{model::TransformerSpec, objective::Batch};

use super::{
    pass::Pass,
    sublayer::{self, Backward, Function, Heads, Order, Sublayer},
};

const TABLE: &str = "encoder.embed_tokens.weight";
const EPSILON: f32 = 1e-5;

/// The names, the mask and the first dropout of a stack.
#[derive(Clone, Copy)]
struct Stack {
    name: &'static str,
    mask: AttentionMask,
    /// The number of the dropout of the embedding. Those of the blocks follow: of the probabilities
    /// and of the sum of each attention, and of the feed-forward's sum.
    dropout: usize,
}

fn stacks(spec: &TransformerSpec) -> [Stack; 2] {
    let (causal, full) = (AttentionMask::Causal, AttentionMask::Full);
    [
        Stack { name: "encoder", mask: full, dropout: 0 },
        Stack { name: "decoder", mask: causal, dropout: 1 + 3 * spec.layers },
    ]
}

impl Stack {
    fn block<'a>(
        &self,
        spec: &TransformerSpec,
        layer: usize,
        lengths: Option<&'a [u32]>,
        memory: Option<(&Matrix, &'a [u32])>,
    ) -> Vec<Sublayer<'a>> {
        let of = |part: &str| format!("{}.layers.{layer}.{part}", self.name);
        let attention = |mask, lengths, memory| {
            let heads = Heads { count: spec.heads, mask, lengths, dropout: None };
            Function::Attention(heads, memory)
        };
        let mut functions = vec![(
            ["self_attn_layer_norm", "self_attn.qkv_proj", "self_attn.out_proj"],
            attention(self.mask, lengths, None),
        )];
        functions.extend(memory.map(|(memory, lengths)| {
            let memory = Some((of("encoder_attn.kv_proj"), memory.clone()));
            (
                ["encoder_attn_layer_norm", "encoder_attn.q_proj", "encoder_attn.out_proj"],
                attention(AttentionMask::Full, Some(lengths), memory),
            )
        }));
        let feed_forward = Function::FeedForward(spec.activation);
        functions.push((["final_layer_norm", "fc1", "fc2"], feed_forward));
        let dropouts = 2 * functions.len() - 1;
        let sublayer = |(at, (names, function)): (usize, ([&str; 3], _))| {
            let [norm, first, last] = names.map(of);
            let dropout = self.dropout + 1 + dropouts * layer + (2 * at + 1).min(dropouts - 1);
            let linear = [first, last];
            let (order, epsilon, path) = (Order::Post, EPSILON, None);
            Sublayer { order, epsilon, norm, linear, dropout, path, function }
        };
        functions.into_iter().enumerate().map(sublayer).collect()
    }

    /// The output of the last block, and the backward passes.
    fn forward<'a>(
        &self,
        pass: &mut Pass<'_>,
        spec: &TransformerSpec,
        (tokens, lengths): (&[u32], Option<&'a [u32]>),
        memory: Option<(&Matrix, &'a [u32])>,
    ) -> (Matrix, Vec<Backward<'a>>) {
        let embedded = embed(pass, tokens);
        let x = pass.dropped(self.dropout, embedded);
        let blocks = (0..spec.layers).flat_map(|layer| self.block(spec, layer, lengths, memory));
        sublayer::forward(pass, blocks, x)
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
    let sums = pass.table_backward(TABLE, |i| tokens[i] as usize, dx);
    let scale = f64::from((dx.ncols() as f64).sqrt() as f32);
    sums.mapv(|sum| pass.arithmetic.rounded(scale * sum, 1.0, scale * sum))
}

/// The outputs and the backward passes of both stacks.
fn forward<'a>(
    pass: &mut Pass<'_>,
    spec: &TransformerSpec,
    batch: &'a Batch,
) -> [(Matrix, Vec<Backward<'a>>); 2] {
    let ([encoder, decoder], lengths) = (stacks(spec), &batch.lengths[..]);
    let encoded = encoder.forward(pass, spec, (&batch.source, Some(lengths)), None);
    let memory = Some((&encoded.0, lengths));
    let decoded = decoder.forward(pass, spec, (&batch.tokens, None), memory);
    [encoded, decoded]
}

/// Validation losses have no label smoothing.
pub(super) fn loss(pass: &mut Pass<'_>, spec: &TransformerSpec, batch: &Batch) -> f64 {
    let logits = logits(pass, spec, batch);
    layers::loss(pass.arithmetic, &logits, &batch.targets, 0.0, 0.0).0
}

/// The logits after each token of the decoder.
pub(crate) fn logits(pass: &mut Pass<'_>, spec: &TransformerSpec, batch: &Batch) -> Matrix {
    let [_, (y, _)] = forward(pass, spec, batch);
    pass.logits(TABLE, &y)
}

pub(super) fn train(
    pass: &mut Pass<'_>,
    spec: &TransformerSpec,
    batch: &Batch,
    scale: f64,
    gradients: &mut Tensors,
) -> f64 {
    let [(_, encoded), (y, decoded)] = forward(pass, spec, batch);
    let logits = pass.logits(TABLE, &y);
    let smoothing = f64::from(spec.label_smoothing);
    let (sum, dlogits) = layers::loss(pass.arithmetic, &logits, &batch.targets, smoothing, scale);
    let mut dtable = pass.arithmetic.product(&dlogits.t().to_owned(), &y);
    let mut dy = Some(pass.arithmetic.product(&dlogits, &pass.weights[TABLE]));
    let [encoder, decoder] = stacks(spec);
    for (stack, tokens, passes) in
        [(decoder, &batch.tokens, decoded), (encoder, &batch.source, encoded)]
    {
        let dx = dy.expect("the decoder reads the encoder's output");
        let (dx, dmemory) = sublayer::backward(pass, passes, dx, gradients);
        let dx = pass.dropped(stack.dropout, dx);
        let part = embed_backward(pass, tokens, &dx);
        dtable = pass.plus(&dtable, &part);
        dy = dmemory;
    }
    pass.accumulate(gradients, TABLE, dtable);
    sum
}
