//! GPT-2 (Radford et al. 2019): pre-LN blocks, learned positions, a head tied to the token
//! embedding.
//!
//! ```text
//! x = wte[tokens] + wpe[positions]
//! per block:  x = x + attention(ln_1(x));  x = x + mlp(ln_2(x))
//! logits = ln_f(x) wte^T
//! ```
//!
//! The residual stream stays in the norms: each adds the output of the half block before it.
//! Parameter names are Hugging Face's; linear weights are `[out, in]`.

use sparse24_core::{
    op::{Accumulate, Activation, AttentionMask},
    philox::Site,
};

use super::{ActivationCheckpointing, Extents, Model, Sparsify};
use crate::{
    Error,
    backend::{Backend, DType, Region, Tensor, op::Fill},
    nn::{
        Attention, AttentionActivations, AttentionSpec, Bias, Builder, Embedding, Ffn,
        FfnActivations, FfnSpec, Head, Init, Norm, NormActivations, Pass, Prediction,
        PredictionHead, SequenceHeadSpec, Sparsity,
    },
    objective::Batch,
};

/// The size of a GPT-2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpt2Spec {
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
    /// Biases of linear layers and norms.
    pub bias: Bias,
    /// Which linear layers masks may prune.
    pub sparsify: Sparsify,
    /// The prediction that it is fine-tuned for; the next token if absent.
    pub prediction: Option<Prediction>,
}

/// The parameter whose rows are the vocabulary.
pub const TOKEN_TABLE: &str = "wte.weight";

/// Standard deviation of the initial weights; projections into the residual stream divide it by
/// sqrt(2 layers).
const DEVIATION: f32 = 0.02;

/// Added to the variances of norms.
const EPSILON: f32 = 1e-5;

/// The model with its activations.
#[derive(Debug)]
pub struct Gpt2 {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    head: Box<dyn PredictionHead>,
    tokens: Tensor,
    /// Output of the embedding.
    embedded: Tensor,
    /// Output of a half block, until the next norm adds it.
    delta: Tensor,
    last: NormActivations,
    dropout: Site,
    gradients: Gradients,
}

/// Gradients of activations; all blocks share them.
#[derive(Debug, Clone, Copy)]
struct Gradients {
    /// The residual stream's.
    residual: Tensor,
    /// A norm output's.
    y: Tensor,
    /// `delta`'s, where dropout makes it differ from the residual stream's.
    delta: Tensor,
    attention: AttentionActivations,
    ffn: FfnActivations,
}

impl Gpt2 {
    /// Allocates parameters and activations.
    pub fn new(
        builder: &mut Builder<'_>,
        spec: Gpt2Spec,
        checkpointing: ActivationCheckpointing,
    ) -> Result<Self, Error> {
        let d = spec.d_model;
        let tables = ((TOKEN_TABLE, spec.vocabulary), ("wpe.weight", spec.sequence_length));
        let embedding =
            Embedding::new(builder, tables.0, Some(tables.1), d, Init::Normal(DEVIATION))?;
        let dropout = builder.dropout_site();
        let embedded = builder.activation("embedded", d)?;
        let delta = builder.activation("delta", d)?;
        let shared = match checkpointing {
            ActivationCheckpointing::None => None,
            ActivationCheckpointing::Blocks => {
                let x = builder.activation("block.x", d)?;
                Some(Kept::new(builder, "block", spec, x)?)
            }
        };
        let mut blocks = Vec::new();
        for layer in 0..spec.layers {
            let x = match layer {
                0 => embedded,
                _ => builder.activation(&format!("h.{layer}.x"), d)?,
            };
            blocks.push(Block::new(builder, spec, layer, x, shared)?);
        }
        let norm = Norm::new(builder, "ln_f", d, spec.bias, EPSILON)?;
        let x = builder.activation("ln_f x", d)?;
        let last = NormActivations::new(builder, "ln_f", x)?;
        let rows = builder.batch().tokens();
        let head: Box<dyn PredictionHead> = match spec.prediction {
            None => Box::new(Head::tied(builder, &embedding, rows)?),
            Some(prediction) => {
                let (name, bias, pooler) = ("score", Bias::Absent, None);
                let (d_model, init) = (d, Init::Normal(DEVIATION));
                let spec = SequenceHeadSpec { name, bias, pooler, d_model, init, prediction };
                spec.build(builder, last.y)?
            }
        };
        let tokens = [builder.batch().tokens(), 1];
        let tokens = builder.tensor("tokens", tokens, DType::U32, Region::Activations)?;
        let [residual, y, ddelta] = ["dresidual", "dy", "ddelta"].map(|name| (name, d));
        let mut activation = |(name, columns)| builder.activation(name, columns);
        let (residual, y, ddelta) = (activation(residual)?, activation(y)?, activation(ddelta)?);
        let (qkv, o) = (activation(("dqkv", 3 * d))?, activation(("do", d))?);
        let z = activation(("dz", spec.d_ff * spec.activation.columns_in()))?;
        let h = [builder.batch().tokens(), spec.d_ff];
        let h = builder.tensor("dh", h, DType::Activation, Region::Scratch)?;
        let gradients = Gradients {
            residual,
            y,
            delta: ddelta,
            attention: AttentionActivations { q: qkv, kv: None, o, lse: o },
            ffn: FfnActivations { z, h },
        };
        let model = Self {
            embedding,
            blocks,
            norm,
            head,
            tokens,
            embedded,
            delta,
            last,
            dropout,
            gradients,
        };
        Ok(model)
    }

    /// The output of the final norm.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor, Error> {
        let [tokens, embedded, delta] =
            [self.tokens, self.embedded, self.delta].map(|buffer| pass.rows(buffer));
        self.embedding.forward(pass, tokens, embedded)?;
        pass.drop_in_place(embedded, self.dropout)?;
        let mut stream = None;
        for block in &self.blocks {
            stream = Some(block.forward(pass, stream, delta)?);
        }
        let last = self.last.rows(pass);
        self.norm.forward_residual(pass, stream.unwrap_or(embedded), delta, last)?;
        Ok(last.y)
    }
}

impl Model for Gpt2 {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result<(), Error> {
        let Batch { tokens, targets, lengths, .. } = batch;
        backend.upload_ids(self.tokens.first_rows(tokens.len()), tokens)?;
        self.head.upload(backend, targets, lengths)
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        let [residual, dy] =
            [self.gradients.residual, self.gradients.y].map(|buffer| pass.rows(buffer));
        self.head.loss_and_gradient(pass, x, dy)?;
        pass.run(Fill { to: residual, value: 0.0 })?;
        self.norm.backward(pass, dy, self.last.rows(pass), residual, Accumulate::Add)?;
        for block in self.blocks.iter().rev() {
            block.backward(pass, &self.gradients, pass.rows(self.delta))?;
        }
        pass.drop_in_place(residual, self.dropout)?;
        self.embedding.backward(pass, pass.rows(self.tokens), residual, self.head.sharing())
    }

    fn evaluate(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        self.head.evaluate(pass, x)
    }

    fn loss(&self) -> Tensor {
        self.head.loss()
    }

    fn outputs(&self, pass: &mut Pass<'_>) -> Result<Vec<f32>, Error> {
        self.head.outputs(pass)
    }

    fn next_logits(&self, pass: &mut Pass<'_>, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        pass.backend.upload_ids(self.tokens.first_rows(tokens.len()), tokens)?;
        let x = self.forward(pass)?;
        self.head.next_logits(pass, x.rows(tokens.len() - 1..tokens.len()))
    }
}

/// x = x + attention(ln_1(x)); x = x + mlp(ln_2(x)).
#[derive(Debug)]
struct Block {
    ln_1: Norm,
    attention: Attention,
    ln_2: Norm,
    mlp: Ffn,
    /// Dropout of the outputs of attention and mlp.
    dropouts: [Site; 2],
    kept: Kept,
    /// Whether later blocks overwrite what it kept, so that the backward pass computes it again.
    recomputed: bool,
}

/// Activations that a block keeps for its backward pass.
#[derive(Debug, Clone, Copy)]
struct Kept {
    ln_1: NormActivations,
    attention: AttentionActivations,
    ln_2: NormActivations,
    mlp: FfnActivations,
}

impl Kept {
    fn new(
        builder: &mut Builder<'_>,
        name: &str,
        spec: Gpt2Spec,
        x: Tensor,
    ) -> Result<Self, Error> {
        let names = ["c_attn", "c_proj"].map(str::to_owned);
        let ln_1 = NormActivations::new(builder, &format!("{name}.ln_1"), x)?;
        let attention = Attention::activations(builder, name, &spec.attention(&names))?;
        let middle = builder.activation(&format!("{name}.ln_2 x"), spec.d_model)?;
        let ln_2 = NormActivations::new(builder, &format!("{name}.ln_2"), middle)?;
        let mlp = FfnActivations::new(builder, name, spec.d_ff, spec.activation)?;
        Ok(Self { ln_1, attention, ln_2, mlp })
    }

    fn rows(self, pass: &Pass<'_>) -> Self {
        Self {
            ln_1: self.ln_1.rows(pass),
            attention: self.attention.rows(pass),
            ln_2: self.ln_2.rows(pass),
            mlp: self.mlp.rows(pass),
        }
    }
}

impl Gpt2Spec {
    pub(super) fn extents(&self) -> Extents {
        let &Self { layers, heads, d_model, d_ff, sequence_length: longest, .. } = self;
        let &Self { activation, bias, .. } = self;
        Extents { layers, heads, d_model, d_ff, longest, activation, bias }
    }

    fn init(&self) -> [Init; 2] {
        [DEVIATION, DEVIATION / (2.0 * self.layers as f32).sqrt()].map(Init::Normal)
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
            mask: AttentionMask::Causal,
            bias: self.bias,
            init: self.init(),
            sparsity,
        }
    }
}

impl Block {
    fn new(
        builder: &mut Builder<'_>,
        spec: Gpt2Spec,
        layer: usize,
        x: Tensor,
        shared: Option<Kept>,
    ) -> Result<Self, Error> {
        let Gpt2Spec { d_model, d_ff, activation, bias, .. } = spec;
        let of = |part: &str| format!("h.{layer}.{part}");
        let ln_1 = Norm::new(builder, &of("ln_1"), d_model, bias, EPSILON)?;
        let names = ["attn.c_attn", "attn.c_proj"].map(of);
        let attention = Attention::new(builder, &spec.attention(&names))?;
        let ln_2 = Norm::new(builder, &of("ln_2"), d_model, bias, EPSILON)?;
        let names = ["mlp.c_fc", "mlp.c_proj"].map(of);
        let init = spec.init();
        let mlp = FfnSpec { names, d_model, d_ff, activation, bias, init };
        let mlp = Ffn::new(builder, mlp)?;
        let dropouts = [builder.dropout_site(), builder.dropout_site()];
        let kept = match shared {
            None => Kept::new(builder, &format!("h.{layer}"), spec, x)?,
            Some(shared) => Kept { ln_1: NormActivations { x, ..shared.ln_1 }, ..shared },
        };
        // The last block's activations are still there when the backward pass starts.
        let recomputed = shared.is_some() && layer + 1 < spec.layers;
        Ok(Self { ln_1, attention, ln_2, mlp, dropouts, kept, recomputed })
    }

    /// Leaves the block's output in `delta`, to be added to the stream that it returns. `stream` is
    /// the stream before the previous block's output was added; none for the first block.
    fn forward(
        &self,
        pass: &mut Pass<'_>,
        stream: Option<Tensor>,
        delta: Tensor,
    ) -> Result<Tensor, Error> {
        let kept = self.kept.rows(pass);
        self.forward_kept(pass, stream, kept, delta)?;
        self.mlp.forward_down(pass, kept.mlp, delta)?;
        pass.drop_in_place(delta, self.dropouts[1])?;
        Ok(kept.ln_2.x)
    }

    /// Everything that the backward pass reads.
    fn forward_kept(
        &self,
        pass: &mut Pass<'_>,
        stream: Option<Tensor>,
        kept: Kept,
        delta: Tensor,
    ) -> Result<(), Error> {
        match stream {
            None => self.ln_1.forward(pass, kept.ln_1)?,
            Some(stream) => self.ln_1.forward_residual(pass, stream, delta, kept.ln_1)?,
        }
        self.attention.forward(pass, kept.ln_1.y.into(), kept.attention, delta)?;
        pass.drop_in_place(delta, self.dropouts[0])?;
        self.ln_2.forward_residual(pass, kept.ln_1.x, delta, kept.ln_2)?;
        self.mlp.forward_up(pass, kept.ln_2.y, kept.mlp)
    }

    /// The gradient of the residual stream: in, of the block's output; out, of its input.
    fn backward(
        &self,
        pass: &mut Pass<'_>,
        buffers: &Gradients,
        delta: Tensor,
    ) -> Result<(), Error> {
        let kept = self.kept.rows(pass);
        if self.recomputed {
            self.forward_kept(pass, None, kept, delta)?;
        }
        let [dresidual, dy, ddelta] =
            [buffers.residual, buffers.y, buffers.delta].map(|buffer| pass.rows(buffer));
        let dmlp = pass.before_dropout(dresidual, ddelta, self.dropouts[1])?;
        let scratch = buffers.ffn.rows(pass);
        self.mlp.backward(pass, kept.ln_2.y, kept.mlp, dmlp, scratch, dy)?;
        self.ln_2.backward(pass, dy, kept.ln_2, dresidual, Accumulate::Add)?;
        let dattention = pass.before_dropout(dresidual, ddelta, self.dropouts[0])?;
        let AttentionActivations { q, o, .. } = buffers.attention;
        let scratch = AttentionActivations { q: pass.rows(q), o: pass.rows(o), ..kept.attention };
        let x = kept.ln_1.y.into();
        self.attention.backward(pass, x, [kept.attention, scratch], dattention, dy, None)?;
        self.ln_1.backward(pass, dy, kept.ln_1, dresidual, Accumulate::Add)
    }
}
