//! The head of a fine-tuned model: it predicts a class, or a value, of each sequence.

use sparse24_core::{op::Activation, philox::Site};

use super::{
    Pass,
    builder::Builder,
    head::{Head, Prediction, PredictionHead},
    linear24::{Linear24, LinearSpec},
    parameter::{Bias, Init, Sparsity},
    span_head::SpanHead,
    target_rows::TargetRows,
};
use crate::{
    Result,
    backend::{
        Backend, DType, Region, Tensor,
        op::{ActivationBackward, Mixed, TargetLoss},
    },
};

/// Outputs for the row of each sequence that has a target.
///
/// ```text
/// m = the rows of x that have a target, one a sequence
/// h = tanh(m P^T + p)            with a pooler, else h = m
/// outputs = dropout(h) W^T + b
/// ```
#[derive(Debug)]
pub struct SequenceHead {
    pooler: Option<Pooler>,
    dropout: Site,
    head: Head,
    rows: TargetRows,
    mixed: Option<Mixed>,
    m: Tensor,
    h: Tensor,
    /// Gradients of h and m.
    dh: Tensor,
    dm: Tensor,
}

#[derive(Debug)]
struct Pooler {
    linear: Linear24,
    z: Tensor,
    dz: Tensor,
}

/// The declaration of a [`SequenceHead`].
#[derive(Debug, Clone, Copy)]
pub struct SequenceHeadSpec<'a> {
    /// Name of the output layer.
    pub name: &'a str,
    /// Whether the output layer has a bias.
    pub bias: Bias,
    /// Name and width of the pooler.
    pub pooler: Option<(&'a str, usize)>,
    /// Features of x.
    pub d_model: usize,
    /// The initial weights.
    pub init: Init,
    /// Its prediction.
    pub prediction: Prediction,
}

impl SequenceHeadSpec<'_> {
    /// Allocates the head that reads x: a [`SpanHead`] for a span, otherwise a [`SequenceHead`].
    pub fn build(self, builder: &mut Builder<'_>, x: Tensor) -> Result<Box<dyn PredictionHead>> {
        Ok(match self.prediction {
            Prediction::Span => Box::new(SpanHead::new(builder, x, self.init)?),
            _ => Box::new(SequenceHead::new(builder, self)?),
        })
    }
}

impl SequenceHead {
    /// Allocates the layers, for a prediction that is not a span.
    pub fn new(builder: &mut Builder<'_>, spec: SequenceHeadSpec<'_>) -> Result<Self> {
        let SequenceHeadSpec { name, bias, pooler, d_model, init, prediction } = spec;
        let n = builder.batch().size;
        let activation = |builder: &mut Builder<'_>, name, columns| {
            builder.tensor(name, [n, columns], DType::Activation, Region::Activations)
        };
        let width = pooler.map_or(d_model, |(_, width)| width);
        let m = activation(builder, "pooled rows", d_model)?;
        let dm = activation(builder, "dpooled rows", d_model)?;
        let (mut h, mut dh) = (m, dm);
        let pooler = match pooler {
            None => None,
            Some((name, width)) => {
                let (name, sparsity) = (name.to_owned(), Sparsity::Dense);
                let shape = [width, d_model];
                let spec = LinearSpec { name, shape, init, bias: Bias::Present, sparsity };
                let linear = Linear24::new(builder, spec)?;
                h = activation(builder, "pooled", width)?;
                dh = activation(builder, "dpooled", width)?;
                let z = activation(builder, "pooler z", width)?;
                Some(Pooler { linear, z, dz: activation(builder, "pooler dz", width)? })
            }
        };
        let dropout = builder.dropout_site();
        let kind = match prediction {
            Prediction::Value => TargetLoss::SquaredError,
            _ => TargetLoss::CrossEntropy { smoothing: 0.0, mixed: None },
        };
        let output = (kind, [prediction.outputs(), width]);
        let head = Head::untied(builder, name, output, bias, init, n)?;
        let rows = TargetRows::new(builder, "target rows", n)?;
        Ok(Self { pooler, dropout, head, rows, mixed: None, m, h, dh, dm })
    }

    /// This head, of classes, trained on two targets (see [`Self::upload_mixed`]) with label
    /// smoothing in `[0, 1)`; an evaluation has the plain cross-entropy.
    pub fn mixed(self, builder: &mut Builder<'_>, smoothing: f32) -> Result<Self> {
        let shape = [self.m.shape[0], 1];
        let mut alloc = |name, dtype| builder.tensor(name, shape, dtype, Region::Activations);
        let targets = alloc("second targets", DType::U32)?;
        let mixed = Some(Mixed { targets, shares: alloc("shares", DType::F32)? });
        let head = self.head.with_loss(TargetLoss::CrossEntropy { smoothing, mixed });
        Ok(Self { head, mixed, ..self })
    }

    /// Copies the second targets of a batch to the device, and the shares of the first; without
    /// any, the share of each first target is 1.
    pub fn upload_mixed(
        &self,
        backend: &mut dyn Backend,
        second_targets: &[u32],
        of_first: &[f32],
    ) -> Result {
        let Some(Mixed { targets, shares }) = self.mixed else { return Ok(()) };
        let n = targets.shape[0];
        let (zeros, ones) = (vec![0; n], vec![1.0; n]);
        let (second_targets, of_first) =
            if of_first.is_empty() { (&zeros[..], &ones[..]) } else { (second_targets, of_first) };
        backend.upload_ids(targets.first_rows(second_targets.len()), second_targets)?;
        backend.upload(shares.first_rows(of_first.len()), of_first)
    }

    /// The input of the output layer.
    fn forward(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Tensor> {
        let n = pass.batch.size;
        let [m, h] = [self.m, self.h].map(|buffer| buffer.first_rows(n));
        self.rows.gather(pass, x, m)?;
        if let Some(Pooler { linear, z, .. }) = &self.pooler {
            linear.forward_activation(pass, m, z.first_rows(n), Activation::Tanh, h)?;
        }
        pass.drop_in_place(h, self.dropout)?;
        Ok(h)
    }
}

impl PredictionHead for SequenceHead {
    fn upload(&self, backend: &mut dyn Backend, targets: &[u32], _: &[u32]) -> Result {
        self.rows.upload(backend, targets, self.m.shape[0], self.head.buffers().targets)
    }

    fn evaluate(&self, pass: &mut Pass<'_>, x: Tensor) -> Result {
        let h = self.forward(pass, x)?;
        self.head.evaluate(pass, h)
    }

    fn loss_and_gradient(&self, pass: &mut Pass<'_>, x: Tensor, dx: Tensor) -> Result {
        let h = self.forward(pass, x)?;
        let n = pass.batch.size;
        let [m, dh, dm] = [self.m, self.dh, self.dm].map(|buffer| buffer.first_rows(n));
        self.head.loss_and_gradient(pass, h, dh)?;
        pass.drop_in_place(dh, self.dropout)?;
        if let Some(Pooler { linear, z, dz }) = &self.pooler {
            let (activation, z, dz) = (Activation::Tanh, z.first_rows(n), dz.first_rows(n));
            pass.run(ActivationBackward { activation, dh, z, dz })?;
            linear.backward(pass, m, dz, dm)?;
        }
        self.rows.scatter(pass, dm, dx)
    }

    fn loss(&self) -> Tensor {
        self.head.loss()
    }

    fn outputs(&self, pass: &mut Pass<'_>) -> Result<Vec<f32>> {
        self.head.logits(pass, self.h.first_rows(pass.batch.size))
    }
}
