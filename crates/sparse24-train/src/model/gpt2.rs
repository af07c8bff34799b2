//! GPT-2 (Radford et al. 2019): pre-LN blocks, learned positions, a head tied to the token
//! embedding.
//!
//! The residual stream is carried by the norms: each adds the output of the block before it.
//! Parameter names are those of Hugging Face's GPT-2; linear weights are `[out, in]`.

use self::block::{Block, BlockActivations, EMBEDDING_DROPOUT, SparseRooms};
use crate::{
    Error,
    backend::{Activation, Backend, DType, Region, Tensor},
    method::Method,
    nn::{
        Pass,
        embedding::{Embedding, HeadBuffers},
        linear24::{Bias, SparseRoom},
        norm::{Norm, NormActivations},
        parameter::Parameters,
    },
};

mod block;

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

impl Gpt2Shape {
    /// How many weights each linear layer that may be pruned has, by the name of its parameter.
    #[must_use]
    pub fn sparsifiable(&self) -> Vec<(String, u64)> {
        let &Self { width: d, ffn_width, .. } = self;
        let ffn =
            [("mlp.c_fc", d * ffn_width * self.activation.width()), ("mlp.c_proj", d * ffn_width)];
        let attention = [("attn.c_attn", 3 * d * d), ("attn.c_proj", d * d)];
        let parts = match self.sparsify {
            Sparsify::Ffn => ffn.to_vec(),
            Sparsify::FfnAndAttention => [attention, ffn].concat(),
        };
        let named = |layer| {
            parts
                .iter()
                .map(move |(part, weights)| (format!("h.{layer}.{part}.weight"), *weights as u64))
        };
        (0..self.layers).flat_map(named).collect()
    }
}

/// Which linear layers may be pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Sparsify {
    /// Those of the feed-forward blocks.
    Ffn,
    /// Also the attention projections.
    FfnAndAttention,
}

/// What the backward pass computes again instead of having it kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// All of a block from its input: a fifth to a third of a step's arithmetic more, the same
    /// bits, and the memory of one block instead of all.
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

/// Rows of logits held at a time, so that a large vocabulary needs no `[p, V]` buffer; a GPU wants
/// thousands for its products.
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
    /// Allocates parameters, activations and the sparse operands of a method for batches of at most
    /// this shape.
    ///
    /// # Errors
    /// Those of the allocations, among them sparsified shapes that are not made of 4x4 tiles.
    pub fn new(
        backend: &mut dyn Backend,
        shape: Gpt2Shape,
        batch: BatchShape,
        recompute: Recompute,
        method: &Method,
    ) -> Result<(Self, Parameters), Error> {
        let mut parameters = Parameters::default();
        let Gpt2Shape { width: d, ffn_width, .. } = shape;
        let p = batch.sequences * batch.context;
        let z_width = ffn_width * shape.activation.width();
        let tables = [("wte.weight", shape.vocabulary), ("wpe.weight", shape.context)];
        let embedding = Embedding::new(backend, &mut parameters, tables, d, DEVIATION)?;

        // A sampled gradient lives only until its product: layers of one shape share the room.
        let operands = method.pruned_operands();
        let mut room = |width: usize| {
            let sampled =
                if method.samples() { Some(backend.alloc_gradient24([p, width])?) } else { None };
            Ok::<_, Error>(SparseRoom { operands, sampled })
        };
        let sparse = SparseRooms {
            up: room(z_width)?,
            narrow: room(d)?,
            qkv: match shape.sparsify {
                Sparsify::Ffn => None,
                Sparsify::FfnAndAttention => Some(room(3 * d)?),
            },
        };
        let shared = match recompute {
            Recompute::None => None,
            Recompute::Blocks => Some(BlockActivations::new(backend, "block", shape, batch)?),
        };
        let blocks = (0..shape.layers)
            .map(|layer| {
                Block::new(backend, &mut parameters, shape, layer, batch, (sparse, shared))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let norm = Norm::new(backend, &mut parameters, "ln_f", d, shape.bias)?;

        let final_norm = NormActivations::new(backend, "ln_f", [p, d])?;
        let mut alloc = |name: &str, columns| {
            backend.alloc(name, [p, columns], DType::Activation, Region::Activations)
        };
        let (embedded, delta, dresidual, dy) =
            (alloc("embedded", d)?, alloc("delta", d)?, alloc("dresidual", d)?, alloc("dy", d)?);
        let (ddelta, d_o, dqkv, dz) =
            (alloc("ddelta", d)?, alloc("d_o", d)?, alloc("dqkv", 3 * d)?, alloc("dz", z_width)?);
        let buffers = Buffers {
            tokens: backend.alloc("tokens", [p, 1], DType::U32, Region::Activations)?,
            targets: backend.alloc("targets", [p, 1], DType::U32, Region::Activations)?,
            loss: backend.alloc("loss", [1, 1], DType::F32, Region::Activations)?,
            logits: backend.alloc(
                "logits",
                [p.min(HEAD_ROWS), shape.vocabulary],
                DType::Activation,
                Region::Activations,
            )?,
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

    /// Brings a batch to the device, for all that follows.
    ///
    /// # Errors
    /// Those of the uploads.
    pub fn upload(
        &self,
        backend: &mut dyn Backend,
        tokens: &[u32],
        targets: &[u32],
    ) -> Result<(), Error> {
        backend.upload_tokens(self.buffers.tokens.first_rows(tokens.len()), tokens)?;
        backend.upload_tokens(self.buffers.targets.first_rows(targets.len()), targets)
    }

    /// The summed loss of the batch done last `[1, 1]`.
    #[must_use]
    pub fn loss(&self) -> Tensor {
        self.buffers.loss
    }

    /// Forward and backward of the batch on the device: [`Gpt2::loss`], and the gradients of
    /// `scale` times it.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn train(&self, pass: &mut Pass<'_>, scale: f32) -> Result<(), Error> {
        let x = self.forward(pass)?;
        let head = self.head(pass);
        let p = pass.tokens();
        let [dresidual, dy, ddelta] =
            [self.buffers.dresidual, self.buffers.dy, self.buffers.ddelta].map(|t| t.first_rows(p));
        self.embedding.loss_and_gradient(pass, x, head, scale, dy)?;

        pass.backend.fill(dresidual, 0.0)?;
        self.norm.backward(pass, dy, self.buffers.final_norm.first_rows(p), dresidual)?;
        for block in self.blocks.iter().rev() {
            block.backward(pass, &self.buffers, dresidual, dy, ddelta)?;
        }
        pass.drop_in_place(dresidual, EMBEDDING_DROPOUT)?;
        self.embedding.backward(pass, self.buffers.tokens.first_rows(p), dresidual)
    }

    /// The summed loss of the batch on the device; targets of [`crate::backend::HeadLoss::IGNORE`]
    /// count nothing.
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

    /// The first layer, in the order of a forward pass of the batch on the device, of whose output
    /// this holds.
    ///
    /// # Errors
    /// Those of the operations, and of `holds`.
    pub fn first_output(
        &self,
        pass: &mut Pass<'_>,
        mut holds: impl FnMut(&mut dyn Backend, Tensor) -> Result<bool, Error>,
    ) -> Result<Option<String>, Error> {
        let mut found = None;
        let mut look =
            |pass: &mut Pass<'_>, name: &dyn Fn() -> String, output: Tensor| -> Result<(), Error> {
                if found.is_none() && holds(pass.backend, output)? {
                    found = Some(name());
                }
                Ok(())
            };
        // A norm adds the output of the layer before it.
        let before = |layer: usize| {
            layer
                .checked_sub(1)
                .map_or("the embedding".to_owned(), |layer| format!("h.{layer}.mlp.c_proj"))
        };
        self.forward_past(
            pass,
            |pass, layer, BlockActivations { norms: [first, second], attention, ffn }| {
                look(pass, &|| before(layer), first.residual)?;
                let parts = [
                    ("ln_1", first.y),
                    ("attn.c_attn", attention.qkv),
                    ("attn", attention.o),
                    ("attn.c_proj", second.residual),
                    ("ln_2", second.y),
                    ("mlp.c_fc", ffn.z),
                    ("mlp.act", ffn.h),
                ];
                parts.into_iter().try_for_each(|(part, output)| {
                    look(pass, &|| format!("h.{layer}.{part}"), output)
                })
            },
        )?;
        let last = self.buffers.final_norm.first_rows(pass.tokens());
        look(pass, &|| before(self.blocks.len()), last.residual)?;
        look(pass, &|| "ln_f".to_owned(), last.y)?;
        Ok(found)
    }

    /// The output of the final norm.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor, Error> {
        self.forward_past(pass, |_, _, _| Ok(()))
    }

    /// The same, with a look at what each block leaves before the next one begins.
    fn forward_past(
        &self,
        pass: &mut Pass<'_>,
        mut past: impl FnMut(&mut Pass<'_>, usize, BlockActivations) -> Result<(), Error>,
    ) -> Result<Tensor, Error> {
        let p = pass.tokens();
        let ids = self.buffers.tokens.first_rows(p);
        let [embedded, delta] =
            [self.buffers.embedded, self.buffers.delta].map(|t| t.first_rows(p));
        self.embedding.forward(pass, ids, embedded)?;
        pass.drop_in_place(embedded, EMBEDDING_DROPOUT)?;
        let mut stream = (embedded, None);
        for (layer, block) in self.blocks.iter().enumerate() {
            let left = block.forward(pass, stream, delta)?;
            past(pass, layer, left)?;
            stream = (left.norms[1].residual, Some(delta));
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
