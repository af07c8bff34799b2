//! A bidirectional encoder (Devlin et al. 2018, without segments): post-LN blocks, learned
//! positions, padding, and a head of its own for masked tokens.
//!
//! ```text
//! x = norm(word[tokens] + position[positions])
//! per block:  x = norm_1(x + attention(x));  x = norm_2(x + mlp(x))
//! logits = x decoder^T
//! ```

use sparse24_core::{
    op::{Accumulate, Activation, AttentionMask},
    philox::Site,
};

use super::{Extents, Model, Sparsify};
use crate::{
    Error,
    backend::{Backend, DType, Region, Tensor, op::Add},
    nn::{
        Attention, AttentionActivations, AttentionSpec, BatchShape, Bias, Builder, Embedding, Ffn,
        FfnActivations, FfnSpec, Head, Norm, NormActivations, ParameterSpec, Pass, Sharing,
        Sparsity, Streams,
    },
    objective::Batch,
};

/// The size of an encoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EncoderSpec {
    /// Blocks.
    pub layers: usize,
    /// Attention heads; they divide d_model.
    pub heads: usize,
    /// Features of the residual stream.
    pub d_model: usize,
    /// Features between the feed-forward layers, after a gate.
    pub d_ff: usize,
    /// Longest sequence.
    pub sequence_length: usize,
    /// Token ids.
    pub vocabulary: usize,
    /// Between the feed-forward layers.
    pub activation: Activation,
    /// Which linear layers masks may prune.
    pub sparsify: Sparsify,
    /// Label smoothing in `[0, 1)`.
    pub smoothing: f32,
}

/// Standard deviation of the initial weights.
const DEVIATION: f32 = 0.02;

/// Added to the variances of norms.
const EPSILON: f32 = 1e-5;

impl EncoderSpec {
    pub(super) fn extents(&self) -> Extents {
        let &Self { d_model, heads, d_ff, sequence_length: longest, activation, .. } = self;
        Extents { d_model, heads, d_ff, longest, activation }
    }

    fn attention<'a>(&self, names: &'a [String]) -> AttentionSpec<'a> {
        let sparsity = match self.sparsify {
            Sparsify::Ffn => Sparsity::Dense,
            Sparsify::FfnAndAttention => Sparsity::Sparsifiable,
        };
        AttentionSpec {
            names,
            d_model: self.d_model,
            heads: self.heads,
            mask: AttentionMask::Full,
            bias: Bias::Present,
            deviations: [DEVIATION; 2],
            sparsity,
        }
    }
}

/// The model with its activations.
#[derive(Debug)]
pub struct Encoder {
    embedding: Embedding,
    norm: Norm,
    blocks: Vec<Block>,
    head: Head,
    tokens: Tensor,
    lengths: Tensor,
    embedded: NormActivations,
    dropout: Site,
    shared: Shared,
}

/// Buffers that all blocks share.
#[derive(Debug, Clone, Copy)]
struct Shared {
    /// Output of a half block.
    delta: Tensor,
    /// Gradients: of a block's output, of the sum before a norm, of a half block's output under
    /// dropout, and of a half block's input.
    dx: Tensor,
    dsum: Tensor,
    ddelta: Tensor,
    dbranch: Tensor,
    attention: AttentionActivations,
    ffn: FfnActivations,
}

impl Encoder {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Sparsifiable shapes must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: EncoderSpec) -> Result<Self, Error> {
        let EncoderSpec { d_model: d, vocabulary, sequence_length, .. } = spec;
        let positions = Some(("position.weight", sequence_length));
        let embedding =
            Embedding::new(builder, ("word.weight", vocabulary), positions, d, DEVIATION)?;
        let norm = Norm::new(builder, "norm", d, Bias::Present, EPSILON)?;
        let dropout = builder.dropout_site();
        let x = builder.activation("embedded", d)?;
        let embedded = NormActivations::new(builder, "norm", x)?;
        let mut blocks: Vec<Block> = Vec::new();
        for layer in 0..spec.layers {
            blocks.push(Block::new(builder, spec, layer)?);
        }
        let decoder = ParameterSpec::matrix("decoder.weight", [vocabulary, d], DEVIATION);
        let head = Head::untied(builder, decoder, spec.smoothing)?;
        let BatchShape { size, .. } = builder.batch();
        let p = builder.batch().tokens();
        let tokens = builder.tensor("tokens", [p, 1], DType::U32, Region::Activations)?;
        let lengths = builder.tensor("lengths", [size, 1], DType::U32, Region::Activations)?;
        let names = ["q", "kv", "out"].map(str::to_owned);
        let mut activation = |name| builder.activation(name, d);
        let (delta, dx, dsum) = (activation("delta")?, activation("dx")?, activation("dsum")?);
        let (ddelta, dbranch) = (activation("ddelta")?, activation("dbranch")?);
        let attention = Attention::activations(builder, "d", &spec.attention(&names))?;
        let ffn = FfnActivations::new(builder, "d", spec.d_ff, spec.activation)?;
        let shared = Shared { delta, dx, dsum, ddelta, dbranch, attention, ffn };
        Ok(Self { embedding, norm, blocks, head, tokens, lengths, embedded, dropout, shared })
    }

    /// The output of the last block.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor, Error> {
        let embedded = self.embedded.rows(pass);
        self.embedding.forward(pass, pass.rows(self.tokens), embedded.x)?;
        self.norm.forward(pass, embedded)?;
        pass.drop_in_place(embedded.y, self.dropout)?;
        let lengths = Some(self.lengths.first_rows(pass.batch.size));
        let mut x = embedded.y;
        for block in &self.blocks {
            x = block.forward(pass, Streams { x, memory: None, lengths }, self.shared)?;
        }
        Ok(x)
    }
}

impl Model for Encoder {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result<(), Error> {
        let Batch { tokens, targets, lengths, .. } = batch;
        backend.upload_ids(self.tokens.first_rows(tokens.len()), tokens)?;
        backend.upload_ids(self.head.buffers().targets.first_rows(targets.len()), targets)?;
        backend.upload_ids(self.lengths.first_rows(lengths.len()), lengths)
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        let dx = pass.rows(self.shared.dx);
        self.head.loss_and_gradient(pass, x, dx)?;
        let lengths = Some(self.lengths.first_rows(pass.batch.size));
        let embedded = self.embedded.rows(pass);
        for (layer, block) in self.blocks.iter().enumerate().rev() {
            let x = match layer.checked_sub(1) {
                Some(before) => pass.rows(self.blocks[before].kept.norm_2.y),
                None => embedded.y,
            };
            block.backward(pass, Streams { x, memory: None, lengths }, self.shared)?;
        }
        pass.drop_in_place(dx, self.dropout)?;
        let dsum = pass.rows(self.shared.dsum);
        self.norm.backward(pass, dx, embedded, dsum, Accumulate::Overwrite)?;
        self.embedding.backward(pass, pass.rows(self.tokens), dsum, Sharing::Alone)
    }

    fn evaluate(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        self.head.loss(pass, x)
    }

    fn loss(&self) -> Tensor {
        self.head.buffers().loss
    }
}

/// x = norm_1(x + attention(x)); x = norm_2(x + mlp(x)).
#[derive(Debug)]
struct Block {
    attention: Attention,
    norm_1: Norm,
    mlp: Ffn,
    norm_2: Norm,
    dropouts: [Site; 2],
    kept: Kept,
}

/// Activations that a block keeps for its backward pass.
#[derive(Debug, Clone, Copy)]
struct Kept {
    attention: AttentionActivations,
    norm_1: NormActivations,
    mlp: FfnActivations,
    norm_2: NormActivations,
}

impl Kept {
    fn rows(self, pass: &Pass<'_>) -> Self {
        Self {
            attention: self.attention.rows(pass),
            norm_1: self.norm_1.rows(pass),
            mlp: self.mlp.rows(pass),
            norm_2: self.norm_2.rows(pass),
        }
    }
}

impl Block {
    fn new(builder: &mut Builder<'_>, spec: EncoderSpec, layer: usize) -> Result<Self, Error> {
        let EncoderSpec { d_model, d_ff, activation, .. } = spec;
        let of = |part: &str| format!("layer.{layer}.{part}");
        let names = ["attention.q", "attention.kv", "attention.out"].map(of);
        let attention = Attention::new(builder, &spec.attention(&names))?;
        let norm_1 = Norm::new(builder, &of("norm_1"), d_model, Bias::Present, EPSILON)?;
        let (names, bias) = (["mlp.up", "mlp.down"].map(of), Bias::Present);
        let deviations = [DEVIATION; 2];
        let mlp = FfnSpec { names, d_model, d_ff, activation, bias, deviations };
        let mlp = Ffn::new(builder, mlp)?;
        let norm_2 = Norm::new(builder, &of("norm_2"), d_model, bias, EPSILON)?;
        let dropouts = [builder.dropout_site(), builder.dropout_site()];
        let mut kept_norm = |part: &str| {
            let x = builder.activation(&of(&format!("{part} x")), d_model)?;
            NormActivations::new(builder, &of(part), x)
        };
        let (kept_1, kept_2) = (kept_norm("norm_1")?, kept_norm("norm_2")?);
        let names = ["q", "kv", "out"].map(str::to_owned);
        let kept = Kept {
            attention: Attention::activations(builder, &of("kept"), &spec.attention(&names))?,
            norm_1: kept_1,
            mlp: FfnActivations::new(builder, &of("mlp"), d_ff, activation)?,
            norm_2: kept_2,
        };
        Ok(Self { attention, norm_1, mlp, norm_2, dropouts, kept })
    }

    fn forward(
        &self,
        pass: &mut Pass<'_>,
        streams: Streams,
        shared: Shared,
    ) -> Result<Tensor, Error> {
        let (kept, delta) = (self.kept.rows(pass), pass.rows(shared.delta));
        self.attention.forward(pass, streams, kept.attention, delta)?;
        pass.drop_in_place(delta, self.dropouts[0])?;
        self.norm_1.forward_residual(pass, streams.x, delta, kept.norm_1)?;
        self.mlp.forward_up(pass, kept.norm_1.y, kept.mlp)?;
        self.mlp.forward_down(pass, kept.mlp, delta)?;
        pass.drop_in_place(delta, self.dropouts[1])?;
        self.norm_2.forward_residual(pass, kept.norm_1.y, delta, kept.norm_2)?;
        Ok(kept.norm_2.y)
    }

    /// `shared.dx`: in, the gradient of the block's output; out, of its input.
    fn backward(&self, pass: &mut Pass<'_>, streams: Streams, shared: Shared) -> Result<(), Error> {
        let kept = self.kept.rows(pass);
        let [dx, dsum, ddelta, dbranch, dmemory] =
            [shared.dx, shared.dsum, shared.ddelta, shared.dbranch, shared.delta]
                .map(|buffer| pass.rows(buffer));
        self.norm_2.backward(pass, dx, kept.norm_2, dsum, Accumulate::Overwrite)?;
        let dmlp = pass.before_dropout(dsum, ddelta, self.dropouts[1])?;
        let scratch = shared.ffn.rows(pass);
        self.mlp.backward(pass, kept.norm_1.y, kept.mlp, dmlp, scratch, dbranch)?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })?;

        self.norm_1.backward(pass, dx, kept.norm_1, dsum, Accumulate::Overwrite)?;
        let dout = pass.before_dropout(dsum, ddelta, self.dropouts[0])?;
        let scratch = shared.attention.rows(pass);
        let buffers = [kept.attention, scratch];
        self.attention.backward(pass, streams, buffers, dout, dbranch, Some(dmemory))?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })
    }
}
