//! LayerNorm (Ba et al. 2016), alone or after a residual addition.

use sparse24_core::op::Accumulate;

use super::{
    Pass,
    builder::Builder,
    parameter::{Bias, Handle, ParameterSpec},
};
use crate::{
    Result,
    backend::{
        DType, Region, Tensor,
        op::{Add, NormBackward, NormForward},
    },
};

/// LayerNorm over d features.
#[derive(Debug)]
pub struct Norm {
    gamma: Handle,
    beta: Option<Handle>,
    epsilon: f32,
}

/// Activations kept for the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct NormActivations {
    /// The input `[p, d]`: for a norm after a residual addition, the sum.
    pub x: Tensor,
    /// The output `[p, d]`.
    pub y: Tensor,
    /// Mean and reciprocal standard deviation `[p, 2]`.
    pub stats: Tensor,
}

impl NormActivations {
    /// Allocates output and statistics for an input that is somebody else's.
    pub fn new(builder: &mut Builder<'_>, name: &str, x: Tensor) -> Result<Self> {
        let [p, d] = x.shape;
        let y = format!("{name} y");
        let y = builder.tensor(&y, [p, d], DType::Activation, Region::Activations)?;
        let stats =
            builder.tensor(&format!("{name} stats"), [p, 2], DType::F32, Region::Activations)?;
        Ok(Self { x, y, stats })
    }

    /// The rows that the pass uses.
    #[must_use]
    pub fn rows(self, pass: &Pass<'_>) -> Self {
        self.first_rows(pass.tokens())
    }

    /// The first n rows.
    #[must_use]
    pub fn first_rows(self, n: usize) -> Self {
        let Self { x, y, stats } = self;
        Self { x: x.first_rows(n), y: y.first_rows(n), stats: stats.first_rows(n) }
    }
}

impl Norm {
    /// Allocates gamma = 1 and, with a bias, beta = 0.
    pub fn new(
        builder: &mut Builder<'_>,
        name: &str,
        d: usize,
        bias: Bias,
        epsilon: f32,
    ) -> Result<Self> {
        let gamma = builder.parameter(ParameterSpec::gain(format!("{name}.weight"), d, 1.0))?;
        let beta = builder.bias(bias, name, d)?;
        Ok(Self { gamma, beta, epsilon })
    }

    /// y = LayerNorm(x).
    pub fn forward(&self, pass: &mut Pass<'_>, kept: NormActivations) -> Result {
        pass.run(self.operation(kept))
    }

    /// x = residual + delta, y = LayerNorm(x).
    pub fn forward_residual(
        &self,
        pass: &mut Pass<'_>,
        residual: Tensor,
        delta: Tensor,
        kept: NormActivations,
    ) -> Result {
        let add = Add { x: residual, delta, out: kept.x };
        pass.sequence(&[add.into(), self.operation(kept).into()])
    }

    /// The gradient of the input, which overwrites `dx` or is added to it.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        dy: Tensor,
        kept: NormActivations,
        dx: Tensor,
        accumulate_dx: Accumulate,
    ) -> Result {
        let accumulate = pass.accumulate;
        pass.run(NormBackward {
            dy,
            x: kept.x,
            stats: kept.stats,
            gamma: self.gamma.weight,
            dx,
            accumulate_dx,
            dgamma: self.gamma.gradient,
            dbeta: self.beta.map(|beta| beta.gradient),
            accumulate,
        })
    }

    fn operation(&self, NormActivations { x, y, stats }: NormActivations) -> NormForward {
        let beta = self.beta.map(|beta| beta.weight);
        NormForward { x, gamma: self.gamma.weight, beta, epsilon: self.epsilon, y, stats }
    }
}
