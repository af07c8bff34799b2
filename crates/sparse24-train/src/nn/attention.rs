//! Multi-head attention: projections to q, k and v, softmax attention, one projection back.

use sparse24_core::{
    op::{AttentionMask, AttentionShape},
    philox::Site,
};

use super::{
    Pass,
    builder::{BatchShape, Builder},
    linear24::{Bias, Linear24, LinearSpec},
    parameter::Sparsity,
};
use crate::{
    Error,
    backend::{
        DType, Region, Tensor,
        op::{Add, AttentionBackward, AttentionForward},
    },
};

/// Attention over one stream (self-attention) or two (queries from one, keys and values from the
/// other).
#[derive(Debug)]
pub struct Attention {
    projections: Projections,
    out: Linear24,
    heads: usize,
    mask: AttentionMask,
    dropout: Site,
}

/// The projections to q, k and v.
#[derive(Debug)]
pub enum Projections {
    /// q, k and v of one stream: `[3d, d]`.
    Joint(Linear24),
    /// q `[d, d]` of one stream, k and v `[2d, d]` of the same or another.
    Separate {
        /// Of the stream of queries.
        q: Linear24,
        /// Of the stream of keys and values.
        kv: Linear24,
    },
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
    /// Standard deviations of the initial weights: projections, projection back.
    pub deviations: [f32; 2],
    /// Whether masks may prune the projections.
    pub sparsity: Sparsity,
}

/// What attention keeps between forward and backward; also the shape of their gradients.
#[derive(Debug, Clone, Copy)]
pub struct AttentionActivations {
    /// Joint: `[p, 3d]`; separate: q `[p, d]`.
    pub q: Tensor,
    /// Separate: k and v `[p_kv, 2d]`.
    pub kv: Option<Tensor>,
    /// `[p, d]`.
    pub o: Tensor,
    /// Log of the sum of exponentials `[batch * heads, queries]`.
    pub lse: Tensor,
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

impl AttentionActivations {
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
        let BatchShape { size, sequence_length } = pass.batch;
        let heads = self.lse.shape[0] / (self.q.shape[0] / self.lse.shape[1]);
        let lse = self.lse.first_rows(size * heads).columns(0..sequence_length);
        let kv = self.kv.map(|kv| pass.rows(kv));
        Self { q: pass.rows(self.q), kv, o: pass.rows(self.o), lse }
    }
}

impl Attention {
    /// Allocates the projections.
    ///
    /// # Panics
    /// Unless there are two or three names.
    pub fn new(builder: &mut Builder<'_>, spec: &AttentionSpec<'_>) -> Result<Self, Error> {
        let &AttentionSpec { d_model: d, heads, mask, bias, deviations, sparsity, .. } = spec;
        let mut linear = |name: &String, r, deviation| {
            let (name, shape) = (name.clone(), [r, d]);
            Linear24::new(builder, LinearSpec { name, shape, deviation, bias, sparsity })
        };
        let (projections, out) = match spec.names {
            [qkv, out] => (Projections::Joint(linear(qkv, 3 * d, deviations[0])?), out),
            [q, kv, out] => {
                let q = linear(q, d, deviations[0])?;
                (Projections::Separate { q, kv: linear(kv, 2 * d, deviations[0])? }, out)
            }
            names => panic!("attention has two or three layers, not {names:?}"),
        };
        let out = linear(out, d, deviations[1])?;
        Ok(Self { projections, out, heads, mask, dropout: builder.dropout_site() })
    }

    /// Allocates what it keeps.
    pub fn activations(
        builder: &mut Builder<'_>,
        name: &str,
        spec: &AttentionSpec<'_>,
    ) -> Result<AttentionActivations, Error> {
        let (d, BatchShape { size, sequence_length }) = (spec.d_model, builder.batch());
        let lse = [size * spec.heads, sequence_length];
        let lse = builder.tensor(&format!("{name}.lse"), lse, DType::F32, Region::Activations)?;
        let (q, kv) = if spec.names.len() == 2 {
            (builder.activation(&format!("{name}.qkv"), 3 * d)?, None)
        } else {
            let q = builder.activation(&format!("{name}.q"), d)?;
            (q, Some(builder.activation(&format!("{name}.kv"), 2 * d)?))
        };
        Ok(AttentionActivations { q, kv, o: builder.activation(&format!("{name}.o"), d)?, lse })
    }

    /// y = attention(x, memory) W_out^T + b.
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        streams: Streams,
        kept: AttentionActivations,
        y: Tensor,
    ) -> Result<(), Error> {
        match (&self.projections, kept.kv) {
            (Projections::Joint(qkv), _) => qkv.forward(pass, streams.x, kept.q)?,
            (Projections::Separate { q, kv }, Some(kept_kv)) => {
                q.forward(pass, streams.x, kept.q)?;
                kv.forward(pass, streams.memory.map_or(streams.x, |(memory, _)| memory), kept_kv)?;
            }
            (Projections::Separate { .. }, None) => panic!("k and v have no buffer"),
        }
        let op = self.operation(pass, streams, kept);
        pass.run(op)?;
        self.out.forward(pass, kept.o, y)
    }

    /// The gradients of parameters and streams. `scratch` has the shapes of `kept` (its `lse` is
    /// unused). `dx` is overwritten; with separate projections, the gradient of keys and values
    /// goes to `dmemory`, which is overwritten too, and is added to `dx` if both streams are one.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        streams: Streams,
        kept: AttentionActivations,
        dy: Tensor,
        scratch: AttentionActivations,
        dx: Tensor,
        dmemory: Option<Tensor>,
    ) -> Result<(), Error> {
        self.out.backward(pass, kept.o, dy, scratch.o)?;
        let forward = self.operation(pass, streams, kept);
        pass.run(AttentionBackward { forward, d_o: scratch.o, dqkv: scratch.qkv() })?;
        match (&self.projections, kept.kv.and(scratch.kv), dmemory) {
            (Projections::Joint(qkv), ..) => qkv.backward(pass, streams.x, scratch.q, dx),
            (Projections::Separate { q, kv }, Some(dkv), Some(dmemory)) => {
                let memory = streams.memory.map_or(streams.x, |(memory, _)| memory);
                q.backward(pass, streams.x, scratch.q, dx)?;
                kv.backward(pass, memory, dkv, dmemory)?;
                match streams.memory {
                    Some(_) => Ok(()),
                    None => pass.run(Add { x: dx, delta: dmemory, out: dx }),
                }
            }
            (Projections::Separate { .. }, ..) => panic!("keys and values need gradients"),
        }
    }

    fn operation(
        &self,
        pass: &Pass<'_>,
        streams: Streams,
        kept: AttentionActivations,
    ) -> AttentionForward {
        let [q, k, v] = kept.qkv();
        let BatchShape { size: batch, sequence_length: queries } = pass.batch;
        let keys = streams.memory.map_or(queries, |(_, of)| of.sequence_length);
        let shape = AttentionShape { batch, heads: self.heads, queries, keys, mask: self.mask };
        let (lengths, dropout) = (streams.lengths, pass.dropout_at(self.dropout));
        AttentionForward { shape, q, k, v, lengths, dropout, o: kept.o, lse: kept.lse }
    }
}
