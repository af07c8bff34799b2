//! The linear layer of fully sparse training.
//!
//! ```text
//! forward  Z  = X S(W)^T + b
//! dgrad    dX = dZ S(W)            the same mask, transposed: that is why it is transposable; or another operand
//! wgrad    dW = MVUE(dZ^T) X       dense in W: pruned weights receive gradient too
//! bias     db = column sums of dZ  unpruned
//! ```
//!
//! A layer that is not sparsified, or a phase whose operands are dense, multiplies W and dZ as they
//! are. Source: the paper, section 3.

use sparse24_core::philox::{Purpose, Site};

use super::{
    Pass, SampledGradient,
    parameter::{Handle, Init, Parameters, Pruned},
};
use crate::{
    Error,
    backend::{
        Activation, Backend, Gradient, Gradient24, LinearDgrad, LinearForward, LinearWgrad, Tensor,
        Weight,
    },
    method::{DgradOperand, GradientOperand, PrunedOperands, WeightOperand},
};

/// A linear layer W `[r, q]`, b `[1, r]`.
#[derive(Debug)]
pub struct Linear24 {
    weight: Handle,
    bias: Option<Handle>,
    pruned: Option<Pruned>,
    sampled: Option<Gradient24>,
    site: Site,
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
    /// What a method needs of it, if it may be pruned.
    pub sparse: Option<SparseRoom>,
}

/// What a method needs of a sparsifiable layer.
#[derive(Debug, Clone, Copy)]
pub struct SparseRoom {
    /// The operands of its weight.
    pub operands: PrunedOperands,
    /// Room for its sampled gradient, if it is sampled.
    pub sampled: Option<Gradient24>,
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
    pub fn new(
        backend: &mut dyn Backend,
        parameters: &mut Parameters,
        spec: LinearSpec,
    ) -> Result<Self, Error> {
        let weight = parameters.add(
            backend,
            format!("{}.weight", spec.name),
            spec.shape,
            Init::Normal(spec.deviation),
        )?;
        let site = Site::new(Purpose::Mvue, parameters.last_number());
        let pruned = match spec.sparse {
            None => None,
            Some(room) => parameters.prune_last(backend, room.operands)?,
        };
        let sampled = spec.sparse.and_then(|room| room.sampled);
        let bias = match spec.bias {
            Bias::Absent => None,
            Bias::Present => Some(parameters.add(
                backend,
                format!("{}.bias", spec.name),
                [1, spec.shape[0]],
                Init::Constant(0.0),
            )?),
        };
        Ok(Self { weight, bias, pruned, sampled, site })
    }

    /// Z = X S(W)^T + b, then the activation.
    ///
    /// # Errors
    /// Those of [`Backend::linear_forward`].
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        z: Tensor,
        then: Option<(Activation, Tensor)>,
    ) -> Result<(), Error> {
        let weight = match (pass.phase.forward, self.pruned) {
            (WeightOperand::Pruned(..), Some(pruned)) => Weight::Pruned(pruned.weight),
            _ => Weight::Dense(self.weight.weight),
        };
        pass.backend.linear_forward(&LinearForward {
            x,
            weight,
            bias: self.bias.map(|bias| bias.weight),
            z,
            then,
        })
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
        let gradient = match (pass.phase.wgrad, self.sampled) {
            (GradientOperand::Mvue(estimator), Some(sampled)) => {
                if let Some(watch) = &mut pass.watch {
                    watch(
                        pass.backend,
                        SampledGradient { weight: self.weight.weight, dz, estimator },
                    )?;
                }
                pass.backend.mvue_compress(dz, self.site, estimator, sampled)?;
                Gradient::Sampled(sampled)
            }
            _ => Gradient::Dense(dz),
        };
        pass.backend.linear_wgrad(&LinearWgrad {
            dz: gradient,
            x,
            dw: self.weight.gradient,
            beta: pass.beta,
        })?;
        if let Some(bias) = self.bias {
            pass.backend.bias_grad(dz, bias.gradient, pass.beta)?;
        }
        let weight = match (pass.phase.dgrad, pass.phase.forward, self.pruned) {
            (DgradOperand::AsForward, WeightOperand::Pruned(..), Some(pruned)) => {
                Weight::Pruned(pruned.weight)
            }
            (DgradOperand::Permuted, _, Some(Pruned { dgrad: Some((_, weight)), .. })) => {
                Weight::Pruned(weight)
            }
            _ => Weight::Dense(self.weight.weight),
        };
        pass.backend.linear_dgrad(&LinearDgrad { dz, weight, then: through, dx })
    }
}
