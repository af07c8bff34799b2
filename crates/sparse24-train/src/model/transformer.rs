//! The Transformer of Vaswani et al. 2017 (arXiv 1706.03762) as fairseq trains it: an encoder and a
//! decoder of post-LN blocks, sinusoidal positions, and one table for both embeddings and the
//! logits.
//!
//! ```text
//! x = dropout(sqrt(d) E[source] + S[positions])
//! per encoder block:  x = norm(x + attention(x));  x = norm(x + ffn(x))
//! y = dropout(sqrt(d) E[tokens] + S[positions])
//! per decoder block:  y = norm(y + causal(y));  y = norm(y + attention(y, x));
//!                     y = norm(y + ffn(y))
//! logits = y E^T
//! ```
//!
//! Queries see the keys of the source that are no padding. Targets come without lengths: padding
//! comes last, where no query of a token sees it, and its targets are ignored. There is no dropout
//! of attention probabilities and none between the feed-forward layers, as fairseq's default is.
//!
//! Parameter names are fairseq's, but queries, keys and values of one stream are one projection.
//! Matrices start as in fairseq up to 0.8 (Xavier's uniform distribution over the joint
//! projection), embeddings as N(0, 1/d), biases as zero; but the row of the padding token starts as
//! the others do. No input reads that row.

use sparse24_core::{
    op::{Activation, AttentionMask},
    philox::Site,
};

use super::{Extents, Model, Sparsify, add_norm::AddNorm};
use crate::{
    Error, Result,
    backend::{
        Backend, DType, Region, Tensor,
        op::{Add, Copy, GatherRows, TargetLoss},
    },
    nn::{
        Attention, AttentionActivations, AttentionOperands, AttentionSpec, BatchShape, Bias,
        Builder, Embedding, Ffn, FfnActivations, FfnSpec, Head, Init, Pass, PredictionHead,
        ProbabilityDropout, Sharing, Streams,
    },
    objective::Batch,
};

/// The size of a Transformer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TransformerSpec {
    /// Blocks of the encoder, and of the decoder.
    pub layers: usize,
    /// Attention heads; they divide d_model.
    pub heads: usize,
    /// Features of the residual streams.
    pub d_model: usize,
    /// Features between the feed-forward layers, after a gate.
    pub d_ff: usize,
    /// Longest source, and longest target.
    pub sequence_length: usize,
    /// Token ids, of both languages.
    pub vocabulary: usize,
    /// Between the feed-forward layers.
    pub activation: Activation,
    /// Which linear layers masks may prune.
    pub sparsify: Sparsify,
    /// Label smoothing of the training loss, in `[0, 1)`; evaluations have none.
    pub label_smoothing: f32,
}

/// The parameter whose rows are the vocabulary.
pub const TOKEN_TABLE: &str = "encoder.embed_tokens.weight";

/// Added to the variances of norms.
const EPSILON: f32 = 1e-5;

/// Xavier's uniform distribution for a matrix `[r, q]` (Glorot and Bengio 2010).
fn xavier(r: usize, q: usize) -> Init {
    Init::Uniform((6.0 / (r + q) as f64).sqrt() as f32)
}

impl TransformerSpec {
    pub(super) fn extents(&self) -> Extents {
        let &Self { layers, heads, d_model, d_ff, sequence_length: longest, activation, .. } = self;
        Extents { layers, heads, d_model, d_ff, longest, activation, bias: Bias::Present }
    }

    fn attention<'a>(&self, names: &'a [String], mask: AttentionMask) -> AttentionSpec<'a> {
        let &Self { d_model: d, heads, sparsify, .. } = self;
        let sparsity = sparsify.attention();
        let init = [xavier(3 * d, d), xavier(d, d)];
        let (bias, dropout) = (Bias::Present, ProbabilityDropout::Absent);
        AttentionSpec { names, d_model: d, heads, mask, bias, init, sparsity, dropout }
    }
}

/// The model with its activations.
#[derive(Debug)]
pub struct Transformer {
    embedding: Embedding,
    encoder: Stack,
    decoder: Stack,
    head: Head,
    /// Tokens of each source `[sequences, 1]`.
    lengths: Tensor,
    /// While decoding, the row that each hypothesis continues, and its tokens so far.
    parents: Tensor,
    seen: Tensor,
    shared: Shared,
}

/// Embedded tokens and blocks.
#[derive(Debug)]
struct Stack {
    tokens: Tensor,
    /// The sum of the embeddings, after dropout.
    embedded: Tensor,
    dropout: Site,
    blocks: Vec<Block>,
}

/// Buffers that all blocks share.
#[derive(Debug, Clone, Copy)]
struct Shared {
    /// Output of a sublayer.
    delta: Tensor,
    /// Gradients: of a block's output, of the sum before a norm, of a sublayer's output under
    /// dropout, of its input, of the encoder's output, and of one block's part of that.
    dx: Tensor,
    dsum: Tensor,
    ddelta: Tensor,
    dbranch: Tensor,
    dmemory: Tensor,
    dpart: Tensor,
    attention: AttentionOperands,
    cross: AttentionOperands,
    ffn: FfnActivations,
}

impl Shared {
    fn new(builder: &mut Builder<'_>, spec: &TransformerSpec) -> Result<Self> {
        let d = spec.d_model;
        let mut activation = |name| builder.activation(name, d);
        let (delta, dx, dsum) = (activation("delta")?, activation("dx")?, activation("dsum")?);
        let (ddelta, dbranch) = (activation("ddelta")?, activation("dbranch")?);
        let (dmemory, dpart) = (activation("dmemory")?, activation("dpart")?);
        let names = ["q", "kv", "out"].map(str::to_owned);
        let of = |names| spec.attention(names, AttentionMask::Full);
        let attention = AttentionOperands::new(builder, "d", &of(&names[1..]))?;
        let cross = AttentionOperands::new(builder, "d cross", &of(&names))?;
        let ffn = FfnActivations::new(builder, "d", spec.d_ff, spec.activation)?;
        Ok(Self { delta, dx, dsum, ddelta, dbranch, dmemory, dpart, attention, cross, ffn })
    }

    fn rows(self, pass: &Pass<'_>) -> Self {
        let Self { delta, dx, dsum, ddelta, dbranch, dmemory, dpart, attention, cross, ffn } = self;
        let [delta, dx, dsum, ddelta] = [delta, dx, dsum, ddelta].map(|t| pass.rows(t));
        let [dbranch, dmemory, dpart] = [dbranch, dmemory, dpart].map(|t| pass.rows(t));
        let (attention, cross, ffn) = (attention.rows(pass), cross.rows(pass), ffn.rows(pass));
        Self { delta, dx, dsum, ddelta, dbranch, dmemory, dpart, attention, cross, ffn }
    }
}

/// A batch of hypotheses that grow by a token at a time.
#[derive(Debug, Clone, Copy)]
pub struct DecodingStep<'a> {
    /// Sequences of the sources, and their padded length.
    pub sources: BatchShape,
    /// Tokens before this one.
    pub position: usize,
    /// The most tokens of a hypothesis.
    pub longest: usize,
    /// The last token of each hypothesis, as many for each source, in order.
    pub tokens: &'a [u32],
    /// The hypothesis of the step before that each one continues.
    pub parents: &'a [u32],
}

impl Transformer {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Sparsifiable shapes must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: TransformerSpec) -> Result<Self> {
        let TransformerSpec { d_model: d, vocabulary, sequence_length: longest, .. } = spec;
        let tokens = (TOKEN_TABLE, vocabulary);
        let embedding = Embedding::with_fixed_sinusoids(builder, tokens, longest, d)?;
        let encoder = Stack::new(builder, &spec, "encoder")?;
        let decoder = Stack::new(builder, &spec, "decoder")?;
        let p = builder.batch().tokens();
        let loss = TargetLoss::CrossEntropy { smoothing: spec.label_smoothing, mixed: None };
        let head = Head::tied(builder, &embedding, p)?.with_loss(loss);
        let mut ids = |name| builder.tensor(name, [p, 1], DType::U32, Region::Activations);
        let (lengths, parents, seen) = (ids("lengths")?, ids("parents")?, ids("seen")?);
        let shared = Shared::new(builder, &spec)?;
        Ok(Self { embedding, encoder, decoder, head, lengths, parents, seen, shared })
    }

    /// The encoder's output.
    fn encoded(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        let shared = self.shared.rows(pass);
        let mut x = self.encoder.embed(pass, &self.embedding)?;
        let lengths = Some(self.lengths.first_rows(pass.batch.size));
        for block in &self.encoder.blocks {
            x = block.forward(pass, Streams { x, memory: None, lengths }, None, shared)?;
        }
        Ok(x)
    }

    /// The outputs of the encoder and of the decoder.
    fn both(&self, pass: &mut Pass<'_>) -> Result<[Tensor; 2]> {
        let memory = self.encoded(pass)?;
        let shared = self.shared.rows(pass);
        let mut x = self.decoder.embed(pass, &self.embedding)?;
        for block in &self.decoder.blocks {
            x = block.forward(pass, x.into(), Some(self.memory(pass, memory)), shared)?;
        }
        Ok([memory, x])
    }

    fn memory(&self, pass: &Pass<'_>, x: Tensor) -> Memory {
        Memory { x, lengths: self.lengths.first_rows(pass.batch.size) }
    }
}

impl Model for Transformer {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result {
        let Batch { source, tokens, targets, lengths, .. } = batch;
        let p = tokens.len();
        backend.upload_ids(self.lengths.first_rows(lengths.len()), lengths)?;
        backend.upload_ids(self.encoder.tokens.first_rows(source.len()), source)?;
        backend.upload_ids(self.decoder.tokens.first_rows(p), tokens)?;
        backend.upload_ids(self.head.buffers().targets.first_rows(p), targets)
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result {
        let [memory, y] = self.both(pass)?;
        let shared = self.shared.rows(pass);
        self.head.loss_and_gradient(pass, y, shared.dx)?;
        let of_source = self.memory(pass, memory);
        let last = self.decoder.blocks.len() - 1;
        for (layer, block) in self.decoder.blocks.iter().enumerate().rev() {
            // The last block's part is the first: it overwrites.
            let dpart = if layer == last { shared.dmemory } else { shared.dpart };
            let x = Streams::from(self.decoder.input(pass, layer));
            block.backward(pass, x, Some((of_source, dpart)), shared)?;
            if layer != last {
                pass.run(Add { x: shared.dmemory, delta: dpart, out: shared.dmemory })?;
            }
        }
        self.decoder.backward(pass, &self.embedding, shared.dx)?;
        pass.run(Copy { from: shared.dmemory, to: shared.dx })?;
        let lengths = Some(of_source.lengths);
        for (layer, block) in self.encoder.blocks.iter().enumerate().rev() {
            let x = self.encoder.input(pass, layer);
            block.backward(pass, Streams { x, memory: None, lengths }, None, shared)?;
        }
        self.encoder.backward(pass, &self.embedding, shared.dx)
    }

    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        Ok(self.both(pass)?[1])
    }

    fn head(&self) -> &dyn PredictionHead {
        &self.head
    }

    fn encode(&self, pass: &mut Pass<'_>) -> Result {
        let memory = self.encoded(pass)?;
        self.decoder.blocks.iter().try_for_each(|block| block.project(pass, memory))
    }

    fn decode(&self, pass: &mut Pass<'_>, step: &DecodingStep<'_>) -> Result<Vec<f32>> {
        let (n, position) = (step.tokens.len(), step.position);
        let [tokens, parents, seen] =
            [self.decoder.tokens, self.parents, self.seen].map(|ids| ids.first_rows(n));
        pass.backend.upload_ids(tokens, step.tokens)?;
        pass.backend.upload_ids(parents, step.parents)?;
        pass.backend.upload_ids(seen, &vec![position as u32 + 1; n])?;
        let continues_in_order = step.parents.iter().copied().eq(0..n as u32);
        let order = (position > 0 && !continues_in_order).then_some(parents);
        let lengths = self.lengths.first_rows(step.sources.size);
        let cached = Cached { step, order, seen, lengths };
        let mut x = pass.rows(self.decoder.embedded);
        self.embedding.forward_at(pass, tokens, position, x)?;
        for block in &self.decoder.blocks {
            x = block.decode(pass, x, &cached, self.shared)?;
        }
        self.head.logits(pass, x)
    }
}

impl Stack {
    fn new(builder: &mut Builder<'_>, spec: &TransformerSpec, name: &'static str) -> Result<Self> {
        let p = builder.batch().tokens();
        let dropout = builder.dropout_site();
        let mut blocks: Vec<Block> = Vec::new();
        for layer in 0..spec.layers {
            blocks.push(Block::new(builder, spec, name, layer)?);
        }
        let tokens =
            builder.tensor(&format!("{name} tokens"), [p, 1], DType::U32, Region::Activations)?;
        let embedded = builder.activation(&format!("{name} embedded"), spec.d_model)?;
        Ok(Self { tokens, embedded, dropout, blocks })
    }

    fn embed(&self, pass: &mut Pass<'_>, embedding: &Embedding) -> Result<Tensor> {
        let x = pass.rows(self.embedded);
        embedding.forward(pass, pass.rows(self.tokens), x)?;
        pass.drop_in_place(x, self.dropout)?;
        Ok(x)
    }

    /// The gradient of the table: the head's backward pass came before.
    fn backward(&self, pass: &mut Pass<'_>, embedding: &Embedding, dx: Tensor) -> Result {
        pass.drop_in_place(dx, self.dropout)?;
        embedding.backward(pass, pass.rows(self.tokens), dx, Sharing::Tied)
    }

    /// The input of a block.
    fn input(&self, pass: &Pass<'_>, layer: usize) -> Tensor {
        let before = layer.checked_sub(1).map(|before| self.blocks[before].output());
        pass.rows(before.unwrap_or(self.embedded))
    }
}

/// The encoder's output, and the tokens of each source.
#[derive(Debug, Clone, Copy)]
struct Memory {
    x: Tensor,
    lengths: Tensor,
}

/// A decoding step on the device.
struct Cached<'a> {
    step: &'a DecodingStep<'a>,
    /// The rows of the cache to continue, unless they are in order.
    order: Option<Tensor>,
    /// Cached tokens of each hypothesis, this one included.
    seen: Tensor,
    /// Tokens of each source.
    lengths: Tensor,
}

/// Self-attention; attention to the encoder's output, in the decoder; feed-forward layers. The
/// output of each is dropped out and added to its input, and the sum is normalized.
#[derive(Debug)]
struct Block {
    attention: Attention,
    kept_attention: AttentionActivations,
    after_attention: AddNorm,
    cross: Option<(Attention, AttentionActivations, AddNorm)>,
    ffn: Ffn,
    kept_ffn: FfnActivations,
    after_ffn: AddNorm,
}

impl Block {
    fn new(
        builder: &mut Builder<'_>,
        spec: &TransformerSpec,
        stack: &str,
        layer: usize,
    ) -> Result<Self> {
        let &TransformerSpec { d_model: d, d_ff, activation, .. } = spec;
        let of = |part: &str| format!("{stack}.layers.{layer}.{part}");
        let is_decoder = stack == "decoder";
        let mask = if is_decoder { AttentionMask::Causal } else { AttentionMask::Full };
        let mut attend = |part: &str, projections: &[&str], mask| {
            let names = projections.iter().map(|name| of(&format!("{part}.{name}")));
            let names: Vec<String> = names.collect();
            let spec = spec.attention(&names, mask);
            let attention = Attention::new(builder, &spec)?;
            let kept = AttentionActivations::new(builder, &of(part), &spec)?;
            let norm = AddNorm::new(builder, &of(&format!("{part}_layer_norm")), d, EPSILON)?;
            Ok::<_, Error>((attention, kept, norm))
        };
        let (attention, kept_attention, after_attention) =
            attend("self_attn", &["qkv_proj", "out_proj"], mask)?;
        let cross = if is_decoder {
            let projections = ["q_proj", "kv_proj", "out_proj"];
            Some(attend("encoder_attn", &projections, AttentionMask::Full)?)
        } else {
            None
        };
        let (names, bias) = (["fc1", "fc2"].map(of), Bias::Present);
        let columns = d_ff * activation.columns_in();
        let init = [xavier(columns, d), xavier(d, d_ff)];
        let ffn = Ffn::new(builder, FfnSpec { names, d_model: d, d_ff, activation, bias, init })?;
        let kept_ffn = FfnActivations::new(builder, &of("ffn"), d_ff, activation)?;
        let after_ffn = AddNorm::new(builder, &of("final_layer_norm"), d, EPSILON)?;
        Ok(Self { attention, kept_attention, after_attention, cross, ffn, kept_ffn, after_ffn })
    }

    /// Its output, for the largest batch.
    fn output(&self) -> Tensor {
        self.after_ffn.output()
    }

    fn forward(
        &self,
        pass: &mut Pass<'_>,
        streams: Streams,
        memory: Option<Memory>,
        Shared { delta, .. }: Shared,
    ) -> Result<Tensor> {
        self.attention.forward(pass, streams, self.kept_attention.rows(pass), delta)?;
        let mut x = self.after_attention.forward(pass, streams.x, delta)?;
        if let (Some((cross, kept, after)), Some(Memory { x: memory, lengths })) =
            (&self.cross, memory)
        {
            let (memory, lengths) = (Some((memory, pass.batch)), Some(lengths));
            cross.forward(pass, Streams { x, memory, lengths }, kept.rows(pass), delta)?;
            x = after.forward(pass, x, delta)?;
        }
        self.feed_forward(pass, x, delta)
    }

    fn feed_forward(&self, pass: &mut Pass<'_>, x: Tensor, delta: Tensor) -> Result<Tensor> {
        let kept = self.kept_ffn.rows(pass);
        self.ffn.forward_up(pass, x, kept)?;
        self.ffn.forward_down(pass, kept, delta)?;
        self.after_ffn.forward(pass, x, delta)
    }

    /// `shared.dx`: in, the gradient of the block's output; out, of its input. With the memory
    /// comes the buffer for the gradient of it, which is overwritten.
    fn backward(
        &self,
        pass: &mut Pass<'_>,
        streams: Streams,
        memory: Option<(Memory, Tensor)>,
        shared: Shared,
    ) -> Result {
        let Shared { dx, dsum, ddelta, dbranch, .. } = shared;
        let attended = pass.rows(self.after_attention.output());
        let before_ffn =
            self.cross.as_ref().map_or(attended, |(.., after)| pass.rows(after.output()));
        let dout = self.after_ffn.backward(pass, dx, dsum, ddelta)?;
        let kept = self.kept_ffn.rows(pass);
        self.ffn.backward(pass, before_ffn, kept, dout, shared.ffn, dbranch)?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })?;

        if let (Some((cross, kept, after)), Some((Memory { x, lengths }, dmemory))) =
            (&self.cross, memory)
        {
            let dout = after.backward(pass, dx, dsum, ddelta)?;
            let (memory, lengths) = (Some((x, pass.batch)), Some(lengths));
            let buffers = (kept.rows(pass), shared.cross);
            let of = Streams { x: attended, memory, lengths };
            cross.backward(pass, of, buffers, dout, dbranch, Some(dmemory))?;
            pass.run(Add { x: dsum, delta: dbranch, out: dx })?;
        }

        let dout = self.after_attention.backward(pass, dx, dsum, ddelta)?;
        let buffers = (self.kept_attention.rows(pass), shared.attention);
        self.attention.backward(pass, streams, buffers, dout, dbranch, None)?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })
    }

    /// Keys and values of the sources, for [`Self::decode`].
    fn project(&self, pass: &mut Pass<'_>, memory: Tensor) -> Result {
        let Some((cross, kept, _)) = &self.cross else { return Ok(()) };
        cross.project_memory(pass, memory, kept.rows(pass))
    }

    /// One token of each hypothesis. The cache of queries, keys and values is what training keeps,
    /// `[hypotheses, longest * 3d]`; the buffer of its gradient is scratch.
    fn decode(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        cached: &Cached<'_>,
        shared: Shared,
    ) -> Result<Tensor> {
        let &Cached { step: &DecodingStep { sources, position, longest, .. }, .. } = cached;
        let kept = self.kept_attention;
        let (n, wide) = (pass.tokens(), kept.operands.q.shape[1]);
        let [cache, scratch] =
            [kept.operands.q, shared.attention.q].map(|t| t.packed([n, longest * wide]));
        if let Some(rows) = cached.order {
            let [x, out] = [cache, scratch].map(|t| t.columns(0..position * wide));
            pass.run(GatherRows { x, rows, out })?;
            pass.run(Copy { from: out, to: x })?;
        }
        let delta = pass.rows(shared.delta);
        let qkv = pass.rows(shared.attention.q);
        self.attention.project(pass, x, qkv)?;
        let now = cache.columns(position * wide..(position + 1) * wide);
        pass.run(Copy { from: qkv, to: now })?;
        let [q, ..] = qkv.split::<3>();
        let [_, k, v] = kept.operands.q.packed([n * longest, wide]).split();
        let keys = BatchShape { size: n, sequence_length: longest };
        self.attention.attend(pass, [q, k, v], keys, cached.seen, kept, delta)?;
        let mut x = self.after_attention.forward(pass, x, delta)?;

        if let Some((cross, kept, after)) = &self.cross {
            let q = pass.rows(kept.operands.q);
            cross.project(pass, x, q)?;
            let kv = kept.operands.kv.expect("keys of the sources are projected apart");
            let [k, v] = kv.first_rows(sources.tokens()).split();
            cross.attend(pass, [q, k, v], sources, cached.lengths, *kept, delta)?;
            x = after.forward(pass, x, delta)?;
        }
        self.feed_forward(pass, x, delta)
    }
}
