//! The operations of layers.

use core::ops::Range;

use sparse24_core::op::{Accumulate, Activation, AttentionMask, AttentionShape, Dropout};

use super::operations;
use crate::{Gradient24, Tensor, Weight24};

operations! {
    /// The operations of layers: products, activations, norms, attention, embeddings, losses.
    Dense = DenseOp {
        /// See [`LinearForward`].
        LinearForward(LinearForward),
        /// See [`LinearDgrad`].
        LinearDgrad(LinearDgrad),
        /// See [`LinearWgrad`].
        LinearWgrad(LinearWgrad),
        /// See [`BiasGrad`].
        BiasGrad(BiasGrad),
        /// See [`ActivationForward`].
        ActivationForward(ActivationForward),
        /// See [`ActivationBackward`].
        ActivationBackward(ActivationBackward),
        /// See [`Add`].
        Add(Add),
        /// See [`NormForward`].
        NormForward(NormForward),
        /// See [`NormBackward`].
        NormBackward(NormBackward),
        /// See [`AttentionForward`].
        AttentionForward(AttentionForward),
        /// See [`AttentionBackward`].
        AttentionBackward(AttentionBackward),
        /// See [`EmbedForward`].
        EmbedForward(EmbedForward),
        /// See [`EmbedBackward`].
        EmbedBackward(EmbedBackward),
        /// See [`HeadLoss`].
        HeadLoss(HeadLoss),
        /// See [`Logits`].
        Logits(Logits),
        /// See [`DropoutOp`].
        Dropout(DropoutOp),
        /// See [`DropSequences`].
        DropSequences(DropSequences),
        /// See [`GatherRows`].
        GatherRows(GatherRows),
        /// See [`ScatterRows`].
        ScatterRows(ScatterRows),
        /// See [`Scale`].
        Scale(Scale),
        /// See [`ScaleGrad`].
        ScaleGrad(ScaleGrad),
    }
}

/// The weight operand of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// W `[r, q]`.
    Dense(Tensor),
    /// S(W).
    Pruned(Weight24),
}

/// The output-gradient operand of the weight gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gradient {
    /// dZ `[p, r]`.
    Dense(Tensor),
    /// MVUE(dZ^T).
    Sampled(Gradient24),
}

/// Z = X W^T + b.
#[derive(Debug, Clone, Copy)]
pub struct LinearForward {
    /// X `[p, q]`.
    pub x: Tensor,
    /// W `[r, q]`.
    pub weight: Weight,
    /// b `[1, r]`.
    pub bias: Option<Tensor>,
    /// Z `[p, r]`, overwritten.
    pub z: Tensor,
}

/// dX = dZ W.
#[derive(Debug, Clone, Copy)]
pub struct LinearDgrad {
    /// dZ `[p, r]`.
    pub dz: Tensor,
    /// W `[r, q]`.
    pub weight: Weight,
    /// dX `[p, q]`, overwritten.
    pub dx: Tensor,
}

/// dW = dZ^T X.
#[derive(Debug, Clone, Copy)]
pub struct LinearWgrad {
    /// dZ `[p, r]`.
    pub dz: Gradient,
    /// X `[p, q]`.
    pub x: Tensor,
    /// dW `[r, q]`.
    pub dw: Tensor,
    /// Whether dW is overwritten or added to.
    pub accumulate: Accumulate,
}

/// db = column sums of dZ.
#[derive(Debug, Clone, Copy)]
pub struct BiasGrad {
    /// dZ `[p, r]`.
    pub dz: Tensor,
    /// db `[1, r]`.
    pub db: Tensor,
    /// Whether db is overwritten or added to.
    pub accumulate: Accumulate,
}

/// H = act(Z).
#[derive(Debug, Clone, Copy)]
pub struct ActivationForward {
    /// The nonlinearity.
    pub activation: Activation,
    /// Z `[p, d_ff * activation.columns_in()]`.
    pub z: Tensor,
    /// H `[p, d_ff]`, overwritten.
    pub h: Tensor,
}

/// dZ = dH * act'(Z), for gated activations one gradient per half of Z.
#[derive(Debug, Clone, Copy)]
pub struct ActivationBackward {
    /// The nonlinearity.
    pub activation: Activation,
    /// dH `[p, d_ff]`.
    pub dh: Tensor,
    /// Z, as in the forward pass.
    pub z: Tensor,
    /// dZ, the shape of Z, overwritten.
    pub dz: Tensor,
}

/// out = x + delta, all of one element type.
#[derive(Debug, Clone, Copy)]
pub struct Add {
    /// `[p, d]`.
    pub x: Tensor,
    /// `[p, d]`.
    pub delta: Tensor,
    /// `[p, d]`, overwritten; may be x.
    pub out: Tensor,
}

/// y = (x - mean) / sqrt(variance + epsilon) * gamma + beta for each row (Ba et al. 2016).
#[derive(Debug, Clone, Copy)]
pub struct NormForward {
    /// `[p, d]`.
    pub x: Tensor,
    /// `[1, d]`.
    pub gamma: Tensor,
    /// `[1, d]`; zero if absent.
    pub beta: Option<Tensor>,
    /// At least 0.
    pub epsilon: f32,
    /// `[p, d]`, overwritten.
    pub y: Tensor,
    /// Mean and reciprocal standard deviation `[p, 2]`, overwritten.
    pub stats: Tensor,
}

/// The gradient of [`NormForward`].
#[derive(Debug, Clone, Copy)]
pub struct NormBackward {
    /// `[p, d]`.
    pub dy: Tensor,
    /// As in the forward pass.
    pub x: Tensor,
    /// From the forward pass.
    pub stats: Tensor,
    /// `[1, d]`.
    pub gamma: Tensor,
    /// `[p, d]`.
    pub dx: Tensor,
    /// Whether dx is overwritten or added to.
    pub accumulate_dx: Accumulate,
    /// `[1, d]`.
    pub dgamma: Tensor,
    /// `[1, d]`.
    pub dbeta: Option<Tensor>,
    /// Whether dgamma and dbeta are overwritten or added to.
    pub accumulate: Accumulate,
}

/// o = softmax(mask(q k^T / sqrt(head_dim))) v for every sequence and head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionForward {
    /// Geometry.
    pub shape: AttentionShape,
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// Number of keys of each sequence that are not padding, u32 `[batch, 1]`; all if absent. A
    /// query without a key has output 0 and no gradient.
    pub lengths: Option<Tensor>,
    /// Dropout of the probabilities.
    pub dropout: Option<AttentionDropout>,
    /// Overwritten.
    pub o: Tensor,
    /// Log of the sum of exponentials `[batch * heads, queries]`, overwritten.
    pub lse: Tensor,
}

/// Dropout of attention's probabilities.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDropout {
    /// Probability and random stream; probabilities are numbered as `[batch, heads, Tq, Tk]`.
    pub drawn: Dropout,
    /// u32 `[batch * heads, shape.tile_words()]`: which probabilities are kept, written by the
    /// forward pass in the backend's own order and read by the backward pass. Has no columns unless
    /// the backend [reads it](crate::Capabilities::reads_kept).
    pub kept: Tensor,
}

/// The gradient of [`AttentionForward`], with the probabilities recomputed.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackward {
    /// As in the forward pass, with its `o` and `lse`.
    pub forward: AttentionForward,
    /// Gradient of o.
    pub d_o: Tensor,
    /// Gradients of q, k, v, overwritten: separate buffers, or column ranges of one, left to right.
    pub dqkv: [Tensor; 3],
}

/// `out = scale E[tokens] + P[position in the sequence]`.
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// Token ids `[p, 1]`.
    pub tokens: Tensor,
    /// Tokens per sequence.
    pub sequence_length: usize,
    /// The factor of E: 1, or that of a Transformer, sqrt(d).
    pub scale: f32,
    /// E `[V, d]`, or its gradient.
    pub token_table: Tensor,
    /// P `[at least sequence_length, d]`, or its gradient.
    pub position_table: Option<Tensor>,
    /// `[p, d]`: the output, or its gradient.
    pub rows: Tensor,
}

/// The embedding itself: [`Embed::rows`] is overwritten.
#[derive(Debug, Clone, Copy)]
pub struct EmbedForward(pub Embed);

/// The gradient of [`EmbedForward`]: added to the gradients of the tables, in token order. A
/// backend multiplies each row by the scale before it is added, or the sum of a token's rows.
#[derive(Debug, Clone, Copy)]
pub struct EmbedBackward(pub Embed);

/// The loss of the outputs x E^T + b of a head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TargetLoss {
    /// The cross-entropy of their softmax against an id, V at least 2.
    CrossEntropy {
        /// Label smoothing in `[0, 1)`.
        smoothing: f32,
        /// Second targets, of rows that were mixed from two.
        mixed: Option<Mixed>,
    },
    /// (z - t)^2 of their only column z, V = 1, where a target has the bits of the f32 t.
    SquaredError,
    /// The mean of the cross-entropies of a span's first and last token, V = 2: of the softmax of
    /// column 0 and of column 1 over the tokens of a sequence that are not padding. Of a sequence's
    /// targets, the first that is not ignored marks the span's first token, and its value is the
    /// position of the last; a sequence without one contributes nothing. All logits are held at
    /// once.
    Span {
        /// Number of tokens of each sequence that are not padding `[n, 1]`; each has p / n tokens.
        lengths: Tensor,
    },
}

/// Second targets: the loss of a row is its share of the cross-entropy against its target, and the
/// rest of that against its second target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mixed {
    /// Ids `[p, 1]`; unlike targets, none is ignored.
    pub targets: Tensor,
    /// Shares in `[0, 1]` of the first targets, f32 `[p, 1]`.
    pub shares: Tensor,
}

impl Mixed {
    /// The second targets of these rows.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        let Self { targets, shares } = self;
        Self { targets: targets.rows(rows.clone()), shares: shares.rows(rows) }
    }
}

/// Sum over rows of the loss of x E^T + b against the targets.
#[derive(Debug, Clone, Copy)]
pub struct HeadLoss {
    /// `[p, d]`.
    pub x: Tensor,
    /// E `[V, d]`.
    pub embedding: Tensor,
    /// b `[1, V]`; zero if absent.
    pub bias: Option<Tensor>,
    /// Targets `[p, 1]`; [`HeadLoss::IGNORE`] contributes nothing.
    pub targets: Tensor,
    /// How a row is compared with its target.
    pub kind: TargetLoss,
    /// Scratch `[rows at a time, V]`: the most logits that are held at once.
    pub logits: Tensor,
    /// One f32, overwritten: the sum of the tokens' losses.
    pub loss: Tensor,
    /// In training, the gradients of `loss_scale` of the step state times the loss; a non-finite
    /// loss then raises the flag.
    pub gradients: Option<HeadGradients>,
}

impl HeadLoss {
    /// A target that contributes nothing.
    pub const IGNORE: u32 = u32::MAX;
}

/// Gradients of [`HeadLoss`].
#[derive(Debug, Clone, Copy)]
pub struct HeadGradients {
    /// `[p, d]`, overwritten.
    pub dx: Tensor,
    /// `[V, d]`.
    pub dembedding: Tensor,
    /// `[1, V]`, if there is a bias.
    pub dbias: Option<Tensor>,
    /// Whether dembedding and dbias are overwritten or added to.
    pub accumulate: Accumulate,
}

/// out = x E^T + b.
#[derive(Debug, Clone, Copy)]
pub struct Logits {
    /// `[p, d]`.
    pub x: Tensor,
    /// E `[V, d]`.
    pub embedding: Tensor,
    /// b `[1, V]`; zero if absent.
    pub bias: Option<Tensor>,
    /// `[p, V]`, overwritten.
    pub out: Tensor,
}

/// out = dropout(x); the gradient is the same operation on the gradient.
#[derive(Debug, Clone, Copy)]
pub struct DropoutOp {
    /// `[p, d]`.
    pub x: Tensor,
    /// `[p, d]`, overwritten; may be x.
    pub out: Tensor,
    /// Probability and random stream.
    pub dropout: Dropout,
}

/// Stochastic depth (Huang et al. 2016): a sequence of out is that of x, scaled, or zero; the
/// gradient is the same operation on the gradient. Sequence s takes the place of element s in
/// [`Dropout`].
#[derive(Debug, Clone, Copy)]
pub struct DropSequences {
    /// `[p, d]`.
    pub x: Tensor,
    /// `[p, d]`, overwritten; may be x.
    pub out: Tensor,
    /// Rows per sequence, which divide p.
    pub sequence_length: usize,
    /// Probability and random stream.
    pub dropout: Dropout,
}

/// Row i of out = row `rows[i]` of x.
#[derive(Debug, Clone, Copy)]
pub struct GatherRows {
    /// `[p, d]`.
    pub x: Tensor,
    /// Numbers of rows `[n, 1]`; the output is zero for [`HeadLoss::IGNORE`].
    pub rows: Tensor,
    /// `[n, d]`, overwritten.
    pub out: Tensor,
}

/// dx = 0, then row `rows[i]` of dx = row i of dout: the gradient of [`GatherRows`] for rows that
/// are all different.
#[derive(Debug, Clone, Copy)]
pub struct ScatterRows {
    /// `[n, d]`.
    pub dout: Tensor,
    /// As in the forward pass.
    pub rows: Tensor,
    /// `[p, d]`, overwritten.
    pub dx: Tensor,
}

/// out = s x, in f32.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// `[n, d]`.
    pub x: Tensor,
    /// s `[1, 1]`.
    pub scale: Tensor,
    /// `[n, d]`, overwritten.
    pub out: Tensor,
}

/// ds = sum of x * dout: the gradient of the factor of [`Scale`].
#[derive(Debug, Clone, Copy)]
pub struct ScaleGrad {
    /// As in the forward pass.
    pub x: Tensor,
    /// `[n, d]`, f32.
    pub dout: Tensor,
    /// `[1, 1]`.
    pub ds: Tensor,
    /// Whether ds is overwritten or added to.
    pub accumulate: Accumulate,
}

/// Multiply-adds of a `[m, k] x [k, n]` product, counted twice.
fn product(m: usize, n: usize, k: usize) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

/// The two products of an attention forward pass; a causal mask halves them.
fn attention(op: &AttentionForward) -> f64 {
    let AttentionShape { batch, queries, keys, mask, .. } = op.shape;
    let all = 2.0 * product(batch * queries, keys, op.q.shape[1]);
    if mask == AttentionMask::Causal { all / 2.0 } else { all }
}

impl DenseOp {
    /// Floating-point operations of products, a multiply-add counted as two.
    #[must_use]
    pub fn flops(&self) -> f64 {
        match self {
            Self::LinearForward(op) => product(op.x.shape[0], op.z.shape[1], op.x.shape[1]),
            Self::LinearDgrad(op) => product(op.dz.shape[0], op.dx.shape[1], op.dz.shape[1]),
            Self::LinearWgrad(op) => product(op.dw.shape[0], op.dw.shape[1], op.x.shape[0]),
            Self::AttentionForward(op) => attention(op),
            // Scores are recomputed, so five products instead of two.
            Self::AttentionBackward(op) => 2.5 * attention(&op.forward),
            Self::HeadLoss(op) => {
                let products = if op.gradients.is_some() { 3.0 } else { 1.0 };
                products * product(op.x.shape[0], op.embedding.shape[0], op.x.shape[1])
            }
            Self::Logits(op) => product(op.x.shape[0], op.embedding.shape[0], op.x.shape[1]),
            _ => 0.0,
        }
    }

    /// The gradients of parameters that it writes.
    #[must_use]
    pub fn gradients(&self) -> [Option<Tensor>; 2] {
        match self {
            Self::LinearWgrad(op) => [Some(op.dw), None],
            Self::BiasGrad(op) => [Some(op.db), None],
            Self::NormBackward(op) => [Some(op.dgamma), op.dbeta],
            Self::EmbedBackward(EmbedBackward(op)) => [Some(op.token_table), op.position_table],
            Self::HeadLoss(op) => op.gradients.map_or([None; 2], |g| [Some(g.dembedding), g.dbias]),
            Self::ScaleGrad(op) => [Some(op.ds), None],
            _ => [None; 2],
        }
    }

    /// The output of a forward operation, which later layers read.
    #[must_use]
    pub fn forward_output(&self) -> Option<Tensor> {
        match self {
            Self::LinearForward(op) => Some(op.z),
            Self::ActivationForward(op) => Some(op.h),
            Self::Add(op) => Some(op.out),
            Self::NormForward(op) => Some(op.y),
            Self::AttentionForward(op) => Some(op.o),
            Self::EmbedForward(EmbedForward(op)) => Some(op.rows),
            Self::Dropout(op) => Some(op.out),
            Self::DropSequences(op) => Some(op.out),
            Self::GatherRows(op) => Some(op.out),
            Self::Scale(op) => Some(op.out),
            _ => None,
        }
    }
}
