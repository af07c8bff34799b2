//! The head of a BERT in pre-training: it predicts the masked tokens of a batch.

use sparse24_core::op::{Accumulate, Activation};

use crate::{
    Result,
    backend::{Backend, DType, Region, Tensor, op::ActivationBackward},
    nn::{
        Bias, Builder, Embedding, Head, Linear24, LinearSpec, Norm, NormActivations, Pass,
        PredictionHead, Sharing, TargetRows,
    },
    objective::most_targets,
};

/// Logits of the rows of x that have a target, tied to the token embedding E.
///
/// ```text
/// m = the rows of x that have a target
/// y = m W^T + b                  or, with a norm, norm(act(m W^T + b))
/// logits = y E^T + bias
/// ```
#[derive(Debug)]
pub(super) struct MaskedHead {
    linear: Linear24,
    norm: Option<ActivatedNorm>,
    decoder: Head,
    mask_probability: f32,
    rows: TargetRows,
    m: Tensor,
    z: Tensor,
    /// Gradients, in turns.
    scratch: [Tensor; 2],
}

#[derive(Debug)]
struct ActivatedNorm {
    activation: Activation,
    norm: Norm,
    kept: NormActivations,
}

impl MaskedHead {
    /// Allocates a head without norm and bias, for at most [`most_targets`] of a batch.
    pub(super) fn new(
        builder: &mut Builder<'_>,
        embedding: &Embedding,
        linear: LinearSpec,
        mask_probability: f32,
    ) -> Result<Self> {
        let n = most_targets(mask_probability, builder.batch().tokens());
        let shape = [n, linear.shape[0]];
        let linear = Linear24::new(builder, linear)?;
        let decoder = Head::tied(builder, embedding, n)?;
        let rows = TargetRows::new(builder, "masked rows", n)?;
        let mut activation =
            |name| builder.tensor(name, shape, DType::Activation, Region::Activations);
        let (m, z) = (activation("masked")?, activation("head z")?);
        let scratch = [activation("head dy")?, activation("head dm")?];
        Ok(Self { linear, norm: None, decoder, mask_probability, rows, m, z, scratch })
    }

    /// This head with an activation and a norm, which has biases, after its linear layer.
    pub(super) fn with_norm(
        self,
        builder: &mut Builder<'_>,
        activation: Activation,
        (name, epsilon): (&str, f32),
    ) -> Result<Self> {
        let norm = Norm::new(builder, name, self.z.shape[1], Bias::Present, epsilon)?;
        let h = builder.tensor("head h", self.z.shape, DType::Activation, Region::Activations)?;
        let kept = NormActivations::new(builder, "head", h)?;
        Ok(Self { norm: Some(ActivatedNorm { activation, norm, kept }), ..self })
    }

    /// This head with a bias of the logits, which starts at zero.
    pub(super) fn with_bias(self, builder: &mut Builder<'_>, name: &str) -> Result<Self> {
        Ok(Self { decoder: self.decoder.with_bias(builder, name)?, ..self })
    }

    /// The rows that are read of a batch of p tokens.
    fn most(&self, p: usize) -> usize {
        most_targets(self.mask_probability, p)
    }

    /// y.
    fn forward(&self, pass: &mut Pass<'_>, x: Tensor) -> Result<Tensor> {
        let n = self.most(x.shape[0]);
        let [m, z] = [self.m, self.z].map(|buffer| buffer.first_rows(n));
        self.rows.gather(pass, x, m)?;
        let Some(ActivatedNorm { activation, norm, kept }) = &self.norm else {
            self.linear.forward(pass, m, z)?;
            return Ok(z);
        };
        let kept = kept.first_rows(n);
        self.linear.forward_activation(pass, m, z, *activation, kept.x)?;
        norm.forward(pass, kept)?;
        Ok(kept.y)
    }
}

impl PredictionHead for MaskedHead {
    fn sharing(&self) -> Sharing {
        Sharing::Tied
    }

    fn upload(&self, backend: &mut dyn Backend, targets: &[u32], _: &[u32]) -> Result {
        let n = self.most(targets.len());
        self.rows.upload(backend, targets, n, self.decoder.buffers().targets)
    }

    fn evaluate(&self, pass: &mut Pass<'_>, x: Tensor) -> Result {
        let y = self.forward(pass, x)?;
        self.decoder.evaluate(pass, y)
    }

    fn loss_and_gradient(&self, pass: &mut Pass<'_>, x: Tensor, dx: Tensor) -> Result {
        let y = self.forward(pass, x)?;
        let n = y.shape[0];
        let [m, z] = [self.m, self.z].map(|buffer| buffer.first_rows(n));
        let [dz, dm] = self.scratch.map(|buffer| buffer.first_rows(n));
        self.decoder.loss_and_gradient(pass, y, dz)?;
        if let Some(ActivatedNorm { activation, norm, kept }) = &self.norm {
            norm.backward(pass, dz, kept.first_rows(n), dm, Accumulate::Overwrite)?;
            pass.run(ActivationBackward { activation: *activation, dh: dm, z, dz })?;
        }
        self.linear.backward(pass, m, dz, dm)?;
        self.rows.scatter(pass, dm, dx)
    }

    fn loss(&self) -> Tensor {
        self.decoder.loss()
    }
}
