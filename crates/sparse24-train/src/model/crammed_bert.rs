//! The crammed BERT (Geiping and Goldstein 2022, arXiv 2212.14034), which the authors of the paper
//! train: pre-LN blocks, sinusoidal positions with a learned factor, padding, biases in norms
//! alone, and a head that is tied to the token embedding and reads the rows of masked tokens.
//!
//! ```text
//! x = norm(word[tokens] + s sinusoids[positions])
//! per block:  x = x + attention(norm_1(x));  x = x + ffn(norm_2(x))
//! m = the rows of final_norm(x) that have a target
//! logits = (m W^T) word^T
//! ```
//!
//! A fine-tuned model has a [`SequenceHead`](crate::nn::SequenceHead) on the first token instead,
//! with a pooler, or a [`SpanHead`](crate::nn::SpanHead) on all. The residual stream stays in the
//! norms: each adds the output of the half block before it.

use sparse24_core::{
    op::{Accumulate, AttentionMask},
    philox::Site,
};

use super::{
    BertSpec, Model,
    bert::{EPSILON, INIT},
    masked_head::MaskedHead,
};
use crate::{
    Result,
    backend::{Backend, DType, Region, Tensor},
    nn::{
        Bias, BlockInputs, Builder, Embedding, Norm, NormActivations, Pass, PreNormBlock,
        PreNormGradients, PreNormSpec, PredictionHead,
    },
    objective::Batch,
};

/// The parameter whose rows are the vocabulary.
pub const TOKEN_TABLE: &str = "embedding.word_embedding.weight";

/// The model with its activations.
#[derive(Debug)]
pub struct CrammedBert {
    embedding: Embedding,
    norm: Norm,
    blocks: Vec<PreNormBlock>,
    final_norm: Norm,
    head: Box<dyn PredictionHead>,
    tokens: Tensor,
    lengths: Tensor,
    embedded: NormActivations,
    /// Output of a half block, until the next norm adds it.
    delta: Tensor,
    last: NormActivations,
    dropout: Site,
    gradients: PreNormGradients,
}

impl CrammedBert {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Sparsifiable shapes must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: BertSpec) -> Result<Self> {
        let BertSpec { d_model: d, vocabulary, sequence_length, .. } = spec;
        let tokens = (TOKEN_TABLE, vocabulary);
        let positions = ("embedding.pos_embedding.scale_factor", sequence_length);
        let embedding = Embedding::with_sinusoids(builder, tokens, positions, d, INIT)?;
        let norm = Norm::new(builder, "embedding.norm", d, Bias::Present, EPSILON)?;
        let dropout = builder.dropout_site();
        let x = builder.activation("embedded", d)?;
        let embedded = NormActivations::new(builder, "embedded", x)?;
        let block = PreNormSpec {
            prefix: "layers",
            names: [
                "norm1",
                "attn.self_attention.query_key_value",
                "attn.dense",
                "norm2",
                "ffn.dense_in",
                "ffn.dense_out",
            ],
            d_model: d,
            heads: spec.heads,
            d_ff: spec.d_ff,
            activation: spec.activation,
            mask: AttentionMask::Full,
            biases: [Bias::Present, Bias::Absent],
            epsilon: EPSILON,
            init: [INIT; 2],
            sparsity: spec.sparsify.attention(),
        };
        let mut blocks = Vec::new();
        for layer in 0..spec.layers {
            let x = match layer {
                0 => embedded.y,
                _ => builder.activation(&format!("layers.{layer}.x"), d)?,
            };
            blocks.push(PreNormBlock::new(builder, &block, layer, x, None)?);
        }
        let final_norm = Norm::new(builder, "final_norm", d, Bias::Present, EPSILON)?;
        let x = builder.activation("final_norm x", d)?;
        let last = NormActivations::new(builder, "final_norm", x)?;
        let head = match spec.prediction {
            None => {
                let linear = spec.before_decoder("prediction_head", Bias::Absent);
                let p = spec.mask_probability;
                Box::new(MaskedHead::new(builder, &embedding, linear, p)?)
            }
            Some(prediction) => spec.tuned_head(builder, prediction, last.y)?,
        };
        let (p, size) = (builder.batch().tokens(), builder.batch().size);
        let mut ids =
            |name, count| builder.tensor(name, [count, 1], DType::U32, Region::Activations);
        let (tokens, lengths) = (ids("tokens", p)?, ids("lengths", size)?);
        let delta = builder.activation("delta", d)?;
        let gradients = PreNormGradients::new(builder, &block)?;
        Ok(Self {
            embedding,
            norm,
            blocks,
            final_norm,
            head,
            tokens,
            lengths,
            embedded,
            delta,
            last,
            dropout,
            gradients,
        })
    }

    fn inputs(&self, pass: &Pass<'_>) -> BlockInputs {
        let lengths = Some(self.lengths.first_rows(pass.batch.size));
        BlockInputs { lengths, ..BlockInputs::default() }
    }
}

impl Model for CrammedBert {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result {
        let Batch { tokens, targets, lengths, .. } = batch;
        backend.upload_ids(self.tokens.first_rows(tokens.len()), tokens)?;
        backend.upload_ids(self.lengths.first_rows(lengths.len()), lengths)?;
        self.head.upload(backend, targets, lengths)
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result {
        let x = self.forward(pass)?;
        let [residual, dy] =
            [self.gradients.residual, self.gradients.y].map(|buffer| pass.rows(buffer));
        self.head.loss_and_gradient(pass, x, dy)?;
        let (last, delta) = (self.last.rows(pass), pass.rows(self.delta));
        self.final_norm.backward(pass, dy, last, residual, Accumulate::Overwrite)?;
        for block in self.blocks.iter().rev() {
            block.backward(pass, &self.gradients, delta, self.inputs(pass))?;
        }
        pass.drop_in_place(residual, self.dropout)?;
        let embedded = self.embedded.rows(pass);
        self.norm.backward(pass, residual, embedded, dy, Accumulate::Overwrite)?;
        self.embedding.backward(pass, pass.rows(self.tokens), dy, self.head.sharing())
    }

    /// The output of the final norm.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        let (embedded, last) = (self.embedded.rows(pass), self.last.rows(pass));
        self.embedding.forward(pass, pass.rows(self.tokens), embedded.x)?;
        self.norm.forward(pass, embedded)?;
        pass.drop_in_place(embedded.y, self.dropout)?;
        let (inputs, delta) = (self.inputs(pass), pass.rows(self.delta));
        let mut stream = None;
        for block in &self.blocks {
            stream = Some(block.forward(pass, stream, delta, inputs)?);
        }
        self.final_norm.forward_residual(pass, stream.unwrap_or(embedded.y), delta, last)?;
        Ok(last.y)
    }

    fn head(&self) -> &dyn PredictionHead {
        &*self.head
    }
}
