//! BERT (Devlin et al. 2018, arXiv 1810.04805): post-LN blocks, learned positions, segments,
//! padding, and a head that is tied to the token embedding and reads the rows of masked tokens.
//!
//! ```text
//! x = norm(word[tokens] + position[positions] + segment[segments])
//! per block:  x = norm_1(x + attention(x));  x = norm_2(x + mlp(x))
//! m = the rows of x that have a target
//! logits = norm(act(m W^T + b)) word^T + bias
//! ```
//!
//! A fine-tuned BERT has a [`SequenceHead`] on the first token instead, with a pooler, or a
//! [`SpanHead`] on all.
//!
//! Parameter names are Hugging Face's without `bert.`, but queries, keys and values are one
//! projection.

use sparse24_core::{
    op::{Accumulate, Activation, AttentionMask},
    philox::Site,
};

use super::{Extents, Model, Sparsify, no_outputs};
use crate::{
    Error,
    backend::{
        Backend, DType, Region, Tensor,
        op::{ActivationBackward, Add},
    },
    nn::{
        Attention, AttentionActivations, AttentionSpec, BatchShape, Bias, Builder, Embedding, Ffn,
        FfnActivations, FfnSpec, Head, Init, Linear24, LinearSpec, Norm, NormActivations, Pass,
        Prediction, PredictionHead, SequenceHead, SequenceHeadSpec, Sharing, SpanHead, Sparsity,
        Streams, TargetRows,
    },
    objective::{Batch, most_targets},
};

/// The size of a BERT, or of a [crammed](super::crammed_bert) one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BertSpec {
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
    /// Probability that a token is a target, which bounds the rows that the head reads: at most
    /// [`most_targets`] of a batch.
    pub mask_probability: f32,
    /// Features of the pooler, through which a fine-tuned model reads the first token.
    pub pooler: usize,
    /// The prediction that it is fine-tuned for; masked tokens if absent.
    pub prediction: Option<Prediction>,
}

/// The parameter whose rows are the vocabulary.
pub const TOKEN_TABLE: &str = "embeddings.word_embeddings.weight";

/// Segments: the first and the second sentence of a pair.
pub const SEGMENTS: usize = 2;

/// The initial weights.
pub(super) const INIT: Init = Init::Normal(0.02);

/// Added to the variances of norms.
pub(super) const EPSILON: f32 = 1e-12;

impl BertSpec {
    pub(super) fn extents(&self) -> Extents {
        let &Self { layers, heads, d_model, d_ff, sequence_length: longest, activation, .. } = self;
        Extents { layers, heads, d_model, d_ff, longest, activation, bias: Bias::Present }
    }

    pub(super) fn attention<'a>(&self, names: &'a [String], bias: Bias) -> AttentionSpec<'a> {
        let sparsity = match self.sparsify {
            Sparsify::Ffn => Sparsity::Dense,
            Sparsify::FfnAndAttention => Sparsity::Sparsifiable,
        };
        AttentionSpec {
            names,
            d_model: self.d_model,
            heads: self.heads,
            mask: AttentionMask::Full,
            bias,
            init: [INIT; 2],
            sparsity,
        }
    }
}

/// The model with its activations.
#[derive(Debug)]
pub struct Bert {
    embedding: Embedding,
    segment: Embedding,
    norm: Norm,
    blocks: Vec<Block>,
    head: TaskHead,
    tokens: Tensor,
    segments: Tensor,
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

impl Bert {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Sparsifiable shapes must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: BertSpec) -> Result<Self, Error> {
        let BertSpec { d_model: d, vocabulary, sequence_length, .. } = spec;
        let positions = Some(("embeddings.position_embeddings.weight", sequence_length));
        let embedding = Embedding::new(builder, (TOKEN_TABLE, vocabulary), positions, d, INIT)?;
        let kinds = ("embeddings.token_type_embeddings.weight", SEGMENTS);
        let segment = Embedding::new(builder, kinds, None, d, INIT)?;
        let norm = Norm::new(builder, "embeddings.LayerNorm", d, Bias::Present, EPSILON)?;
        let dropout = builder.dropout_site();
        let x = builder.activation("embedded", d)?;
        let embedded = NormActivations::new(builder, "embedded", x)?;
        let mut blocks: Vec<Block> = Vec::new();
        for layer in 0..spec.layers {
            blocks.push(Block::new(builder, spec, layer)?);
        }
        let head = match spec.prediction {
            None => TaskHead::Masked(Box::new(MaskedHead::new(builder, spec, &embedding)?)),
            Some(Prediction::Span) => {
                let x = blocks.last().map_or(embedded.y, |block| block.kept.norm_2.y);
                TaskHead::Tuned(Box::new(SpanHead::new(builder, x, INIT)?))
            }
            Some(prediction) => {
                let pooler = Some(("pooler.dense", spec.pooler));
                let (name, bias) = ("classifier", Bias::Present);
                let (d_model, init) = (d, INIT);
                let spec = SequenceHeadSpec { name, bias, pooler, d_model, init, prediction };
                TaskHead::Tuned(Box::new(SequenceHead::new(builder, spec)?))
            }
        };
        let BatchShape { size, .. } = builder.batch();
        let p = builder.batch().tokens();
        let mut ids =
            |name, count| builder.tensor(name, [count, 1], DType::U32, Region::Activations);
        let (tokens, segments) = (ids("tokens", p)?, ids("segments", p)?);
        let lengths = ids("lengths", size)?;
        let names = ["qkv", "out"].map(str::to_owned);
        let mut activation = |name| builder.activation(name, d);
        let (delta, dx, dsum) = (activation("delta")?, activation("dx")?, activation("dsum")?);
        let (ddelta, dbranch) = (activation("ddelta")?, activation("dbranch")?);
        let attention = spec.attention(&names, Bias::Present);
        let attention = Attention::activations(builder, "d", &attention)?;
        let ffn = FfnActivations::new(builder, "d", spec.d_ff, spec.activation)?;
        let shared = Shared { delta, dx, dsum, ddelta, dbranch, attention, ffn };
        Ok(Self {
            embedding,
            segment,
            norm,
            blocks,
            head,
            tokens,
            segments,
            lengths,
            embedded,
            dropout,
            shared,
        })
    }

    /// The output of the last block.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor, Error> {
        let embedded = self.embedded.rows(pass);
        let [words, kinds] = [self.shared.dx, self.shared.delta].map(|buffer| pass.rows(buffer));
        self.embedding.forward(pass, pass.rows(self.tokens), words)?;
        self.segment.forward(pass, pass.rows(self.segments), kinds)?;
        self.norm.forward_residual(pass, words, kinds, embedded)?;
        pass.drop_in_place(embedded.y, self.dropout)?;
        let lengths = Some(self.lengths.first_rows(pass.batch.size));
        let mut x = embedded.y;
        for block in &self.blocks {
            x = block.forward(pass, Streams { x, memory: None, lengths }, self.shared)?;
        }
        Ok(x)
    }
}

impl Model for Bert {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result<(), Error> {
        let Batch { tokens, targets, lengths, segments, .. } = batch;
        let p = tokens.len();
        backend.upload_ids(self.tokens.first_rows(p), tokens)?;
        let first = vec![0; if segments.is_empty() { p } else { 0 }];
        let segments = if segments.is_empty() { &first } else { segments };
        backend.upload_ids(self.segments.first_rows(p), segments)?;
        backend.upload_ids(self.lengths.first_rows(lengths.len()), lengths)?;
        match &self.head {
            TaskHead::Masked(head) => head.upload(backend, targets),
            TaskHead::Tuned(head) => head.upload(backend, targets, lengths),
        }
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        let dx = pass.rows(self.shared.dx);
        match &self.head {
            TaskHead::Masked(head) => head.loss_and_gradient(pass, x, dx)?,
            TaskHead::Tuned(head) => head.loss_and_gradient(pass, x, dx)?,
        }
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
        self.segment.backward(pass, pass.rows(self.segments), dsum, Sharing::Alone)?;
        self.embedding.backward(pass, pass.rows(self.tokens), dsum, self.head.sharing())
    }

    fn evaluate(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        match &self.head {
            TaskHead::Masked(head) => head.loss(pass, x),
            TaskHead::Tuned(head) => head.evaluate(pass, x),
        }
    }

    fn loss(&self) -> Tensor {
        match &self.head {
            TaskHead::Masked(head) => head.head.buffers().loss,
            TaskHead::Tuned(head) => head.loss(),
        }
    }

    fn outputs(&self, pass: &mut Pass<'_>) -> Result<Vec<f32>, Error> {
        match &self.head {
            TaskHead::Masked(_) => Err(no_outputs()),
            TaskHead::Tuned(head) => head.outputs(pass),
        }
    }
}

/// The reader of the last block's output.
#[derive(Debug)]
enum TaskHead {
    /// Pre-training.
    Masked(Box<MaskedHead>),
    /// Fine-tuning.
    Tuned(Box<dyn PredictionHead>),
}

impl TaskHead {
    fn sharing(&self) -> Sharing {
        match self {
            Self::Masked(_) => Sharing::Tied,
            Self::Tuned(_) => Sharing::Alone,
        }
    }
}

/// The head: logits = norm(act(m W^T + b)) word^T + bias for the rows m of x that have a target.
#[derive(Debug)]
struct MaskedHead {
    transform: Linear24,
    activation: Activation,
    norm: Norm,
    head: Head,
    mask_probability: f32,
    rows: TargetRows,
    /// m, the output of the transform, and its activation in the norm.
    m: Tensor,
    z: Tensor,
    kept: NormActivations,
    /// Gradients, in turns.
    scratch: [Tensor; 2],
}

/// The activation of the head's transform: that of the feed-forward layers, as Hugging Face's
/// `hidden_act` is, but GELU where these have a gate.
fn transform_activation(of_layers: Activation) -> Activation {
    if of_layers.columns_in() == 1 { of_layers } else { Activation::GeluErf }
}

impl MaskedHead {
    fn new(
        builder: &mut Builder<'_>,
        spec: BertSpec,
        embedding: &Embedding,
    ) -> Result<Self, Error> {
        let BertSpec { d_model: d, mask_probability, .. } = spec;
        let of = |part: &str| format!("cls.predictions.{part}");
        let transform = LinearSpec {
            name: of("transform.dense"),
            shape: [d, d],
            init: INIT,
            bias: Bias::Present,
            sparsity: Sparsity::Dense,
        };
        let transform = Linear24::new(builder, transform)?;
        let norm = Norm::new(builder, &of("transform.LayerNorm"), d, Bias::Present, EPSILON)?;
        let n = most_targets(mask_probability, builder.batch().tokens());
        let head = Head::tied(builder, embedding, n)?.with_bias(builder, &of("bias"))?;
        let rows = TargetRows::new(builder, "masked rows", n)?;
        let mut activation =
            |name| builder.tensor(name, [n, d], DType::Activation, Region::Activations);
        let (m, z, h) = (activation("masked")?, activation("head z")?, activation("head h")?);
        let scratch = [activation("head dy")?, activation("head dh")?];
        let kept = NormActivations::new(builder, "head", h)?;
        let activation = transform_activation(spec.activation);
        Ok(Self { transform, activation, norm, head, mask_probability, rows, m, z, kept, scratch })
    }

    /// The rows for a batch of p tokens.
    fn most(&self, p: usize) -> usize {
        most_targets(self.mask_probability, p)
    }

    fn upload(&self, backend: &mut dyn Backend, targets: &[u32]) -> Result<(), Error> {
        let n = self.most(targets.len());
        self.rows.upload(backend, targets, n, self.head.buffers().targets)
    }

    /// The input of the decoder.
    fn forward(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Tensor, Error> {
        let n = self.most(x.shape[0]);
        let [m, z] = [self.m, self.z].map(|buffer| buffer.first_rows(n));
        let kept = self.kept.first_rows(n);
        self.rows.gather(pass, x, m)?;
        self.transform.forward_activation(pass, m, z, self.activation, kept.x)?;
        self.norm.forward(pass, kept)?;
        Ok(kept.y)
    }

    fn loss(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<(), Error> {
        let y = self.forward(pass, x)?;
        self.head.loss(pass, y)
    }

    fn loss_and_gradient(&self, pass: &mut Pass<'_>, x: Tensor, dx: Tensor) -> Result<(), Error> {
        let y = self.forward(pass, x)?;
        let n = y.shape[0];
        let [m, z] = [self.m, self.z].map(|buffer| buffer.first_rows(n));
        let [first, second] = self.scratch.map(|buffer| buffer.first_rows(n));
        self.head.loss_and_gradient(pass, y, first)?;
        let kept = self.kept.first_rows(n);
        self.norm.backward(pass, first, kept, second, Accumulate::Overwrite)?;
        pass.run(ActivationBackward { activation: self.activation, dh: second, z, dz: first })?;
        self.transform.backward(pass, m, first, second)?;
        self.rows.scatter(pass, second, dx)
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
    fn new(builder: &mut Builder<'_>, spec: BertSpec, layer: usize) -> Result<Self, Error> {
        let BertSpec { d_model, d_ff, activation, .. } = spec;
        let of = |part: &str| format!("encoder.layer.{layer}.{part}");
        let names = ["attention.self.qkv", "attention.output.dense"].map(of);
        let attention = Attention::new(builder, &spec.attention(&names, Bias::Present))?;
        let norm_1 =
            Norm::new(builder, &of("attention.output.LayerNorm"), d_model, Bias::Present, EPSILON)?;
        let (names, bias) = (["intermediate.dense", "output.dense"].map(of), Bias::Present);
        let init = [INIT; 2];
        let mlp = FfnSpec { names, d_model, d_ff, activation, bias, init };
        let mlp = Ffn::new(builder, mlp)?;
        let norm_2 = Norm::new(builder, &of("output.LayerNorm"), d_model, bias, EPSILON)?;
        let dropouts = [builder.dropout_site(), builder.dropout_site()];
        let mut kept_norm = |part: &str| {
            let x = builder.activation(&of(&format!("{part} x")), d_model)?;
            NormActivations::new(builder, &of(part), x)
        };
        let (kept_1, kept_2) = (kept_norm("norm_1")?, kept_norm("norm_2")?);
        let names = ["qkv", "out"].map(str::to_owned);
        let kept_attention = spec.attention(&names, Bias::Present);
        let kept = Kept {
            attention: Attention::activations(builder, &of("kept"), &kept_attention)?,
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
        let [dx, dsum, ddelta, dbranch] =
            [shared.dx, shared.dsum, shared.ddelta, shared.dbranch].map(|buffer| pass.rows(buffer));
        self.norm_2.backward(pass, dx, kept.norm_2, dsum, Accumulate::Overwrite)?;
        let dmlp = pass.before_dropout(dsum, ddelta, self.dropouts[1])?;
        let scratch = shared.ffn.rows(pass);
        self.mlp.backward(pass, kept.norm_1.y, kept.mlp, dmlp, scratch, dbranch)?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })?;

        self.norm_1.backward(pass, dx, kept.norm_1, dsum, Accumulate::Overwrite)?;
        let dout = pass.before_dropout(dsum, ddelta, self.dropouts[0])?;
        let scratch = shared.attention.rows(pass);
        let buffers = [kept.attention, scratch];
        self.attention.backward(pass, streams, buffers, dout, dbranch, None)?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })
    }
}
