//! The head of a model that is fine-tuned to find a span: two outputs of each token.

use super::{
    Pass,
    builder::Builder,
    head::{Head, Prediction, PredictionHead},
    parameter::{Bias, Init},
};
use crate::{
    Result,
    backend::{Backend, DType, Region, Tensor, op::TargetLoss},
};

/// outputs = x W^T + b: for each token, the logits of being the first and the last of the span.
#[derive(Debug)]
pub struct SpanHead {
    head: Head,
    /// Its input of the last forward pass `[p, d]`.
    x: Tensor,
    lengths: Tensor,
}

impl SpanHead {
    /// Allocates the layer, which has Hugging Face's name, for inputs x.
    pub fn new(builder: &mut Builder<'_>, x: Tensor, init: Init) -> Result<Self> {
        let [rows, d_model] = x.shape;
        let shape = [builder.batch().size, 1];
        let lengths = builder.tensor("span lengths", shape, DType::U32, Region::Activations)?;
        let output = (TargetLoss::Span { lengths }, [Prediction::Span.outputs(), d_model]);
        let head = Head::untied(builder, "qa_outputs", output, Bias::Present, init, rows)?;
        Ok(Self { head, x, lengths })
    }
}

impl PredictionHead for SpanHead {
    fn upload(&self, backend: &mut dyn Backend, targets: &[u32], lengths: &[u32]) -> Result {
        backend.upload_ids(self.lengths.first_rows(lengths.len()), lengths)?;
        self.head.upload(backend, targets, lengths)
    }

    fn evaluate(&self, pass: &mut Pass<'_>, x: Tensor) -> Result {
        self.head.evaluate(pass, x)
    }

    fn loss_and_gradient(&self, pass: &mut Pass<'_>, x: Tensor, dx: Tensor) -> Result {
        self.head.loss_and_gradient(pass, x, dx)
    }

    fn loss(&self) -> Tensor {
        self.head.loss()
    }

    fn outputs(&self, pass: &mut Pass<'_>) -> Result<Vec<f32>> {
        self.head.logits(pass, pass.rows(self.x))
    }
}
