//! The operands of the operations of a [`Backend`](super::Backend): what is read, what is written,
//! and the equation between them.
//!
//! Deliberately absent: what an operation does where it is documented by its method alone.

use sparse24_core::{philox::Site, prune::ValueMap};

use super::{Beta, Gradient, MaskId, Tensor, Weight, Weight24};

/// The nonlinearity of a feed-forward layer; the gated ones halve the width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Activation {
    /// GELU, tanh form.
    Gelu,
    /// GELU_tanh(first half) * second half.
    Geglu,
    /// SiLU(first half) * second half.
    Swiglu,
}

impl Activation {
    /// Columns of Z for one column of H.
    #[must_use]
    pub const fn width(self) -> usize {
        match self {
            Self::Gelu => 1,
            Self::Geglu | Self::Swiglu => 2,
        }
    }
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionMask {
    /// Query i sees keys `0..=i + (Tk - Tq)`.
    Causal,
    /// Every query sees every key.
    Full,
}

/// The geometry of attention: q and o are `[batch*queries, heads*head_width]`, k and v
/// `[batch*keys, heads*head_width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Tq: queries a sequence.
    pub queries: usize,
    /// Tk: keys a sequence.
    pub keys: usize,
    /// Which keys a query sees.
    pub mask: AttentionMask,
}

/// Inverted dropout: element e is kept when its uniform is at least `p`, and scaled by 1/(1-p).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The probability of zero, in [0, 1).
    pub p: f32,
    /// Where the uniforms come from.
    pub site: Site,
}

/// out = S(w): w under the mask, kept values mapped.
#[derive(Debug, Clone, Copy)]
pub struct CompressWeight {
    /// w `[r, q]`.
    pub w: Tensor,
    /// Its mask.
    pub mask: MaskId,
    /// Which products the mask makes 2:4.
    pub orientation: Orientation,
    /// What becomes of a kept value.
    pub map: ValueMap,
    /// Overwritten.
    pub out: Weight24,
}

/// Which products a mask makes 2:4; others compute S(w) densely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// Forward and dgrad: the mask is transposable.
    Both,
    /// The forward: the mask is row-wise.
    Forward,
    /// None: dgrad's operand, 2:4 in another order of rows.
    Permuted,
}

/// Z = X W^T + b, then H = act(Z) if asked for.
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
    /// H `[p, r / act.width()]`, overwritten.
    pub then: Option<(Activation, Tensor)>,
}

/// dX = dZ W; or, through the activation whose output X was, dX = (dZ W) * act'(Z').
#[derive(Debug, Clone, Copy)]
pub struct LinearDgrad {
    /// dZ `[p, r]`.
    pub dz: Tensor,
    /// W `[r, q]`.
    pub weight: Weight,
    /// The activation and its input Z' `[p, q * act.width()]`.
    pub then: Option<(Activation, Tensor)>,
    /// dX, overwritten: `[p, q]`, or the shape of Z'.
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
    /// Overwrite or accumulate.
    pub beta: Beta,
}

/// residual = x + delta; y = LayerNorm(residual) * gamma + beta, epsilon 1e-5.
#[derive(Debug, Clone, Copy)]
pub struct NormForward {
    /// `[p, d]`.
    pub x: Tensor,
    /// `[p, d]`; none is zero.
    pub delta: Option<Tensor>,
    /// `[1, d]`.
    pub gamma: Tensor,
    /// `[1, d]`; none is zero.
    pub beta: Option<Tensor>,
    /// `[p, d]`, overwritten.
    pub residual: Tensor,
    /// `[p, d]`, overwritten.
    pub y: Tensor,
    /// Mean and reciprocal standard deviation `[p, 2]`, overwritten.
    pub stats: Tensor,
}

/// The gradient of [`NormForward`]: dresidual += LayerNorm'(dy).
#[derive(Debug, Clone, Copy)]
pub struct NormBackward {
    /// `[p, d]`.
    pub dy: Tensor,
    /// As the forward left it.
    pub residual: Tensor,
    /// As the forward left it.
    pub stats: Tensor,
    /// `[1, d]`.
    pub gamma: Tensor,
    /// `[p, d]`, in place: in, the gradient arriving from above; out, with the norm's added.
    pub dresidual: Tensor,
    /// `[1, d]`.
    pub dgamma: Tensor,
    /// `[1, d]`.
    pub dbeta: Option<Tensor>,
    /// For dgamma and dbeta.
    pub accumulate: Beta,
}

/// o = softmax(mask(q k^T / sqrt(head_width))) v for every sequence and head.
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
    /// On the probabilities.
    pub dropout: Option<Dropout>,
    /// Overwritten.
    pub o: Tensor,
    /// Log of the sum of exponentials `[batch*heads, queries]`, overwritten.
    pub lse: Tensor,
}

/// The gradient of [`AttentionForward`], the probabilities recomputed.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackward {
    /// As in the forward; `o` and `lse` as it left them.
    pub forward: AttentionForward,
    /// Gradient of o.
    pub d_o: Tensor,
    /// Gradients of q, k, v, overwritten: column ranges of one `[p, 3d]` buffer.
    pub dqkv: [Tensor; 3],
}

/// `out = E[tokens] + P[position in the sequence]`.
#[derive(Debug, Clone, Copy)]
pub struct Embed {
    /// Token ids `[p, 1]`.
    pub tokens: Tensor,
    /// Tokens a sequence.
    pub context: usize,
    /// E `[V, d]`, or its gradient.
    pub token_table: Tensor,
    /// P `[at least context, d]`, or its gradient.
    pub position_table: Tensor,
    /// `[p, d]`: the output, or its gradient.
    pub rows: Tensor,
}

/// Sum over tokens of the cross-entropy of softmax(x E^T) against the targets.
#[derive(Debug, Clone, Copy)]
pub struct HeadLoss {
    /// `[p, d]`.
    pub x: Tensor,
    /// E `[V, d]`.
    pub embedding: Tensor,
    /// Token ids `[p, 1]`; [`HeadLoss::IGNORE`] contributes nothing.
    pub targets: Tensor,
    /// Label smoothing in [0, 1).
    pub smoothing: f32,
    /// Scratch `[rows at a time, V]`: no more logits than this are ever held.
    pub logits: Tensor,
    /// One f32, overwritten: the sum of the tokens' losses.
    pub loss: Tensor,
    /// The gradients of `scale * loss`, when training; a loss that is not finite then raises the
    /// flag.
    pub gradients: Option<HeadGradients>,
}

impl HeadLoss {
    /// A target that contributes nothing.
    pub const IGNORE: u32 = u32::MAX;
}

/// Gradients of [`HeadLoss`].
#[derive(Debug, Clone, Copy)]
pub struct HeadGradients {
    /// What the loss is multiplied with: 1 / tokens of the optimizer step.
    pub scale: f32,
    /// `[p, d]`, overwritten.
    pub dx: Tensor,
    /// `[V, d]`.
    pub dembedding: Tensor,
    /// For dembedding.
    pub beta: Beta,
}

/// One row of the optimizer's table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerEntry {
    /// w.
    pub weight: Tensor,
    /// dL/dw.
    pub gradient: Tensor,
    /// Adam's m.
    pub first_moment: Tensor,
    /// Adam's v.
    pub second_moment: Tensor,
    /// Decoupled weight decay of this tensor.
    pub weight_decay: f32,
    /// The mask that the forward used, where masked decay applies.
    pub mask: Option<MaskId>,
}
