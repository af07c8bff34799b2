//! Multi-head attention: projections to q, k and v, softmax attention, one projection back.

use sparse24_core::{
    op::{AttentionMask, AttentionShape},
    philox::Site,
};

use super::{
    Pass,
    builder::{BatchShape, Builder},
    linear24::{Linear24, LinearSpec},
    parameter::{Bias, Init, Sparsity},
};
use crate::{
    Error, Result,
    backend::{
        DType, Region, Tensor,
        op::{Add, AttentionBackward, AttentionDropout, AttentionForward},
    },
};

/// Attention over one stream, or over two: queries of one, keys and values of the other.
#[derive(Debug)]
pub struct Attention {
    /// q, or q, k and v of one stream `[3d, d]`.
    q: Linear24,
    /// k and v `[2d, d]`, if they are projected separately.
    kv: Option<Linear24>,
    out: Linear24,
    heads: usize,
    mask: AttentionMask,
    /// Dropout of the probabilities.
    dropout: Option<Site>,
}

/// Whether attention drops probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbabilityDropout {
    /// With the model's probability of dropout.
    Present,
    /// Never.
    Absent,
}

/// The declaration of an [`Attention`].
#[derive(Debug, Clone)]
pub struct AttentionSpec<'a> {
    /// Names of the projections: one (joint) or two (q, then kv), and of the projection back.
    pub names: &'a [String],
    /// Features.
    pub d_model: usize,
    /// Heads; they divide d_model.
    pub heads: usize,
    /// Which keys a query attends to.
    pub mask: AttentionMask,
    /// Biases of all projections.
    pub bias: Bias,
    /// The initial weights of the projections, and of the projection back.
    pub init: [Init; 2],
    /// Whether masks may prune the projections.
    pub sparsity: Sparsity,
    /// Whether probabilities are dropped.
    pub dropout: ProbabilityDropout,
}

/// The operands of softmax attention and its output, or their gradients.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOperands {
    /// Joint: `[p, 3d]`; separate: q `[p, d]`.
    pub q: Tensor,
    /// Separate: k and v `[p_kv, 2d]`.
    pub kv: Option<Tensor>,
    /// `[p, d]`.
    pub o: Tensor,
}

/// Activations kept for the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct AttentionActivations {
    /// The operands of the forward pass, and its output.
    pub operands: AttentionOperands,
    /// Log of the sum of exponentials `[batch * heads, queries]`.
    lse: Tensor,
    /// Which probabilities dropout keeps.
    kept: Option<Tensor>,
}

/// The streams that attention reads.
#[derive(Debug, Clone, Copy)]
pub struct Streams {
    /// Queries, `[p, d]`.
    pub x: Tensor,
    /// Keys and values with their batch; x if absent.
    pub memory: Option<(Tensor, BatchShape)>,
    /// Keys of each sequence that are no padding, u32 `[batch, 1]`.
    pub lengths: Option<Tensor>,
}

impl From<Tensor> for Streams {
    /// Self-attention without padding.
    fn from(x: Tensor) -> Self {
        Self { x, memory: None, lengths: None }
    }
}

impl Streams {
    /// The stream of keys and values.
    fn memory(&self) -> Tensor {
        self.memory.map_or(self.x, |(memory, _)| memory)
    }
}

impl AttentionOperands {
    /// Allocates them.
    pub fn new(builder: &mut Builder<'_>, name: &str, spec: &AttentionSpec<'_>) -> Result<Self> {
        let d = spec.d_model;
        let (q, kv) = if spec.names.len() == 2 {
            (builder.activation(&format!("{name}.qkv"), 3 * d)?, None)
        } else {
            let q = builder.activation(&format!("{name}.q"), d)?;
            (q, Some(builder.activation(&format!("{name}.kv"), 2 * d)?))
        };
        Ok(Self { q, kv, o: builder.activation(&format!("{name}.o"), d)? })
    }

    fn qkv(&self) -> [Tensor; 3] {
        match self.kv {
            None => self.q.split(),
            Some(kv) => {
                let [k, v] = kv.split();
                [self.q, k, v]
            }
        }
    }

    /// The rows that the pass uses.
    #[must_use]
    pub fn rows(self, pass: &Pass<'_>) -> Self {
        let kv = self.kv.map(|kv| pass.rows(kv));
        Self { q: pass.rows(self.q), kv, o: pass.rows(self.o) }
    }
}

impl AttentionActivations {
    /// Allocates them.
    pub fn new(builder: &mut Builder<'_>, name: &str, spec: &AttentionSpec<'_>) -> Result<Self> {
        let (heads, BatchShape { size: batch, sequence_length }) = (spec.heads, builder.batch());
        let drops = spec.dropout == ProbabilityDropout::Present && builder.dropout() > 0.0;
        let reads = builder.reads_kept();
        let mut tensor = |part: &str, columns, dtype| {
            let shape = [batch * heads, columns];
            builder.tensor(&format!("{name}.{part}"), shape, dtype, Region::Activations)
        };
        let lse = tensor("lse", sequence_length, DType::F32)?;
        let (queries, keys, mask) = (sequence_length, sequence_length, spec.mask);
        let shape = AttentionShape { batch, heads, queries, keys, mask };
        let words = if reads { shape.tile_words() } else { 0 };
        let kept = if drops { Some(tensor("kept", words, DType::U32)?) } else { None };
        Ok(Self { operands: AttentionOperands::new(builder, name, spec)?, lse, kept })
    }

    /// The rows that the pass uses.
    #[must_use]
    pub fn rows(self, pass: &Pass<'_>) -> Self {
        let BatchShape { size, sequence_length } = pass.batch;
        let heads = self.lse.elements() / self.operands.q.shape[0];
        let lse = self.lse.packed([size * heads, sequence_length]);
        Self { operands: self.operands.rows(pass), lse, kept: self.kept }
    }
}

impl Attention {
    /// Allocates the projections.
    ///
    /// # Panics
    /// Unless there are two or three names.
    pub fn new(builder: &mut Builder<'_>, spec: &AttentionSpec<'_>) -> Result<Self> {
        let &AttentionSpec { d_model: d, heads, mask, bias, init, sparsity, .. } = spec;
        let mut linear = |name: &String, r, init| {
            let (name, shape) = (name.clone(), [r, d]);
            Linear24::new(builder, LinearSpec { name, shape, init, bias, sparsity })
        };
        let (q, kv, out) = match spec.names {
            [qkv, out] => (linear(qkv, 3 * d, init[0])?, None, out),
            [q, kv, out] => {
                let q = linear(q, d, init[0])?;
                (q, Some(linear(kv, 2 * d, init[0])?), out)
            }
            names => panic!("attention has two or three layers, not {names:?}"),
        };
        let out = linear(out, d, init[1])?;
        let site = builder.dropout_site();
        let dropout = (spec.dropout == ProbabilityDropout::Present).then_some(site);
        Ok(Self { q, kv, out, heads, mask, dropout })
    }

    /// y = attention(x, memory) W_out^T + b.
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        streams: Streams,
        kept: AttentionActivations,
        y: Tensor,
    ) -> Result {
        self.project(pass, streams.x, kept.operands.q)?;
        self.project_memory(pass, streams.memory(), kept)?;
        let op = self.operation(pass, streams, kept)?;
        pass.run(op)?;
        self.out.forward(pass, kept.operands.o, y)
    }

    /// The queries of x; with one projection, its keys and values too.
    pub fn project(&self, pass: &mut Pass<'_>, x: Tensor, q: Tensor) -> Result {
        self.q.forward(pass, x, q)
    }

    /// The keys and values of another stream, if they are projected separately.
    pub fn project_memory(
        &self,
        pass: &mut Pass<'_>,
        memory: Tensor,
        kept: AttentionActivations,
    ) -> Result {
        match (&self.kv, kept.operands.kv) {
            (Some(projection), Some(kv)) => projection.forward(pass, memory, kv),
            _ => Ok(()),
        }
    }

    /// y, from projected queries, keys and values. The rows of q are as many for each sequence of
    /// `keys`, in order, and each sees `lengths` of its keys. `kept` is that of the largest batch.
    pub fn attend(
        &self,
        pass: &mut Pass<'_>,
        [q, k, v]: [Tensor; 3],
        keys: BatchShape,
        lengths: Tensor,
        kept: AttentionActivations,
        y: Tensor,
    ) -> Result {
        let (batch, heads) = (keys.size, self.heads);
        let queries = q.shape[0] / batch;
        let mask = AttentionMask::Full;
        let shape = AttentionShape { batch, heads, queries, keys: keys.sequence_length, mask };
        let o = kept.operands.o.first_rows(q.shape[0]);
        let lse = kept.lse.packed([batch * heads, queries]);
        let (lengths, dropout) = (Some(lengths), None);
        pass.run(AttentionForward { shape, q, k, v, lengths, dropout, o, lse })?;
        self.out.forward(pass, o, y)
    }

    /// The gradients of parameters and streams. `scratch` is overwritten by the gradients of what
    /// `kept` holds, and `dx` by that of x. With separate projections, so is `dmemory`, by the
    /// gradient of the stream of keys and values; it is added to `dx` if both streams are one.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        streams: Streams,
        (kept, scratch): (AttentionActivations, AttentionOperands),
        dy: Tensor,
        dx: Tensor,
        dmemory: Option<Tensor>,
    ) -> Result {
        self.out.backward(pass, kept.operands.o, dy, scratch.o)?;
        let forward = self.operation(pass, streams, kept)?;
        pass.run(AttentionBackward { forward, d_o: scratch.o, dqkv: scratch.qkv() })?;
        self.q.backward(pass, streams.x, scratch.q, dx)?;
        let (Some(projection), Some(dkv), Some(delta)) = (&self.kv, scratch.kv, dmemory) else {
            return Ok(());
        };
        projection.backward(pass, streams.memory(), dkv, delta)?;
        match streams.memory {
            Some(_) => Ok(()),
            None => pass.run(Add { x: dx, delta, out: dx }),
        }
    }

    fn operation(
        &self,
        pass: &Pass<'_>,
        streams: Streams,
        kept: AttentionActivations,
    ) -> Result<AttentionForward> {
        let [q, k, v] = kept.operands.qkv();
        let BatchShape { size: batch, sequence_length: queries } = pass.batch;
        let keys = streams.memory.map_or(queries, |(_, of)| of.sequence_length);
        let shape = AttentionShape { batch, heads: self.heads, queries, keys, mask: self.mask };
        let drawn = self.dropout.and_then(|site| pass.dropout_at(site));
        let dropout = drawn.zip(kept.kept).map(|(drawn, kept)| {
            // Tiles are whole, so more and shorter sequences have more of them.
            let words = if kept.elements() == 0 { 0 } else { shape.tile_words() };
            let (found, expected) = ([batch * self.heads, words], kept.shape);
            if found[0] * found[1] > kept.elements() {
                let (operation, operand) = ("dropout of attention", "the batch, in tiles,");
                return Err(Error::Operand { operation, operand, expected, found });
            }
            Ok(AttentionDropout { drawn, kept: kept.packed(found) })
        });
        let (dropout, lengths) = (dropout.transpose()?, streams.lengths);
        let (o, lse) = (kept.operands.o, kept.lse);
        Ok(AttentionForward { shape, q, k, v, lengths, dropout, o, lse })
    }
}
