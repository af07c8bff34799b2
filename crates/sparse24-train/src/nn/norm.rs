//! LayerNorm, fused with the residual addition before it.

use super::{
    Pass,
    linear24::Bias,
    parameter::{Handle, Init, Parameters},
};
use crate::{
    Error,
    backend::{Backend, DType, NormBackward, NormForward, Region, Tensor},
};

/// LayerNorm over d features.
#[derive(Debug)]
pub struct Norm {
    gamma: Handle,
    beta: Option<Handle>,
}

/// What the norm keeps between forward and backward.
#[derive(Debug, Clone, Copy)]
pub struct NormActivations {
    /// x + delta `[p, d]`.
    pub residual: Tensor,
    /// `[p, d]`.
    pub y: Tensor,
    /// `[p, 2]`.
    pub stats: Tensor,
}

impl NormActivations {
    /// Allocates them for p tokens of d features.
    ///
    /// # Errors
    /// Those of the allocations.
    pub fn new(backend: &mut dyn Backend, name: &str, [p, d]: [usize; 2]) -> Result<Self, Error> {
        let mut alloc = |part: &str, columns, dtype| {
            backend.alloc(&format!("{name} {part}"), [p, columns], dtype, Region::Activations)
        };
        Ok(Self {
            residual: alloc("residual", d, DType::Activation)?,
            y: alloc("y", d, DType::Activation)?,
            stats: alloc("stats", 2, DType::F32)?,
        })
    }

    /// Those of the first tokens.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn first_rows(self, tokens: usize) -> Self {
        Self {
            residual: self.residual.first_rows(tokens),
            y: self.y.first_rows(tokens),
            stats: self.stats.first_rows(tokens),
        }
    }
}

impl Norm {
    /// Allocates gamma = 1 and, if wanted, beta = 0.
    ///
    /// # Errors
    /// Those of the allocations.
    pub fn new(
        backend: &mut dyn Backend,
        parameters: &mut Parameters,
        name: &str,
        width: usize,
        bias: Bias,
    ) -> Result<Self, Error> {
        let gamma =
            parameters.add(backend, format!("{name}.weight"), [1, width], Init::Constant(1.0))?;
        let beta = match bias {
            Bias::Absent => None,
            Bias::Present => Some(parameters.add(
                backend,
                format!("{name}.bias"),
                [1, width],
                Init::Constant(0.0),
            )?),
        };
        Ok(Self { gamma, beta })
    }

    /// residual = x + delta, y = LayerNorm(residual).
    ///
    /// # Errors
    /// Those of [`Backend::norm_forward`].
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        delta: Option<Tensor>,
        kept: NormActivations,
    ) -> Result<(), Error> {
        pass.backend.norm_forward(&NormForward {
            x,
            delta,
            gamma: self.gamma.weight,
            beta: self.beta.map(|beta| beta.weight),
            residual: kept.residual,
            y: kept.y,
            stats: kept.stats,
        })
    }

    /// Adds the norm's gradient to `dresidual`.
    ///
    /// # Errors
    /// Those of [`Backend::norm_backward`].
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        dy: Tensor,
        kept: NormActivations,
        dresidual: Tensor,
    ) -> Result<(), Error> {
        pass.backend.norm_backward(&NormBackward {
            dy,
            residual: kept.residual,
            stats: kept.stats,
            gamma: self.gamma.weight,
            dresidual,
            dgamma: self.gamma.gradient,
            dbeta: self.beta.map(|beta| beta.gradient),
            accumulate: pass.beta,
        })
    }
}
