//! The head of a language model: logits over the vocabulary, tied to the embedding, and the
//! cross-entropy.

use super::{
    Pass,
    builder::Builder,
    embedding::Embedding,
    parameter::{Handle, ParameterSpec},
};
use crate::{
    Error,
    backend::{
        DType, Region, Tensor,
        op::{HeadGradients, HeadLoss, Logits},
    },
};

/// Logits x E^T + b, and their cross-entropy.
#[derive(Debug)]
pub struct Head {
    table: Handle,
    bias: Option<Handle>,
    buffers: HeadBuffers,
}

/// Buffers of a head.
#[derive(Debug, Clone, Copy)]
pub struct HeadBuffers {
    /// Scratch `[rows at a time, V]`.
    pub logits: Tensor,
    /// Target ids `[rows, 1]`.
    pub targets: Tensor,
    /// One f32: the sum of the rows' losses.
    pub loss: Tensor,
}

/// Rows of logits held at a time, so that a large vocabulary needs no `[p, V]` buffer; a GPU wants
/// thousands for its products.
const ROWS: usize = 4096;

impl Head {
    /// A head tied to an embedding, for at most `rows` predictions.
    pub fn tied(
        builder: &mut Builder<'_>,
        embedding: &Embedding,
        rows: usize,
    ) -> Result<Self, Error> {
        let table = embedding.token_table();
        let vocabulary = table.weight.shape[0];
        let mut alloc =
            |name, shape, dtype| builder.tensor(name, shape, dtype, Region::Activations);
        let buffers = HeadBuffers {
            logits: alloc("logits", [rows.min(ROWS), vocabulary], DType::Activation)?,
            targets: alloc("targets", [rows, 1], DType::U32)?,
            loss: alloc("loss", [1, 1], DType::F32)?,
        };
        Ok(Self { table, bias: None, buffers })
    }

    /// This head with a bias of the logits, which starts at zero.
    pub fn with_bias(self, builder: &mut Builder<'_>, name: &str) -> Result<Self, Error> {
        let vocabulary = self.table.weight.shape[0];
        let bias = Some(builder.parameter(ParameterSpec::vector(name, vocabulary, 0.0))?);
        Ok(Self { bias, ..self })
    }

    /// Its buffers.
    #[must_use]
    pub fn buffers(&self) -> HeadBuffers {
        self.buffers
    }

    /// The summed loss, without gradients.
    pub fn loss(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<(), Error> {
        let op = self.operation(x, None);
        pass.run(op)
    }

    /// The summed loss, and the gradients of the step's loss scale times it; `dx` is overwritten.
    pub fn loss_and_gradient(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        dx: Tensor,
    ) -> Result<(), Error> {
        let dembedding = self.table.gradient;
        let dbias = self.bias.map(|bias| bias.gradient);
        let gradients = HeadGradients { dx, dembedding, dbias, accumulate: pass.accumulate };
        let op = self.operation(x, Some(gradients));
        pass.run(op)
    }

    /// The logits of one row of x.
    pub fn logits(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Vec<f32>, Error> {
        let out = self.buffers.logits.first_rows(1);
        let bias = self.bias.map(|bias| bias.weight);
        pass.run(Logits { x, embedding: self.table.weight, bias, out })?;
        pass.backend.download(out)
    }

    fn operation(&self, x: Tensor, gradients: Option<HeadGradients>) -> HeadLoss {
        let HeadBuffers { logits, targets, loss } = self.buffers;
        let (embedding, bias) = (self.table.weight, self.bias.map(|bias| bias.weight));
        let targets = targets.first_rows(x.shape[0]);
        HeadLoss { x, embedding, bias, targets, smoothing: 0.0, logits, loss, gradients }
    }
}
