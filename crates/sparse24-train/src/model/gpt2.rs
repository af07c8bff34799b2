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
    Result,
    backend::{Backend, DType, Region, Tensor, op::Fill},
    nn::{
        Bias, BlockInputs, Builder, Embedding, Head, Init, Norm, NormActivations, Pass,
        PreNormActivations, PreNormBlock, PreNormGradients, PreNormSpec, Prediction,
        PredictionHead, SequenceHeadSpec,
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

/// Standard deviation of initial weights; residual projections divide it by sqrt(2 layers).
const DEVIATION: f32 = 0.02;

/// Added to the variances of norms.
const EPSILON: f32 = 1e-5;

/// The model with its activations.
#[derive(Debug)]
pub struct Gpt2 {
    embedding: Embedding,
    blocks: Vec<PreNormBlock>,
    norm: Norm,
    head: Box<dyn PredictionHead>,
    tokens: Tensor,
    /// Output of the embedding.
    embedded: Tensor,
    /// Output of a half block, until the next norm adds it.
    delta: Tensor,
    last: NormActivations,
    dropout: Site,
    gradients: PreNormGradients,
}

impl Gpt2 {
    /// Allocates parameters and activations.
    pub fn new(
        builder: &mut Builder<'_>,
        spec: Gpt2Spec,
        checkpointing: ActivationCheckpointing,
    ) -> Result<Self> {
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
                Some(PreNormActivations::new(builder, "block", &spec.block(), x)?)
            }
        };
        let mut blocks = Vec::new();
        for layer in 0..spec.layers {
            let x = match layer {
                0 => embedded,
                _ => builder.activation(&format!("h.{layer}.x"), d)?,
            };
            let block = PreNormBlock::new(builder, &spec.block(), layer, x, shared)?;
            // The last block's activations are still there when the backward pass starts.
            let is_recomputed = shared.is_some() && layer + 1 < spec.layers;
            blocks.push(if is_recomputed { block.recomputed() } else { block });
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
        let gradients = PreNormGradients::new(builder, &spec.block())?;
        Ok(Self {
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
        })
    }
}

impl Model for Gpt2 {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result {
        let Batch { tokens, targets, lengths, .. } = batch;
        backend.upload_ids(self.tokens.first_rows(tokens.len()), tokens)?;
        self.head.upload(backend, targets, lengths)
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result {
        let x = self.forward(pass)?;
        let [residual, dy] =
            [self.gradients.residual, self.gradients.y].map(|buffer| pass.rows(buffer));
        self.head.loss_and_gradient(pass, x, dy)?;
        pass.run(Fill { to: residual, value: 0.0 })?;
        self.norm.backward(pass, dy, self.last.rows(pass), residual, Accumulate::Add)?;
        for block in self.blocks.iter().rev() {
            let delta = pass.rows(self.delta);
            block.backward(pass, &self.gradients, delta, BlockInputs::default())?;
        }
        pass.drop_in_place(residual, self.dropout)?;
        self.embedding.backward(pass, pass.rows(self.tokens), residual, self.head.sharing())
    }

    /// The output of the final norm.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        let [tokens, embedded, delta] =
            [self.tokens, self.embedded, self.delta].map(|buffer| pass.rows(buffer));
        self.embedding.forward(pass, tokens, embedded)?;
        pass.drop_in_place(embedded, self.dropout)?;
        let mut stream = None;
        for block in &self.blocks {
            stream = Some(block.forward(pass, stream, delta, BlockInputs::default())?);
        }
        let last = self.last.rows(pass);
        self.norm.forward_residual(pass, stream.unwrap_or(embedded), delta, last)?;
        Ok(last.y)
    }

    fn head(&self) -> &dyn PredictionHead {
        &*self.head
    }

    fn next_logits(&self, pass: &mut Pass<'_>, tokens: &[u32]) -> Result<Tensor> {
        pass.backend.upload_ids(self.tokens.first_rows(tokens.len()), tokens)?;
        let x = self.forward(pass)?;
        self.head.next_logits(pass, x.rows(tokens.len() - 1..tokens.len()))
    }
}

impl Gpt2Spec {
    pub(super) fn extents(&self) -> Extents {
        let &Self { layers, heads, d_model, d_ff, sequence_length: longest, .. } = self;
        let &Self { activation, bias, .. } = self;
        Extents { layers, heads, d_model, d_ff, longest, activation, bias }
    }

    fn block(&self) -> PreNormSpec {
        let &Self { d_model, heads, d_ff, activation, bias, .. } = self;
        PreNormSpec {
            prefix: "h",
            names: ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"],
            d_model,
            heads,
            d_ff,
            activation,
            mask: AttentionMask::Causal,
            biases: [bias; 2],
            epsilon: EPSILON,
            init: [DEVIATION, DEVIATION / (2.0 * self.layers as f32).sqrt()].map(Init::Normal),
            sparsity: self.sparsify.attention(),
        }
    }
}
