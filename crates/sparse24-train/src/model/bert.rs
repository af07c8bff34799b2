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
//! A fine-tuned BERT has a [`SequenceHead`](crate::nn::SequenceHead) on the first token instead,
//! with a pooler, or a [`SpanHead`](crate::nn::SpanHead) on all.
//!
//! Parameter names are Hugging Face's without `bert.`, but queries, keys and values are one
//! projection.

use sparse24_core::{
    op::{Accumulate, Activation, AttentionMask},
    philox::Site,
};

use super::{Extents, Model, Sparsify, add_norm::AddNorm, masked_head::MaskedHead};
use crate::{
    Result,
    backend::{Backend, DType, Region, Tensor, op::Add},
    nn::{
        Attention, AttentionActivations, AttentionOperands, AttentionSpec, Bias, Builder,
        Embedding, Ffn, FfnActivations, FfnSpec, Init, LinearSpec, Norm, NormActivations, Pass,
        Prediction, PredictionHead, ProbabilityDropout, SequenceHeadSpec, Sharing, Sparsity,
        Streams,
    },
    objective::Batch,
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
    /// [`most_targets`](crate::objective::most_targets) of a batch.
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

    fn attention<'a>(&self, names: &'a [String]) -> AttentionSpec<'a> {
        AttentionSpec {
            names,
            d_model: self.d_model,
            heads: self.heads,
            mask: AttentionMask::Full,
            bias: Bias::Present,
            init: [INIT; 2],
            sparsity: self.sparsify.attention(),
            dropout: ProbabilityDropout::Present,
        }
    }

    /// The layer before the decoder of the head of masked tokens.
    pub(super) fn before_decoder(&self, name: &str, bias: Bias) -> LinearSpec {
        let (name, shape) = (name.to_owned(), [self.d_model; 2]);
        LinearSpec { name, shape, init: INIT, bias, sparsity: Sparsity::Dense }
    }

    /// The head of a fine-tuned model, which reads x.
    pub(super) fn tuned_head(
        &self,
        builder: &mut Builder<'_>,
        prediction: Prediction,
        x: Tensor,
    ) -> Result<Box<dyn PredictionHead>> {
        let spec = SequenceHeadSpec {
            name: "classifier",
            bias: Bias::Present,
            pooler: Some(("pooler.dense", self.pooler)),
            d_model: self.d_model,
            init: INIT,
            prediction,
        };
        spec.build(builder, x)
    }
}

/// The activation of the head's transform: that of the feed-forward layers, as Hugging Face's
/// `hidden_act` is, but GELU where these have a gate.
fn transform_activation(of_layers: Activation) -> Activation {
    if of_layers.columns_in() == 1 { of_layers } else { Activation::GeluErf }
}

/// The model with its activations.
#[derive(Debug)]
pub struct Bert {
    embedding: Embedding,
    segment: Embedding,
    norm: Norm,
    blocks: Vec<Block>,
    head: Box<dyn PredictionHead>,
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
    attention: AttentionOperands,
    ffn: FfnActivations,
}

impl Bert {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Sparsifiable shapes must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: BertSpec) -> Result<Self> {
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
            None => {
                let of = |part: &str| format!("cls.predictions.{part}");
                let linear = spec.before_decoder(&of("transform.dense"), Bias::Present);
                let activation = transform_activation(spec.activation);
                let norm = of("transform.LayerNorm");
                let head = MaskedHead::new(builder, &embedding, linear, spec.mask_probability)?
                    .with_norm(builder, activation, (&norm, EPSILON))?
                    .with_bias(builder, &of("bias"))?;
                Box::new(head)
            }
            Some(prediction) => {
                let x = blocks.last().map_or(embedded.y, |block| block.after_mlp.output());
                spec.tuned_head(builder, prediction, x)?
            }
        };
        let (p, size) = (builder.batch().tokens(), builder.batch().size);
        let mut ids =
            |name, count| builder.tensor(name, [count, 1], DType::U32, Region::Activations);
        let (tokens, segments) = (ids("tokens", p)?, ids("segments", p)?);
        let lengths = ids("lengths", size)?;
        let names = ["qkv", "out"].map(str::to_owned);
        let mut activation = |name| builder.activation(name, d);
        let (delta, dx, dsum) = (activation("delta")?, activation("dx")?, activation("dsum")?);
        let (ddelta, dbranch) = (activation("ddelta")?, activation("dbranch")?);
        let attention = spec.attention(&names);
        let attention = AttentionOperands::new(builder, "d", &attention)?;
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
}

impl Model for Bert {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result {
        let Batch { tokens, targets, lengths, segments, .. } = batch;
        let p = tokens.len();
        backend.upload_ids(self.tokens.first_rows(p), tokens)?;
        let first = vec![0; if segments.is_empty() { p } else { 0 }];
        let segments = if segments.is_empty() { &first } else { segments };
        backend.upload_ids(self.segments.first_rows(p), segments)?;
        backend.upload_ids(self.lengths.first_rows(lengths.len()), lengths)?;
        self.head.upload(backend, targets, lengths)
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result {
        let x = self.forward(pass)?;
        let dx = pass.rows(self.shared.dx);
        self.head.loss_and_gradient(pass, x, dx)?;
        let lengths = Some(self.lengths.first_rows(pass.batch.size));
        let embedded = self.embedded.rows(pass);
        for (layer, block) in self.blocks.iter().enumerate().rev() {
            let x = match layer.checked_sub(1) {
                Some(before) => pass.rows(self.blocks[before].after_mlp.output()),
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

    /// The output of the last block.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
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

    fn head(&self) -> &dyn PredictionHead {
        &*self.head
    }
}

/// x = norm(x + attention(x)); x = norm(x + mlp(x)).
#[derive(Debug)]
struct Block {
    attention: Attention,
    kept_attention: AttentionActivations,
    after_attention: AddNorm,
    mlp: Ffn,
    kept_mlp: FfnActivations,
    after_mlp: AddNorm,
}

impl Block {
    fn new(builder: &mut Builder<'_>, spec: BertSpec, layer: usize) -> Result<Self> {
        let BertSpec { d_model, d_ff, activation, .. } = spec;
        let of = |part: &str| format!("encoder.layer.{layer}.{part}");
        let names = ["attention.self.qkv", "attention.output.dense"].map(of);
        let attention = spec.attention(&names);
        let kept_attention = AttentionActivations::new(builder, &of("kept"), &attention)?;
        let attention = Attention::new(builder, &attention)?;
        let norm = of("attention.output.LayerNorm");
        let after_attention = AddNorm::new(builder, &norm, d_model, EPSILON)?;
        let (names, bias) = (["intermediate.dense", "output.dense"].map(of), Bias::Present);
        let init = [INIT; 2];
        let mlp = FfnSpec { names, d_model, d_ff, activation, bias, init };
        let mlp = Ffn::new(builder, mlp)?;
        let kept_mlp = FfnActivations::new(builder, &of("mlp"), d_ff, activation)?;
        let after_mlp = AddNorm::new(builder, &of("output.LayerNorm"), d_model, EPSILON)?;
        Ok(Self { attention, kept_attention, after_attention, mlp, kept_mlp, after_mlp })
    }

    fn forward(&self, pass: &mut Pass<'_>, streams: Streams, shared: Shared) -> Result<Tensor> {
        let (kept_mlp, delta) = (self.kept_mlp.rows(pass), pass.rows(shared.delta));
        self.attention.forward(pass, streams, self.kept_attention.rows(pass), delta)?;
        let x = self.after_attention.forward(pass, streams.x, delta)?;
        self.mlp.forward_up(pass, x, kept_mlp)?;
        self.mlp.forward_down(pass, kept_mlp, delta)?;
        self.after_mlp.forward(pass, x, delta)
    }

    /// `shared.dx`: in, the gradient of the block's output; out, of its input.
    fn backward(&self, pass: &mut Pass<'_>, streams: Streams, shared: Shared) -> Result {
        let [dx, dsum, ddelta, dbranch] =
            [shared.dx, shared.dsum, shared.ddelta, shared.dbranch].map(|buffer| pass.rows(buffer));
        let dmlp = self.after_mlp.backward(pass, dx, dsum, ddelta)?;
        let (x, kept) = (pass.rows(self.after_attention.output()), self.kept_mlp.rows(pass));
        self.mlp.backward(pass, x, kept, dmlp, shared.ffn.rows(pass), dbranch)?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })?;

        let dout = self.after_attention.backward(pass, dx, dsum, ddelta)?;
        let buffers = (self.kept_attention.rows(pass), shared.attention.rows(pass));
        self.attention.backward(pass, streams, buffers, dout, dbranch, None)?;
        pass.run(Add { x: dsum, delta: dbranch, out: dx })
    }
}
