//! The output layer: logits over the vocabulary, tied to the embedding, or outputs of its own, and
//! their loss.

use super::{
    Pass,
    builder::Builder,
    embedding::{Embedding, Sharing},
    parameter::{Bias, Handle, Init, ParameterSpec},
};
use crate::{
    Error, Result,
    backend::{
        Backend, DType, Region, Tensor,
        op::{HeadGradients, HeadLoss, Logits, TargetLoss},
    },
};

/// The prediction of a fine-tuned model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prediction {
    /// One of this many classes for each sequence, by cross-entropy.
    Class(usize),
    /// A number for each sequence, by squared error.
    Value,
    /// The first and the last token of a span of each sequence, see [`TargetLoss::Span`].
    Span,
}

impl Prediction {
    /// Outputs for each sequence; for each token, of a span.
    #[must_use]
    pub fn outputs(self) -> usize {
        match self {
            Self::Class(classes) => classes,
            Self::Value => 1,
            Self::Span => 2,
        }
    }
}

/// A head: it predicts tokens, or what a model is fine-tuned for.
pub trait PredictionHead: core::fmt::Debug + Send {
    /// Whether it shares the token table; a fine-tuned head does not.
    fn sharing(&self) -> Sharing {
        Sharing::Alone
    }

    /// Copies the targets of a batch to the device, and the lengths of its sequences.
    fn upload(&self, backend: &mut dyn Backend, targets: &[u32], lengths: &[u32]) -> Result;

    /// The summed loss, without gradients; for classes, unsmoothed and unmixed cross-entropy.
    fn evaluate(&self, pass: &mut Pass<'_>, x: Tensor) -> Result;

    /// The summed loss, and the gradients of the step's loss scale times it; `dx` is overwritten.
    fn loss_and_gradient(&self, pass: &mut Pass<'_>, x: Tensor, dx: Tensor) -> Result;

    /// The summed loss `[1, 1]`.
    fn loss(&self) -> Tensor;

    /// The outputs of a fine-tuned head for the batch that was evaluated last.
    fn outputs(&self, _: &mut Pass<'_>) -> Result<Vec<f32>> {
        let problem = "this model predicts tokens and no class or value of a sequence";
        Err(Error::setting("task.name", problem))
    }

    /// The logits of the token after the row x `[1, d]`, of a head that predicts the next token.
    fn next_logits(&self, _: &mut Pass<'_>, _: Tensor) -> Result<Tensor> {
        Err(no_text())
    }
}

pub(crate) fn no_text() -> Error {
    Error::setting("model.kind", "this model does not generate text")
}

/// Outputs x E^T + b, and their loss.
#[derive(Debug)]
pub struct Head {
    table: Handle,
    bias: Option<Handle>,
    kind: TargetLoss,
    buffers: HeadBuffers,
}

/// Buffers of a head.
#[derive(Debug, Clone, Copy)]
pub struct HeadBuffers {
    /// Scratch `[rows at a time, V]`.
    pub logits: Tensor,
    /// Targets `[rows, 1]`.
    pub targets: Tensor,
    /// One f32: the sum of the rows' losses.
    pub loss: Tensor,
}

/// Rows of logits held at a time, so that a large vocabulary needs no `[p, V]` buffer; a GPU wants
/// thousands for its products.
const ROWS: usize = 4096;

impl Head {
    /// A head tied to an embedding, for at most `rows` predictions.
    pub fn tied(builder: &mut Builder<'_>, embedding: &Embedding, rows: usize) -> Result<Self> {
        let kind = TargetLoss::CrossEntropy { smoothing: 0.0, mixed: None };
        Self::of_table(builder, embedding.token_table(), kind, rows)
    }

    /// A head with a table `[outputs, d]` of its own.
    pub fn untied(
        builder: &mut Builder<'_>,
        name: &str,
        (kind, shape): (TargetLoss, [usize; 2]),
        bias: Bias,
        init: Init,
        rows: usize,
    ) -> Result<Self> {
        let table = ParameterSpec::matrix(format!("{name}.weight"), shape, init);
        let table = builder.parameter(table)?;
        let head = Self::of_table(builder, table, kind, rows)?;
        Ok(Self { bias: builder.bias(bias, name, shape[0])?, ..head })
    }

    fn of_table(
        builder: &mut Builder<'_>,
        table: Handle,
        kind: TargetLoss,
        rows: usize,
    ) -> Result<Self> {
        let outputs = table.weight.shape[0];
        let held = match kind {
            TargetLoss::Span { .. } => rows,
            _ => rows.min(ROWS),
        };
        let mut alloc =
            |name, shape, dtype| builder.tensor(name, shape, dtype, Region::Activations);
        let buffers = HeadBuffers {
            logits: alloc("logits", [held, outputs], DType::Activation)?,
            targets: alloc("targets", [rows, 1], DType::U32)?,
            loss: alloc("loss", [1, 1], DType::F32)?,
        };
        Ok(Self { table, bias: None, kind, buffers })
    }

    /// This head with a bias of the logits, which starts at zero.
    pub fn with_bias(self, builder: &mut Builder<'_>, name: &str) -> Result<Self> {
        let vocabulary = self.table.weight.shape[0];
        let bias = Some(builder.parameter(ParameterSpec::bias(name, vocabulary))?);
        Ok(Self { bias, ..self })
    }

    /// This head with another loss of its outputs.
    #[must_use]
    pub fn with_loss(self, kind: TargetLoss) -> Self {
        Self { kind, ..self }
    }

    /// Its buffers.
    #[must_use]
    pub fn buffers(&self) -> HeadBuffers {
        self.buffers
    }

    /// The outputs for x, which has at most as many rows as logits are held at a time.
    pub fn logits(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Vec<f32>> {
        let out = self.queue_logits(pass, x)?;
        pass.backend.download(out)
    }

    fn queue_logits(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Tensor> {
        let out = self.buffers.logits.first_rows(x.shape[0]);
        let bias = self.bias.map(|bias| bias.weight);
        pass.run(Logits { x, embedding: self.table.weight, bias, out })?;
        Ok(out)
    }

    fn operation(&self, pass: &Pass<'_>, x: Tensor, gradients: Option<HeadGradients>) -> HeadLoss {
        let HeadBuffers { logits, targets, loss } = self.buffers;
        let (embedding, bias) = (self.table.weight, self.bias.map(|bias| bias.weight));
        let targets = targets.first_rows(x.shape[0]);
        let kind = match self.kind {
            TargetLoss::Span { lengths } => {
                TargetLoss::Span { lengths: lengths.first_rows(pass.batch.size) }
            }
            // An evaluation has the plain cross-entropy.
            TargetLoss::CrossEntropy { .. } if gradients.is_none() => {
                TargetLoss::CrossEntropy { smoothing: 0.0, mixed: None }
            }
            TargetLoss::CrossEntropy { smoothing, mixed } => {
                let mixed = mixed.map(|mixed| mixed.rows(0..x.shape[0]));
                TargetLoss::CrossEntropy { smoothing, mixed }
            }
            TargetLoss::SquaredError => TargetLoss::SquaredError,
        };
        HeadLoss { x, embedding, bias, targets, kind, logits, loss, gradients }
    }
}

/// Prediction of the next token of every row, by a head that is tied to the token embedding.
impl PredictionHead for Head {
    fn sharing(&self) -> Sharing {
        Sharing::Tied
    }

    fn upload(&self, backend: &mut dyn Backend, targets: &[u32], _: &[u32]) -> Result {
        backend.upload_ids(self.buffers.targets.first_rows(targets.len()), targets)
    }

    fn evaluate(&self, pass: &mut Pass<'_>, x: Tensor) -> Result {
        let op = self.operation(pass, x, None);
        pass.run(op)
    }

    fn loss_and_gradient(&self, pass: &mut Pass<'_>, x: Tensor, dx: Tensor) -> Result {
        let dembedding = self.table.gradient;
        let dbias = self.bias.map(|bias| bias.gradient);
        let gradients = HeadGradients { dx, dembedding, dbias, accumulate: pass.accumulate };
        let op = self.operation(pass, x, Some(gradients));
        pass.run(op)
    }

    fn loss(&self) -> Tensor {
        self.buffers.loss
    }

    fn next_logits(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Tensor> {
        self.queue_logits(pass, x)
    }
}
