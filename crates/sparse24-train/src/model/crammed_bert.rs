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

use sparse24_core::{op::Accumulate, philox::Site};

use super::{
    BertSpec, Model,
    bert::{EPSILON, INIT},
    masked_head::MaskedHead,
};
use crate::{
    Error,
    backend::{Backend, DType, Region, Tensor},
    nn::{
        Attention, AttentionActivations, BatchShape, Bias, Builder, Embedding, Ffn, FfnActivations,
        FfnSpec, Norm, NormActivations, Pass, PredictionHead, Streams,
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
    blocks: Vec<Block>,
    final_norm: Norm,
    head: Box<dyn PredictionHead>,
    tokens: Tensor,
    lengths: Tensor,
    embedded: NormActivations,
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

impl CrammedBert {
    /// Allocates parameters and activations.
    ///
    /// # Errors
    /// Sparsifiable shapes must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: BertSpec) -> Result<Self, Error> {
        let BertSpec { d_model: d, vocabulary, sequence_length, .. } = spec;
        let tokens = (TOKEN_TABLE, vocabulary);
        let positions = ("embedding.pos_embedding.scale_factor", sequence_length);
        let embedding = Embedding::with_sinusoids(builder, tokens, positions, d, INIT)?;
        let norm = Norm::new(builder, "embedding.norm", d, Bias::Present, EPSILON)?;
        let dropout = builder.dropout_site();
        let x = builder.activation("embedded", d)?;
        let embedded = NormActivations::new(builder, "embedded", x)?;
        let mut blocks = Vec::new();
        for layer in 0..spec.layers {
            let x = match layer {
                0 => embedded.y,
                _ => builder.activation(&format!("layers.{layer}.x"), d)?,
            };
            blocks.push(Block::new(builder, spec, layer, x)?);
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
        let BatchShape { size, .. } = builder.batch();
        let p = builder.batch().tokens();
        let mut ids =
            |name, count| builder.tensor(name, [count, 1], DType::U32, Region::Activations);
        let (tokens, lengths) = (ids("tokens", p)?, ids("lengths", size)?);
        let delta = builder.activation("delta", d)?;
        let names = ["qkv", "out"].map(str::to_owned);
        let gradients = Gradients {
            residual: builder.activation("dresidual", d)?,
            y: builder.activation("dy", d)?,
            delta: builder.activation("ddelta", d)?,
            attention: Attention::activations(builder, "d", &spec.attention(&names, Bias::Absent))?,
            ffn: FfnActivations::new(builder, "d", spec.d_ff, spec.activation)?,
        };
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

    /// The output of the final norm.
    fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor, Error> {
        let (embedded, last) = (self.embedded.rows(pass), self.last.rows(pass));
        self.embedding.forward(pass, pass.rows(self.tokens), embedded.x)?;
        self.norm.forward(pass, embedded)?;
        pass.drop_in_place(embedded.y, self.dropout)?;
        let (lengths, delta) = (self.lengths(pass), pass.rows(self.delta));
        let mut stream = None;
        for block in &self.blocks {
            stream = Some(block.forward(pass, stream, lengths, delta)?);
        }
        self.final_norm.forward_residual(pass, stream.unwrap_or(embedded.y), delta, last)?;
        Ok(last.y)
    }

    fn lengths(&self, pass: &Pass<'_>) -> Tensor {
        self.lengths.first_rows(pass.batch.size)
    }
}

impl Model for CrammedBert {
    fn upload(&self, backend: &mut dyn Backend, batch: &Batch) -> Result<(), Error> {
        let Batch { tokens, targets, lengths, .. } = batch;
        backend.upload_ids(self.tokens.first_rows(tokens.len()), tokens)?;
        backend.upload_ids(self.lengths.first_rows(lengths.len()), lengths)?;
        self.head.upload(backend, targets, lengths)
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        let [residual, dy] =
            [self.gradients.residual, self.gradients.y].map(|buffer| pass.rows(buffer));
        self.head.loss_and_gradient(pass, x, dy)?;
        let (last, lengths) = (self.last.rows(pass), self.lengths(pass));
        self.final_norm.backward(pass, dy, last, residual, Accumulate::Overwrite)?;
        for block in self.blocks.iter().rev() {
            block.backward(pass, lengths, &self.gradients)?;
        }
        pass.drop_in_place(residual, self.dropout)?;
        let embedded = self.embedded.rows(pass);
        self.norm.backward(pass, residual, embedded, dy, Accumulate::Overwrite)?;
        self.embedding.backward(pass, pass.rows(self.tokens), dy, self.head.sharing())
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
}

/// x = x + attention(norm_1(x)); x = x + ffn(norm_2(x)).
#[derive(Debug)]
struct Block {
    norm_1: Norm,
    attention: Attention,
    norm_2: Norm,
    ffn: Ffn,
    /// Dropout of the outputs of attention and ffn.
    dropouts: [Site; 2],
    kept: Kept,
}

/// Activations that a block keeps for its backward pass.
#[derive(Debug, Clone, Copy)]
struct Kept {
    norm_1: NormActivations,
    attention: AttentionActivations,
    norm_2: NormActivations,
    ffn: FfnActivations,
}

impl Kept {
    fn rows(self, pass: &Pass<'_>) -> Self {
        Self {
            norm_1: self.norm_1.rows(pass),
            attention: self.attention.rows(pass),
            norm_2: self.norm_2.rows(pass),
            ffn: self.ffn.rows(pass),
        }
    }
}

impl Block {
    /// `x` is the buffer of the stream that the block reads.
    fn new(
        builder: &mut Builder<'_>,
        spec: BertSpec,
        layer: usize,
        x: Tensor,
    ) -> Result<Self, Error> {
        let BertSpec { d_model, d_ff, activation, .. } = spec;
        let of = |part: &str| format!("layers.{layer}.{part}");
        let norm_1 = Norm::new(builder, &of("norm1"), d_model, Bias::Present, EPSILON)?;
        let names = ["attn.self_attention.query_key_value", "attn.dense"].map(of);
        let attention_spec = spec.attention(&names, Bias::Absent);
        let attention = Attention::new(builder, &attention_spec)?;
        let norm_2 = Norm::new(builder, &of("norm2"), d_model, Bias::Present, EPSILON)?;
        let (names, bias) = (["ffn.dense_in", "ffn.dense_out"].map(of), Bias::Absent);
        let init = [INIT; 2];
        let ffn = FfnSpec { names, d_model, d_ff, activation, bias, init };
        let ffn = Ffn::new(builder, ffn)?;
        let dropouts = [builder.dropout_site(), builder.dropout_site()];
        let middle = builder.activation(&of("norm2 x"), d_model)?;
        let kept = Kept {
            norm_1: NormActivations::new(builder, &of("norm1"), x)?,
            attention: Attention::activations(builder, &of("attn"), &attention_spec)?,
            norm_2: NormActivations::new(builder, &of("norm2"), middle)?,
            ffn: FfnActivations::new(builder, &of("ffn"), d_ff, activation)?,
        };
        Ok(Self { norm_1, attention, norm_2, ffn, dropouts, kept })
    }

    /// Leaves the block's output in `delta`, to be added to the stream that it returns. `stream` is
    /// the stream before the previous block's output was added; none for the first block.
    fn forward(
        &self,
        pass: &mut Pass<'_>,
        stream: Option<Tensor>,
        lengths: Tensor,
        delta: Tensor,
    ) -> Result<Tensor, Error> {
        let kept = self.kept.rows(pass);
        match stream {
            None => self.norm_1.forward(pass, kept.norm_1)?,
            Some(stream) => self.norm_1.forward_residual(pass, stream, delta, kept.norm_1)?,
        }
        let streams = Streams { x: kept.norm_1.y, memory: None, lengths: Some(lengths) };
        self.attention.forward(pass, streams, kept.attention, delta)?;
        pass.drop_in_place(delta, self.dropouts[0])?;
        self.norm_2.forward_residual(pass, kept.norm_1.x, delta, kept.norm_2)?;
        self.ffn.forward_up(pass, kept.norm_2.y, kept.ffn)?;
        self.ffn.forward_down(pass, kept.ffn, delta)?;
        pass.drop_in_place(delta, self.dropouts[1])?;
        Ok(kept.norm_2.x)
    }

    /// The gradient of the residual stream: in, of the block's output; out, of its input.
    fn backward(
        &self,
        pass: &mut Pass<'_>,
        lengths: Tensor,
        buffers: &Gradients,
    ) -> Result<(), Error> {
        let kept = self.kept.rows(pass);
        let [dresidual, dy, ddelta] =
            [buffers.residual, buffers.y, buffers.delta].map(|buffer| pass.rows(buffer));
        let dffn = pass.before_dropout(dresidual, ddelta, self.dropouts[1])?;
        let scratch = buffers.ffn.rows(pass);
        self.ffn.backward(pass, kept.norm_2.y, kept.ffn, dffn, scratch, dy)?;
        self.norm_2.backward(pass, dy, kept.norm_2, dresidual, Accumulate::Add)?;

        let dattention = pass.before_dropout(dresidual, ddelta, self.dropouts[0])?;
        let scratch = buffers.attention.rows(pass);
        let streams = Streams { x: kept.norm_1.y, memory: None, lengths: Some(lengths) };
        self.attention.backward(pass, streams, [kept.attention, scratch], dattention, dy, None)?;
        self.norm_1.backward(pass, dy, kept.norm_1, dresidual, Accumulate::Add)
    }
}
