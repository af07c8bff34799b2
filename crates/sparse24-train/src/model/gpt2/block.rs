//! A block of GPT-2: attention and the feed-forward layers, each after a norm.
//!
//! Invariant: computing a block's activations again gives their bits, since dropout is a function
//! of place and step.

use super::{BatchShape, Buffers, DEVIATION, Gpt2Shape};
use crate::{
    Error,
    backend::{AttentionMask, Backend, DType, Region, Tensor},
    nn::{
        Pass,
        attention::{Attention, AttentionActivations},
        ffn::{Ffn, FfnActivations},
        linear24::{Linear24, LinearSpec, SparseRoom},
        norm::{Norm, NormActivations},
        parameter::Parameters,
    },
};

/// One block.
#[derive(Debug)]
pub(super) struct Block {
    /// Its number, by which its dropouts are addressed.
    layer: usize,
    norms: [Norm; 2],
    attention: Attention,
    ffn: Ffn,
    kept: BlockActivations,
    /// Where they are computed again, if another block has overwritten them since.
    again: Option<BlockActivations>,
}

/// What a block keeps between forward and backward.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockActivations {
    pub(super) norms: [NormActivations; 2],
    pub(super) attention: AttentionActivations,
    pub(super) ffn: FfnActivations,
}

/// Places of dropout: the embedding, then three a block (attention, its projection, the
/// feed-forward).
pub(super) const EMBEDDING_DROPOUT: u32 = 0;

fn dropout_place(layer: usize, nth: u32) -> u32 {
    1 + 3 * layer as u32 + nth
}

/// What a method needs of sparsifiable layers, by the width of their output.
#[derive(Debug, Clone, Copy)]
pub(super) struct SparseRooms {
    pub(super) up: SparseRoom,
    pub(super) narrow: SparseRoom,
    pub(super) qkv: Option<SparseRoom>,
}

impl Block {
    pub(super) fn new(
        backend: &mut dyn Backend,
        parameters: &mut Parameters,
        shape: Gpt2Shape,
        layer: usize,
        batch: BatchShape,
        (room, shared): (SparseRooms, Option<BlockActivations>),
    ) -> Result<Self, Error> {
        let Gpt2Shape { width: d, ffn_width, bias, .. } = shape;
        let z_width = ffn_width * shape.activation.width();
        let residual_deviation = DEVIATION / (2.0 * shape.layers as f32).sqrt();
        let of = |part: &str| format!("h.{layer}.{part}");
        let linear = |backend: &mut dyn Backend,
                      parameters: &mut Parameters,
                      part: &str,
                      shape,
                      deviation,
                      sparse| {
            Linear24::new(
                backend,
                parameters,
                LinearSpec { name: of(part), shape, deviation, bias, sparse },
            )
        };
        let first_norm = Norm::new(backend, parameters, &of("ln_1"), d, bias)?;
        let projected = room.qkv.map(|_| room.narrow);
        let attention = Attention {
            qkv: linear(backend, parameters, "attn.c_attn", [3 * d, d], DEVIATION, room.qkv)?,
            projection: linear(
                backend,
                parameters,
                "attn.c_proj",
                [d, d],
                residual_deviation,
                projected,
            )?,
            heads: shape.heads,
            mask: AttentionMask::Causal,
            dropout: dropout_place(layer, 0),
        };
        let second_norm = Norm::new(backend, parameters, &of("ln_2"), d, bias)?;
        let ffn = Ffn {
            up: linear(backend, parameters, "mlp.c_fc", [z_width, d], DEVIATION, Some(room.up))?,
            down: linear(
                backend,
                parameters,
                "mlp.c_proj",
                [d, ffn_width],
                residual_deviation,
                Some(room.narrow),
            )?,
            activation: shape.activation,
        };

        let kept = match shared {
            None => BlockActivations::new(backend, &format!("h.{layer}"), shape, batch)?,
            Some(shared) => {
                let rows = [batch.sequences * batch.context, d];
                shared.with_input(backend.alloc(
                    &of("input"),
                    rows,
                    DType::Activation,
                    Region::Activations,
                )?)
            }
        };
        // What the last block leaves is still there when the backward pass begins.
        let again = shared.filter(|_| layer + 1 < shape.layers);
        Ok(Self { layer, norms: [first_norm, second_norm], attention, ffn, kept, again })
    }

    /// Leaves the block's output in `delta`, to be added to the residual of its second norm.
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_>,
        stream: (Tensor, Option<Tensor>),
        delta: Tensor,
    ) -> Result<BlockActivations, Error> {
        let kept = self.kept.of_pass(pass, self.attention.heads);
        self.keep(pass, stream, kept, delta)?;
        self.ffn.narrow(pass, kept.ffn, delta)?;
        pass.drop_in_place(delta, dropout_place(self.layer, 2))?;
        Ok(kept)
    }

    /// All that the backward pass wants of the forward pass.
    fn keep(
        &self,
        pass: &mut Pass<'_>,
        (x, before): (Tensor, Option<Tensor>),
        kept: BlockActivations,
        delta: Tensor,
    ) -> Result<(), Error> {
        let [first, second] = kept.norms;
        self.norms[0].forward(pass, x, before, first)?;
        self.attention.forward(pass, first.y, kept.attention, delta)?;
        pass.drop_in_place(delta, dropout_place(self.layer, 1))?;
        self.norms[1].forward(pass, first.residual, Some(delta), second)?;
        self.ffn.widen(pass, second.y, kept.ffn)
    }

    /// `dresidual` in: the gradient of the block's output stream; out: of its input stream.
    pub(super) fn backward(
        &self,
        pass: &mut Pass<'_>,
        buffers: &Buffers,
        dresidual: Tensor,
        dy: Tensor,
        ddelta: Tensor,
    ) -> Result<(), Error> {
        let p = pass.tokens();
        let mut kept = self.kept.of_pass(pass, self.attention.heads);
        if let Some(again) = self.again {
            let input = kept.norms[0].residual;
            kept = again.of_pass(pass, self.attention.heads);
            self.keep(pass, (input, None), kept, buffers.delta.first_rows(p))?;
        }
        let [first, second] = kept.norms;
        let [d_o, dqkv, dz] = [buffers.d_o, buffers.dqkv, buffers.dz].map(|t| t.first_rows(p));

        let ddown = dropped(pass, dresidual, ddelta, dropout_place(self.layer, 2))?;
        self.ffn.backward(pass, second.y, kept.ffn, ddown, dz, dy)?;
        self.norms[1].backward(pass, dy, second, dresidual)?;
        let dprojected = dropped(pass, dresidual, ddelta, dropout_place(self.layer, 1))?;
        self.attention.backward(pass, first.y, kept.attention, dprojected, [d_o, dqkv], dy)?;
        self.norms[0].backward(pass, dy, first, dresidual)
    }
}

/// The gradient before dropout: `d` itself when nothing is dropped, a copy otherwise, for `d` also
/// flows past the block.
fn dropped(pass: &mut Pass<'_>, d: Tensor, copy: Tensor, place: u32) -> Result<Tensor, Error> {
    if pass.dropout_at(place).is_none() {
        return Ok(d);
    }
    pass.backend.copy(d, copy)?;
    pass.drop_in_place(copy, place)?;
    Ok(copy)
}

impl BlockActivations {
    pub(super) fn new(
        backend: &mut dyn Backend,
        block: &str,
        shape: Gpt2Shape,
        batch: BatchShape,
    ) -> Result<Self, Error> {
        let Gpt2Shape { width: d, heads, ffn_width, activation, .. } = shape;
        let p = batch.sequences * batch.context;
        let of = |part: &str| format!("{block}.{part}");
        let lse = backend.alloc(
            &of("lse"),
            [batch.sequences * heads, batch.context],
            DType::F32,
            Region::Activations,
        )?;
        let mut alloc = |part: &str, columns| {
            backend.alloc(&of(part), [p, columns], DType::Activation, Region::Activations)
        };
        let attention = AttentionActivations { qkv: alloc("qkv", 3 * d)?, o: alloc("o", d)?, lse };
        let ffn = FfnActivations {
            z: alloc("z", ffn_width * activation.width())?,
            h: alloc("h", ffn_width)?,
        };
        let norms = [
            NormActivations::new(backend, &of("ln_1"), [p, d])?,
            NormActivations::new(backend, &of("ln_2"), [p, d])?,
        ];
        Ok(Self { norms, attention, ffn })
    }

    /// The same, but for the residual stream at its begin.
    fn with_input(self, input: Tensor) -> Self {
        let [first, second] = self.norms;
        Self { norms: [NormActivations { residual: input, ..first }, second], ..self }
    }

    /// The rows that this pass uses.
    fn of_pass(self, pass: &Pass<'_>, heads: usize) -> Self {
        let p = pass.tokens();
        let Self { norms, attention, ffn } = self;
        let lse = attention.lse.first_rows(pass.sequences * heads).columns(0..pass.context);
        Self {
            norms: norms.map(|norm| norm.first_rows(p)),
            attention: AttentionActivations {
                qkv: attention.qkv.first_rows(p),
                o: attention.o.first_rows(p),
                lse,
            },
            ffn: FfnActivations { z: ffn.z.first_rows(p), h: ffn.h.first_rows(p) },
        }
    }
}
