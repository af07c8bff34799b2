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
//! A fine-tuned model has a [`SequenceHead`] on the first token instead, with a pooler, or a
//! [`SpanHead`] on all. The residual stream stays in the norms: each adds the output of the half
//! block before it.

use sparse24_core::{op::Accumulate, philox::Site};

use super::{
    BertSpec, Model,
    bert::{EPSILON, INIT},
    no_outputs,
};
use crate::{
    Error,
    backend::{Backend, DType, Region, Tensor},
    nn::{
        Attention, AttentionActivations, BatchShape, Bias, Builder, Embedding, Ffn, FfnActivations,
        FfnSpec, Head, Linear24, LinearSpec, Norm, NormActivations, Pass, Prediction,
        PredictionHead, SequenceHead, SequenceHeadSpec, Sharing, SpanHead, Sparsity, Streams,
        TargetRows,
    },
    objective::{Batch, most_targets},
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
    head: TaskHead,
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
            None => TaskHead::Masked(Box::new(MaskedHead::new(builder, spec, &embedding)?)),
            Some(Prediction::Span) => {
                TaskHead::Tuned(Box::new(SpanHead::new(builder, last.y, INIT)?))
            }
            Some(prediction) => {
                let spec = SequenceHeadSpec {
                    name: "classifier",
                    bias: Bias::Present,
                    pooler: Some(("pooler.dense", spec.pooler)),
                    d_model: d,
                    init: INIT,
                    prediction,
                };
                TaskHead::Tuned(Box::new(SequenceHead::new(builder, spec)?))
            }
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
        match &self.head {
            TaskHead::Masked(head) => head.upload(backend, targets),
            TaskHead::Tuned(head) => head.upload(backend, targets, lengths),
        }
    }

    fn train(&self, pass: &mut Pass<'_>) -> Result<(), Error> {
        let x = self.forward(pass)?;
        let [residual, dy] =
            [self.gradients.residual, self.gradients.y].map(|buffer| pass.rows(buffer));
        let sharing = match &self.head {
            TaskHead::Masked(head) => {
                head.loss_and_gradient(pass, x, dy)?;
                Sharing::Tied
            }
            TaskHead::Tuned(head) => {
                head.loss_and_gradient(pass, x, dy)?;
                Sharing::Alone
            }
        };
        let (last, lengths) = (self.last.rows(pass), self.lengths(pass));
        self.final_norm.backward(pass, dy, last, residual, Accumulate::Overwrite)?;
        for block in self.blocks.iter().rev() {
            block.backward(pass, lengths, &self.gradients)?;
        }
        pass.drop_in_place(residual, self.dropout)?;
        let embedded = self.embedded.rows(pass);
        self.norm.backward(pass, residual, embedded, dy, Accumulate::Overwrite)?;
        self.embedding.backward(pass, pass.rows(self.tokens), dy, sharing)
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

/// The reader of the final norm's output.
#[derive(Debug)]
enum TaskHead {
    /// Pre-training.
    Masked(Box<MaskedHead>),
    /// Fine-tuning.
    Tuned(Box<dyn PredictionHead>),
}

/// The head: logits = (m W^T) word^T for the rows m of x that have a target.
#[derive(Debug)]
struct MaskedHead {
    linear: Linear24,
    head: Head,
    mask_probability: f32,
    rows: TargetRows,
    /// m, and the input of the decoder.
    m: Tensor,
    z: Tensor,
    /// Their gradients.
    dm: Tensor,
    dz: Tensor,
}

impl MaskedHead {
    fn new(
        builder: &mut Builder<'_>,
        spec: BertSpec,
        embedding: &Embedding,
    ) -> Result<Self, Error> {
        let BertSpec { d_model: d, mask_probability, .. } = spec;
        let linear = LinearSpec {
            name: "prediction_head".to_owned(),
            shape: [d, d],
            init: INIT,
            bias: Bias::Absent,
            sparsity: Sparsity::Dense,
        };
        let linear = Linear24::new(builder, linear)?;
        let n = most_targets(mask_probability, builder.batch().tokens());
        let head = Head::tied(builder, embedding, n)?;
        let rows = TargetRows::new(builder, "masked rows", n)?;
        let mut activation =
            |name| builder.tensor(name, [n, d], DType::Activation, Region::Activations);
        let (m, z) = (activation("masked")?, activation("head z")?);
        let (dm, dz) = (activation("dmasked")?, activation("head dz")?);
        Ok(Self { linear, head, mask_probability, rows, m, z, dm, dz })
    }

    /// The rows for a batch of p tokens.
    fn most(&self, p: usize) -> usize {
        most_targets(self.mask_probability, p)
    }

    fn upload(&self, backend: &mut dyn Backend, targets: &[u32]) -> Result<(), Error> {
        let n = self.most(targets.len());
        self.rows.upload(backend, targets, n, self.head.buffers().targets)
    }

    /// m, and the input of the decoder.
    fn forward(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<[Tensor; 2], Error> {
        let n = self.most(x.shape[0]);
        let [m, z] = [self.m, self.z].map(|buffer| buffer.first_rows(n));
        self.rows.gather(pass, x, m)?;
        self.linear.forward(pass, m, z)?;
        Ok([m, z])
    }

    fn loss(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<(), Error> {
        let [_, z] = self.forward(pass, x)?;
        self.head.loss(pass, z)
    }

    fn loss_and_gradient(&self, pass: &mut Pass<'_>, x: Tensor, dx: Tensor) -> Result<(), Error> {
        let [m, z] = self.forward(pass, x)?;
        let [dm, dz] = [self.dm, self.dz].map(|buffer| buffer.first_rows(m.shape[0]));
        self.head.loss_and_gradient(pass, z, dz)?;
        self.linear.backward(pass, m, dz, dm)?;
        self.rows.scatter(pass, dm, dx)
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
