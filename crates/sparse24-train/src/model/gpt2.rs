//! GPT-2 (Radford et al. 2019): pre-LN blocks, learned positions, a head tied to the token embedding.
//!
//! The residual stream is carried by the norms: each adds the output of the block before it. Parameter names are those of Hugging Face's
//! GPT-2; linear weights are `[out, in]`.

use crate::{
    Error,
    backend::{Activation, AttentionMask, Backend, DType, Gradient24, Region, Tensor},
    nn::{
        Pass,
        attention::{Attention, AttentionActivations},
        embedding::{Embedding, HeadBuffers},
        ffn::{Ffn, FfnActivations},
        linear24::{Bias, Linear24, LinearSpec},
        norm::{Norm, NormActivations},
        parameter::Parameters,
    },
};

/// The size of a GPT-2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpt2Shape {
    /// Blocks.
    pub layers: usize,
    /// Attention heads; they divide the width.
    pub heads: usize,
    /// d.
    pub width: usize,
    /// d_ff.
    pub ffn_width: usize,
    /// Longest sequence.
    pub context: usize,
    /// Token ids.
    pub vocabulary: usize,
    /// Of the feed-forward blocks.
    pub activation: Activation,
    /// Of linear layers and norms.
    pub bias: Bias,
    /// Which linear layers may be pruned.
    pub sparsify: Sparsify,
}

/// Which linear layers may be pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "run", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Sparsify {
    /// Those of the feed-forward blocks.
    Ffn,
    /// Also the attention projections.
    FfnAndAttention,
}

/// What the backward pass computes again instead of having it kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "run", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// All of a block from its input: a fifth to a third of a step's arithmetic more, the same bits, and the memory of one block instead of all.
    Blocks,
}

/// One step's tokens: what is run at a time, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences at a time.
    pub sequences: usize,
    /// Tokens a sequence.
    pub context: usize,
}

/// Standard deviation of the initial weights; residual projections divide it by sqrt(2 layers).
const DEVIATION: f32 = 0.02;

/// Rows of logits held at a time, so that a large vocabulary needs no `[p, V]` buffer; a GPU wants thousands for its products.
pub(crate) const HEAD_ROWS: usize = 4096;

/// The model with its activations.
#[derive(Debug)]
pub struct Gpt2 {
    shape: Gpt2Shape,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    buffers: Buffers,
}

#[derive(Debug)]
struct Block {
    norms: [Norm; 2],
    attention: Attention,
    ffn: Ffn,
    kept: BlockActivations,
    /// Where they are computed again, if another block has overwritten them since.
    again: Option<BlockActivations>,
}

#[derive(Debug, Clone, Copy)]
struct BlockActivations {
    norms: [NormActivations; 2],
    attention: AttentionActivations,
    ffn: FfnActivations,
}

/// Buffers of the whole model, `[tokens at a time, ...]`.
#[derive(Debug)]
struct Buffers {
    tokens: Tensor,
    targets: Tensor,
    loss: Tensor,
    logits: Tensor,
    embedded: Tensor,
    /// The output of a block half, until the next norm adds it.
    delta: Tensor,
    final_norm: NormActivations,
    dresidual: Tensor,
    dy: Tensor,
    /// The gradient of `delta` where dropout makes it differ from `dresidual`.
    ddelta: Tensor,
    d_o: Tensor,
    dqkv: Tensor,
    dz: Tensor,
}

impl Gpt2 {
    /// Allocates parameters, activations and sparse operands for batches of at most this shape.
    ///
    /// # Errors
    /// Those of the allocations, among them sparsified shapes that are not made of 4x4 tiles.
    pub fn new(backend: &mut dyn Backend, shape: Gpt2Shape, batch: BatchShape, recompute: Recompute) -> Result<(Self, Parameters), Error> {
        let mut parameters = Parameters::default();
        let Gpt2Shape { width: d, ffn_width, .. } = shape;
        let p = batch.sequences * batch.context;
        let z_width = ffn_width * shape.activation.width();
        let tables = [("wte.weight", shape.vocabulary), ("wpe.weight", shape.context)];
        let embedding = Embedding::new(backend, &mut parameters, tables, d, DEVIATION)?;

        // A sampled gradient lives only until its product: layers of one shape share the room.
        let sampled = SampledGradients {
            up: backend.alloc_gradient24([p, z_width])?,
            narrow: backend.alloc_gradient24([p, d])?,
            qkv: match shape.sparsify {
                Sparsify::Ffn => None,
                Sparsify::FfnAndAttention => Some(backend.alloc_gradient24([p, 3 * d])?),
            },
        };
        let shared = match recompute {
            Recompute::None => None,
            Recompute::Blocks => Some(BlockActivations::new(backend, "block", shape, batch)?),
        };
        let blocks = (0..shape.layers)
            .map(|layer| Block::new(backend, &mut parameters, shape, layer, batch, (sampled, shared)))
            .collect::<Result<Vec<_>, _>>()?;
        let norm = Norm::new(backend, &mut parameters, "ln_f", d, shape.bias)?;

        let final_norm = norm_activations(backend, "ln_f", [p, d])?;
        let mut alloc = |name: &str, columns| backend.alloc(name, [p, columns], DType::Activation, Region::Activations);
        let (embedded, delta, dresidual, dy) = (alloc("embedded", d)?, alloc("delta", d)?, alloc("dresidual", d)?, alloc("dy", d)?);
        let (ddelta, d_o, dqkv, dz) = (alloc("ddelta", d)?, alloc("d_o", d)?, alloc("dqkv", 3 * d)?, alloc("dz", z_width)?);
        let buffers = Buffers {
            tokens: backend.alloc("tokens", [p, 1], DType::U32, Region::Activations)?,
            targets: backend.alloc("targets", [p, 1], DType::U32, Region::Activations)?,
            loss: backend.alloc("loss", [1, 1], DType::F32, Region::Activations)?,
            logits: backend.alloc("logits", [p.min(HEAD_ROWS), shape.vocabulary], DType::Activation, Region::Activations)?,
            embedded,
            delta,
            final_norm,
            dresidual,
            dy,
            ddelta,
            d_o,
            dqkv,
            dz,
        };
        Ok((Self { shape, embedding, blocks, norm, buffers }, parameters))
    }

    /// The size it was made with.
    #[must_use]
    pub fn shape(&self) -> Gpt2Shape {
        self.shape
    }

    /// Rebuilds every pruned weight.
    ///
    /// # Errors
    /// Those of [`Backend::compress_weight`].
    pub fn compress(&self, backend: &mut dyn Backend) -> Result<(), Error> {
        self.blocks.iter().try_for_each(|block| {
            block.attention.compress(backend)?;
            block.ffn.compress(backend)
        })
    }

    /// Brings a batch to the device, for all that follows.
    ///
    /// # Errors
    /// Those of the uploads.
    pub fn upload(&self, backend: &mut dyn Backend, tokens: &[u32], targets: &[u32]) -> Result<(), Error> {
        backend.upload_tokens(self.buffers.tokens.first_rows(tokens.len()), tokens)?;
        backend.upload_tokens(self.buffers.targets.first_rows(targets.len()), targets)
    }

    /// The summed loss of the batch done last `[1, 1]`.
    #[must_use]
    pub fn loss(&self) -> Tensor {
        self.buffers.loss
    }

    /// Forward and backward of the batch on the device: [`Gpt2::loss`], and the gradients of `scale` times it.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn train(&self, pass: &mut Pass<'_>, scale: f32) -> Result<(), Error> {
        let x = self.forward(pass)?;
        let head = self.head(pass);
        let p = pass.tokens();
        let [dresidual, dy, ddelta] = [self.buffers.dresidual, self.buffers.dy, self.buffers.ddelta].map(|t| t.first_rows(p));
        self.embedding.loss_and_gradient(pass, x, head, scale, dy)?;

        pass.backend.fill(dresidual, 0.0)?;
        self.norm.backward(pass, dy, self.buffers.final_norm.first_rows(p), dresidual)?;
        for (layer, block) in self.blocks.iter().enumerate().rev() {
            block.backward(pass, layer, &self.buffers, dresidual, dy, ddelta)?;
        }
        pass.drop_in_place(dresidual, EMBEDDING_DROPOUT)?;
        self.embedding.backward(pass, self.buffers.tokens.first_rows(p), dresidual)
    }

    /// The summed loss of the batch on the device; targets of [`crate::backend::HeadLoss::IGNORE`] count nothing.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn evaluate(&self, pass: &mut Pass<'_>) -> Result<f32, Error> {
        let x = self.forward(pass)?;
        let head = self.head(pass);
        self.embedding.loss(pass, x, head)?;
        Ok(pass.backend.download(head.loss)?[0])
    }

    /// The logits after the last token of one sequence.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn next_logits(&self, pass: &mut Pass<'_>, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        pass.backend.upload_tokens(self.buffers.tokens.first_rows(tokens.len()), tokens)?;
        let x = self.forward(pass)?;
        let out = self.buffers.logits.first_rows(1);
        self.embedding.logits(pass, x.rows(tokens.len() - 1..tokens.len()), out)?;
        pass.backend.download(out)
    }

    /// What each layer puts out in a forward pass, in order: the names and the activations that it leaves.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn outputs(&self, pass: &mut Pass<'_>, tokens: &[u32]) -> Result<Vec<(String, Tensor)>, Error> {
        pass.backend.upload_tokens(self.buffers.tokens.first_rows(tokens.len()), tokens)?;
        self.forward(pass)?;
        let (mut outputs, mut before) = (Vec::new(), "the embedding".to_owned());
        for (layer, block) in self.blocks.iter().enumerate() {
            let BlockActivations { norms: [first, second], attention, ffn } = block.kept.of_pass(pass, block.attention.heads);
            // A norm adds the output of the layer before it.
            outputs.push((before, first.residual));
            let parts = [
                ("ln_1", first.y),
                ("attn.c_attn", attention.qkv),
                ("attn", attention.o),
                ("attn.c_proj", second.residual),
                ("ln_2", second.y),
                ("mlp.c_fc", ffn.z),
                ("mlp.act", ffn.h),
            ];
            outputs.extend(parts.map(|(part, output)| (format!("h.{layer}.{part}"), output)));
            before = format!("h.{layer}.mlp.c_proj");
        }
        let last = self.buffers.final_norm.first_rows(pass.tokens());
        outputs.extend([(before, last.residual), ("ln_f".to_owned(), last.y)]);
        Ok(outputs)
    }

    /// The output of the final norm.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor, Error> {
        let p = pass.tokens();
        let ids = self.buffers.tokens.first_rows(p);
        let [embedded, delta] = [self.buffers.embedded, self.buffers.delta].map(|t| t.first_rows(p));
        self.embedding.forward(pass, ids, embedded)?;
        pass.drop_in_place(embedded, EMBEDDING_DROPOUT)?;
        let mut stream = (embedded, None);
        for (layer, block) in self.blocks.iter().enumerate() {
            let residual = block.forward(pass, layer, stream, delta)?;
            stream = (residual, Some(delta));
        }
        let kept = self.buffers.final_norm.first_rows(p);
        self.norm.forward(pass, stream.0, stream.1, kept)?;
        Ok(kept.y)
    }

    fn head(&self, pass: &Pass<'_>) -> HeadBuffers {
        let Buffers { logits, targets, loss, .. } = self.buffers;
        HeadBuffers { logits, targets: targets.first_rows(pass.tokens()), loss }
    }
}

/// Places of dropout: the embedding, then three a block (attention, its projection, the feed-forward).
const EMBEDDING_DROPOUT: u32 = 0;

fn dropout_place(layer: usize, nth: u32) -> u32 {
    1 + 3 * layer as u32 + nth
}

#[derive(Debug, Clone, Copy)]
struct SampledGradients {
    up: Gradient24,
    narrow: Gradient24,
    qkv: Option<Gradient24>,
}

impl Block {
    fn new(
        backend: &mut dyn Backend,
        parameters: &mut Parameters,
        shape: Gpt2Shape,
        layer: usize,
        batch: BatchShape,
        (sampled, shared): (SampledGradients, Option<BlockActivations>),
    ) -> Result<Self, Error> {
        let Gpt2Shape { width: d, ffn_width, bias, .. } = shape;
        let z_width = ffn_width * shape.activation.width();
        let residual_deviation = DEVIATION / (2.0 * shape.layers as f32).sqrt();
        let of = |part: &str| format!("h.{layer}.{part}");
        let linear = |backend: &mut dyn Backend, parameters: &mut Parameters, part: &str, shape, deviation, sparse| {
            Linear24::new(backend, parameters, LinearSpec { name: of(part), shape, deviation, bias, sparse })
        };
        let first_norm = Norm::new(backend, parameters, &of("ln_1"), d, bias)?;
        let projected = sampled.qkv.map(|_| sampled.narrow);
        let attention = Attention {
            qkv: linear(backend, parameters, "attn.c_attn", [3 * d, d], DEVIATION, sampled.qkv)?,
            projection: linear(backend, parameters, "attn.c_proj", [d, d], residual_deviation, projected)?,
            heads: shape.heads,
            mask: AttentionMask::Causal,
            dropout: dropout_place(layer, 0),
        };
        let second_norm = Norm::new(backend, parameters, &of("ln_2"), d, bias)?;
        let ffn = Ffn {
            up: linear(backend, parameters, "mlp.c_fc", [z_width, d], DEVIATION, Some(sampled.up))?,
            down: linear(backend, parameters, "mlp.c_proj", [d, ffn_width], residual_deviation, Some(sampled.narrow))?,
            activation: shape.activation,
        };

        let kept = match shared {
            None => BlockActivations::new(backend, &format!("h.{layer}"), shape, batch)?,
            Some(shared) => {
                let rows = [batch.sequences * batch.context, d];
                shared.with_input(backend.alloc(&of("input"), rows, DType::Activation, Region::Activations)?)
            }
        };
        // What the last block leaves is still there when the backward pass begins.
        let again = shared.filter(|_| layer + 1 < shape.layers);
        Ok(Self { norms: [first_norm, second_norm], attention, ffn, kept, again })
    }

    /// Leaves the block's output in `delta`, to be added to the returned residual.
    fn forward(&self, pass: &mut Pass<'_>, layer: usize, stream: (Tensor, Option<Tensor>), delta: Tensor) -> Result<Tensor, Error> {
        let kept = self.kept.of_pass(pass, self.attention.heads);
        self.keep(pass, layer, stream, kept, delta)?;
        self.ffn.narrow(pass, kept.ffn, delta)?;
        pass.drop_in_place(delta, dropout_place(layer, 2))?;
        Ok(kept.norms[1].residual)
    }

    /// All that the backward pass wants of the forward pass.
    fn keep(
        &self,
        pass: &mut Pass<'_>,
        layer: usize,
        (x, before): (Tensor, Option<Tensor>),
        kept: BlockActivations,
        delta: Tensor,
    ) -> Result<(), Error> {
        let [first, second] = kept.norms;
        self.norms[0].forward(pass, x, before, first)?;
        self.attention.forward(pass, first.y, kept.attention, delta)?;
        pass.drop_in_place(delta, dropout_place(layer, 1))?;
        self.norms[1].forward(pass, first.residual, Some(delta), second)?;
        self.ffn.widen(pass, second.y, kept.ffn)
    }

    /// `dresidual` in: the gradient of the block's output stream; out: of its input stream.
    fn backward(
        &self,
        pass: &mut Pass<'_>,
        layer: usize,
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
            self.keep(pass, layer, (input, None), kept, buffers.delta.first_rows(p))?;
        }
        let [first, second] = kept.norms;
        let [d_o, dqkv, dz] = [buffers.d_o, buffers.dqkv, buffers.dz].map(|t| t.first_rows(p));

        let ddown = dropped(pass, dresidual, ddelta, dropout_place(layer, 2))?;
        self.ffn.backward(pass, second.y, kept.ffn, ddown, dz, dy)?;
        self.norms[1].backward(pass, dy, second, dresidual)?;
        let dprojected = dropped(pass, dresidual, ddelta, dropout_place(layer, 1))?;
        self.attention.backward(pass, first.y, kept.attention, dprojected, [d_o, dqkv], dy)?;
        self.norms[0].backward(pass, dy, first, dresidual)
    }
}

/// The gradient before dropout: `d` itself when nothing is dropped, a copy otherwise, for `d` also flows past the block.
fn dropped(pass: &mut Pass<'_>, d: Tensor, copy: Tensor, place: u32) -> Result<Tensor, Error> {
    if pass.dropout_at(place).is_none() {
        return Ok(d);
    }
    pass.backend.copy(d, copy)?;
    pass.drop_in_place(copy, place)?;
    Ok(copy)
}

impl BlockActivations {
    fn new(backend: &mut dyn Backend, block: &str, shape: Gpt2Shape, batch: BatchShape) -> Result<Self, Error> {
        let Gpt2Shape { width: d, heads, ffn_width, activation, .. } = shape;
        let p = batch.sequences * batch.context;
        let of = |part: &str| format!("{block}.{part}");
        let lse = backend.alloc(&of("lse"), [batch.sequences * heads, batch.context], DType::F32, Region::Activations)?;
        let mut alloc = |part: &str, columns| backend.alloc(&of(part), [p, columns], DType::Activation, Region::Activations);
        let attention = AttentionActivations { qkv: alloc("qkv", 3 * d)?, o: alloc("o", d)?, lse };
        let ffn = FfnActivations { z: alloc("z", ffn_width * activation.width())?, h: alloc("h", ffn_width)? };
        let norms = [norm_activations(backend, &of("ln_1"), [p, d])?, norm_activations(backend, &of("ln_2"), [p, d])?];
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
            attention: AttentionActivations { qkv: attention.qkv.first_rows(p), o: attention.o.first_rows(p), lse },
            ffn: FfnActivations { z: ffn.z.first_rows(p), h: ffn.h.first_rows(p) },
        }
    }
}

impl NormActivations {
    fn first_rows(self, rows: usize) -> Self {
        Self { residual: self.residual.first_rows(rows), y: self.y.first_rows(rows), stats: self.stats.first_rows(rows) }
    }
}

fn norm_activations(backend: &mut dyn Backend, name: &str, shape: [usize; 2]) -> Result<NormActivations, Error> {
    let mut alloc = |part: &str, shape, dtype| backend.alloc(&format!("{name} {part}"), shape, dtype, Region::Activations);
    Ok(NormActivations {
        residual: alloc("residual", shape, DType::Activation)?,
        y: alloc("y", shape, DType::Activation)?,
        stats: alloc("stats", [shape[0], 2], DType::F32)?,
    })
}
