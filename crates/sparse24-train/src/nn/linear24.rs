//! The linear layer of fully sparse training.
//!
//! ```text
//! forward  Z  = X S(W)^T + b
//! dgrad    dX = dZ S(W)            the same mask, transposed: that is why it is transposable
//! wgrad    dW = MVUE(dZ^T) X       dense in W: pruned weights receive gradient too
//! bias     db = column sums of dZ  unpruned
//! ```
//!
//! A layer that is not sparsified, or a phase whose operands are dense, multiplies W and dZ as they are. Source: the paper, section 3.

use sparse24_core::philox::{Purpose, Site};

use super::{
    Pass, SampledGradient,
    parameter::{Handle, Init, Parameters},
};
use crate::{
    Error,
    backend::{Activation, Backend, Gradient, Gradient24, LinearDgrad, LinearForward, LinearWgrad, MaskId, Tensor, Weight, Weight24},
    method::{GradientOperand, WeightOperand},
};

/// A linear layer W `[r, q]`, b `[1, r]`.
#[derive(Debug)]
pub struct Linear24 {
    weight: Handle,
    bias: Option<Handle>,
    sparse: Option<Sparse>,
    site: Site,
}

#[derive(Debug, Clone, Copy)]
struct Sparse {
    mask: MaskId,
    weight: Weight24,
    gradient: Gradient24,
}

/// How to make a [`Linear24`].
#[derive(Debug, Clone)]
pub struct LinearSpec {
    /// The name of its parameters, without `.weight`.
    pub name: String,
    /// `[r, q]`.
    pub shape: [usize; 2],
    /// Standard deviation of the initial weights.
    pub deviation: f32,
    /// Whether it has a bias, initially zero.
    pub bias: Bias,
    /// Room for its sampled gradient, if it may be pruned.
    pub sparse: Option<Gradient24>,
}

/// Whether a layer has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// It has.
    Present,
    /// It has not.
    Absent,
}

impl Linear24 {
    /// Allocates the layer's parameters.
    ///
    /// # Errors
    /// Those of the allocations; a shape that is not made of 4x4 tiles cannot be sparse.
    pub fn new(backend: &mut dyn Backend, parameters: &mut Parameters, spec: LinearSpec) -> Result<Self, Error> {
        let weight = parameters.add(backend, format!("{}.weight", spec.name), spec.shape, Init::Normal(spec.deviation))?;
        let site = Site::new(Purpose::Mvue, parameters.last_number());
        let sparse = match spec.sparse {
            None => None,
            Some(gradient) => {
                let mask = parameters.prune_last(backend)?;
                Some(Sparse { mask, weight: backend.alloc_weight24(spec.shape)?, gradient })
            }
        };
        let bias = match spec.bias {
            Bias::Absent => None,
            Bias::Present => Some(parameters.add(backend, format!("{}.bias", spec.name), [1, spec.shape[0]], Init::Constant(0.0))?),
        };
        Ok(Self { weight, bias, sparse, site })
    }

    /// Rebuilds S(W) from W and its mask; nothing to do for a layer that is not sparsified.
    ///
    /// # Errors
    /// Those of [`Backend::compress_weight`].
    pub fn compress(&self, backend: &mut dyn Backend) -> Result<(), Error> {
        match self.sparse {
            Some(sparse) => backend.compress_weight(self.weight.weight, sparse.mask, sparse.weight),
            None => Ok(()),
        }
    }

    /// Z = X S(W)^T + b, then the activation.
    ///
    /// # Errors
    /// Those of [`Backend::linear_forward`].
    pub fn forward(&self, pass: &mut Pass<'_>, x: Tensor, z: Tensor, then: Option<(Activation, Tensor)>) -> Result<(), Error> {
        let weight = self.operand(pass.phase.forward);
        pass.backend.linear_forward(&LinearForward { x, weight, bias: self.bias.map(|bias| bias.weight), z, then })
    }

    /// dW, db, and dX = dZ S(W), through the activation before X if there was one.
    ///
    /// # Errors
    /// Those of the operations.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        dz: Tensor,
        dx: Tensor,
        through: Option<(Activation, Tensor)>,
    ) -> Result<(), Error> {
        let gradient = match (pass.phase.wgrad, self.sparse) {
            (GradientOperand::Mvue(estimator), Some(sparse)) => {
                if let Some(watch) = &mut pass.watch {
                    watch(pass.backend, SampledGradient { weight: self.weight.weight, dz, estimator })?;
                }
                pass.backend.mvue_compress(dz, self.site, estimator, sparse.gradient)?;
                Gradient::Sampled(sparse.gradient)
            }
            _ => Gradient::Dense(dz),
        };
        pass.backend.linear_wgrad(&LinearWgrad { dz: gradient, x, dw: self.weight.gradient, beta: pass.beta })?;
        if let Some(bias) = self.bias {
            pass.backend.bias_grad(dz, bias.gradient, pass.beta)?;
        }
        let weight = self.operand(pass.phase.dgrad);
        pass.backend.linear_dgrad(&LinearDgrad { dz, weight, then: through, dx })
    }

    fn operand(&self, operand: WeightOperand) -> Weight {
        match (operand, self.sparse) {
            (WeightOperand::Pruned(..), Some(sparse)) => Weight::Pruned(sparse.weight),
            _ => Weight::Dense(self.weight.weight),
        }
    }
}
