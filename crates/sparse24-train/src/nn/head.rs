//! The head of a language model: logits over the vocabulary, tied to the embedding or not, and the
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

/// Logits x E^T, and their cross-entropy.
#[derive(Debug)]
pub struct Head {
    table: Handle,
    smoothing: f32,
    buffers: HeadBuffers,
}

/// Buffers of a head.
#[derive(Debug, Clone, Copy)]
pub struct HeadBuffers {
    /// Scratch `[rows at a time, V]`.
    pub logits: Tensor,
    /// Target ids `[p, 1]`.
    pub targets: Tensor,
    /// One f32: the sum of the tokens' losses.
    pub loss: Tensor,
}

/// Rows of logits held at a time, so that a large vocabulary needs no `[p, V]` buffer; a GPU wants
/// thousands for its products.
const ROWS: usize = 4096;

impl Head {
    /// A head tied to an embedding.
    pub fn tied(builder: &mut Builder<'_>, embedding: &Embedding) -> Result<Self, Error> {
        Self::of_table(builder, embedding.token_table(), 0.0)
    }

    /// A head with a table `[V, d]` of its own, trained with label smoothing in `[0, 1)`.
    pub fn untied(
        builder: &mut Builder<'_>,
        spec: ParameterSpec,
        smoothing: f32,
    ) -> Result<Self, Error> {
        let table = builder.parameter(spec)?;
        Self::of_table(builder, table, smoothing)
    }

    fn of_table(builder: &mut Builder<'_>, table: Handle, smoothing: f32) -> Result<Self, Error> {
        let (p, vocabulary) = (builder.batch().tokens(), table.weight.shape[0]);
        let mut alloc =
            |name, shape, dtype| builder.tensor(name, shape, dtype, Region::Activations);
        let buffers = HeadBuffers {
            logits: alloc("logits", [p.min(ROWS), vocabulary], DType::Activation)?,
            targets: alloc("targets", [p, 1], DType::U32)?,
            loss: alloc("loss", [1, 1], DType::F32)?,
        };
        Ok(Self { table, smoothing, buffers })
    }

    /// Its buffers.
    #[must_use]
    pub fn buffers(&self) -> HeadBuffers {
        self.buffers
    }

    /// The summed loss, without gradients or label smoothing.
    pub fn loss(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<(), Error> {
        let op = self.operation(pass, x, 0.0, None);
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
        let gradients = HeadGradients { dx, dembedding, accumulate: pass.accumulate };
        let op = self.operation(pass, x, self.smoothing, Some(gradients));
        pass.run(op)
    }

    /// The logits of one row of x.
    pub fn logits(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Vec<f32>, Error> {
        let out = self.buffers.logits.first_rows(1);
        pass.run(Logits { x, embedding: self.table.weight, out })?;
        pass.backend.download(out)
    }

    fn operation(
        &self,
        pass: &Pass<'_>,
        x: Tensor,
        smoothing: f32,
        gradients: Option<HeadGradients>,
    ) -> HeadLoss {
        let HeadBuffers { logits, targets, loss } = self.buffers;
        let (embedding, targets) = (self.table.weight, pass.rows(targets));
        HeadLoss { x, embedding, targets, smoothing, logits, loss, gradients }
    }
}
