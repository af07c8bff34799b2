//! The linear layer of fully sparse training.
//!
//! ```text
//! forward  Z  = X S(W)^T + b
//! dgrad    dX = dZ S(W)            the same mask, transposed: that is why it is transposable
//! wgrad    dW = MVUE(dZ^T) X       dense in W: pruned weights receive gradient too
//! bias     db = column sums of dZ  of the unpruned dZ
//! ```
//!
//! A layer that is not sparsified, or a phase whose operands are dense, multiplies W and dZ
//! themselves. Source: the paper, section 3.

use sparse24_core::{
    op::Activation,
    philox::{Purpose, Site},
};

use super::{
    Pass,
    builder::Builder,
    parameter::{Bias, Handle, Init, ParameterSpec, Pruned, Sparsity},
};
use crate::{
    Result,
    backend::{
        Gradient24, Op, Tensor,
        op::{
            ActivationBackward, ActivationForward, BiasGrad, Gradient, LinearDgrad, LinearForward,
            LinearWgrad, MvueCompress, Weight,
        },
    },
    method::{DgradOperand, GradientOperand, WeightOperand},
};

/// A linear layer W `[r, q]`, b `[1, r]`.
#[derive(Debug)]
pub struct Linear24 {
    weight: Handle,
    bias: Option<Handle>,
    sampled: Option<Gradient24>,
    site: Site,
}

/// The declaration of a [`Linear24`].
#[derive(Debug, Clone)]
pub struct LinearSpec {
    /// Name of its parameters, without `.weight` and `.bias`.
    pub name: String,
    /// `[r, q]`.
    pub shape: [usize; 2],
    /// The initial weights.
    pub init: Init,
    /// The bias starts at zero.
    pub bias: Bias,
    /// Whether masks may prune its weight.
    pub sparsity: Sparsity,
}

/// A gradient on its way through the activation that precedes a layer.
#[derive(Debug, Clone, Copy)]
pub struct Through {
    /// The activation whose output the layer reads.
    pub activation: Activation,
    /// The activation's input.
    pub z: Tensor,
    /// The gradient of the activation's output: scratch.
    pub dh: Tensor,
}

impl Linear24 {
    /// Allocates the layer.
    ///
    /// # Errors
    /// Errors of the allocations; a sparsifiable shape must consist of 4x4 tiles.
    pub fn new(builder: &mut Builder<'_>, spec: LinearSpec) -> Result<Self> {
        let LinearSpec { name, shape, init, bias, sparsity } = spec;
        let matrix = ParameterSpec::matrix(format!("{name}.weight"), shape, init);
        let weight = builder.parameter(ParameterSpec { sparsity, ..matrix })?;
        let sampled = match sparsity {
            Sparsity::Dense => None,
            Sparsity::Sparsifiable => builder.sampled_gradient(shape[0])?,
        };
        let bias = builder.bias(bias, &name, shape[0])?;
        let site = Site::new(Purpose::Mvue, weight.number);
        Ok(Self { weight, bias, sampled, site })
    }

    /// Z = X S(W)^T + b.
    pub fn forward(&self, pass: &mut Pass<'_>, x: Tensor, z: Tensor) -> Result {
        pass.run(self.product(pass, x, z))
    }

    /// Z = X S(W)^T + b, then H = act(Z).
    pub fn forward_activation(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        z: Tensor,
        activation: Activation,
        h: Tensor,
    ) -> Result {
        let product = self.product(pass, x, z);
        pass.sequence(&[product.into(), ActivationForward { activation, z, h }.into()])
    }

    /// dW, db, and dX = dZ S(W).
    pub fn backward(&self, pass: &mut Pass<'_>, x: Tensor, dz: Tensor, dx: Tensor) -> Result {
        self.gradients(pass, x, dz)?;
        pass.run(self.dgrad(pass, dz, dx))
    }

    /// dW, db, and dX = dZ S(W), after [`Self::sampling`] was executed.
    pub fn backward_sampled(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        dz: Tensor,
        dx: Tensor,
    ) -> Result {
        self.products(pass, x, dz)?;
        pass.run(self.dgrad(pass, dz, dx))
    }

    /// dW, db, and the gradient of the input of the activation whose output X was; then `sampling`
    /// of that gradient.
    pub fn backward_activation(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        dz: Tensor,
        Through { activation, z, dh }: Through,
        dx: Tensor,
        sampling: Option<MvueCompress>,
    ) -> Result {
        self.gradients(pass, x, dz)?;
        let dgrad = self.dgrad(pass, dz, dh);
        let derivative = ActivationBackward { activation, dh, z, dz: dx };
        let mut ops = vec![dgrad.into(), derivative.into()];
        ops.extend(sampling.map(Op::from));
        pass.sequence(&ops)
    }

    fn product(&self, pass: &Pass<'_>, x: Tensor, z: Tensor) -> LinearForward {
        let weight = match (pass.phase.forward, self.weight.pruned) {
            (WeightOperand::Pruned(..), Some(pruned)) => Weight::Pruned(pruned.weight),
            _ => Weight::Dense(self.weight.weight),
        };
        LinearForward { x, weight, bias: self.bias.map(|bias| bias.weight), z }
    }

    /// dW and db, of a layer whose input needs no gradient.
    pub fn gradients(&self, pass: &mut Pass<'_>, x: Tensor, dz: Tensor) -> Result {
        self.sampling(pass, dz).map_or(Ok(()), |op| pass.run(op))?;
        self.products(pass, x, dz)
    }

    /// The sampling of dZ that dW reads, if it reads a sample.
    pub fn sampling(&self, pass: &Pass<'_>, dz: Tensor) -> Option<MvueCompress> {
        match (pass.phase.wgrad, self.sampled) {
            (GradientOperand::Mvue(estimator), Some(out)) => {
                Some(MvueCompress { dz, site: self.site, estimator, out })
            }
            _ => None,
        }
    }

    fn products(&self, pass: &mut Pass<'_>, x: Tensor, dz: Tensor) -> Result {
        let accumulate = pass.accumulate;
        let sampling = self.sampling(pass, dz);
        let gradient = sampling.map_or(Gradient::Dense(dz), |op| Gradient::Sampled(op.out));
        pass.run(LinearWgrad { dz: gradient, x, dw: self.weight.gradient, accumulate })?;
        match self.bias {
            Some(bias) => pass.run(Op::from(BiasGrad { dz, db: bias.gradient, accumulate })),
            None => Ok(()),
        }
    }

    fn dgrad(&self, pass: &Pass<'_>, dz: Tensor, dx: Tensor) -> LinearDgrad {
        let weight = match (pass.phase.dgrad, pass.phase.forward, self.weight.pruned) {
            (DgradOperand::AsForward, WeightOperand::Pruned(..), Some(pruned)) => {
                Weight::Pruned(pruned.weight)
            }
            (DgradOperand::Permuted, _, Some(Pruned { dgrad: Some((_, weight)), .. })) => {
                Weight::Pruned(weight)
            }
            _ => Weight::Dense(self.weight.weight),
        };
        LinearDgrad { dz, weight, dx }
    }
}
