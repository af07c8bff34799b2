//! The feed-forward block, Y = act(X W_up^T + b) W_down^T + b, where the paper's sparsity lives.

use sparse24_core::op::Activation;

use super::{
    Pass,
    builder::Builder,
    linear24::{Linear24, LinearSpec, Through},
    parameter::{Bias, Init, Sparsity},
};
use crate::{Result, backend::Tensor};

/// Two linear layers around an activation.
#[derive(Debug)]
pub struct Ffn {
    up: Linear24,
    down: Linear24,
    activation: Activation,
}

/// The declaration of an [`Ffn`].
#[derive(Debug, Clone)]
pub struct FfnSpec {
    /// Names of the two layers.
    pub names: [String; 2],
    /// Features in and out.
    pub d_model: usize,
    /// Features after the activation.
    pub d_ff: usize,
    /// Between the layers.
    pub activation: Activation,
    /// Biases of both layers.
    pub bias: Bias,
    /// The initial weights.
    pub init: [Init; 2],
}

/// Activations kept for the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct FfnActivations {
    /// Z = X W_up^T + b `[p, d_ff * activation.columns_in()]`.
    pub z: Tensor,
    /// H = act(Z) `[p, d_ff]`.
    pub h: Tensor,
}

impl FfnActivations {
    /// Allocates them.
    pub fn new(
        builder: &mut Builder<'_>,
        name: &str,
        d_ff: usize,
        activation: Activation,
    ) -> Result<Self> {
        let z = builder.activation(&format!("{name}.z"), d_ff * activation.columns_in())?;
        Ok(Self { z, h: builder.activation(&format!("{name}.h"), d_ff)? })
    }

    /// The rows that the pass uses.
    #[must_use]
    pub fn rows(self, pass: &Pass<'_>) -> Self {
        Self { z: pass.rows(self.z), h: pass.rows(self.h) }
    }
}

impl Ffn {
    /// Allocates both layers.
    pub fn new(builder: &mut Builder<'_>, spec: FfnSpec) -> Result<Self> {
        let FfnSpec { names: [up, down], d_model, d_ff, activation, bias, init } = spec;
        let mut linear = |name, shape, init| {
            let sparsity = Sparsity::Sparsifiable;
            Linear24::new(builder, LinearSpec { name, shape, init, bias, sparsity })
        };
        let up = linear(up, [d_ff * activation.columns_in(), d_model], init[0])?;
        Ok(Self { up, down: linear(down, [d_model, d_ff], init[1])?, activation })
    }

    /// Z and H: all that the backward pass needs.
    pub fn forward_up(&self, pass: &mut Pass<'_>, x: Tensor, kept: FfnActivations) -> Result {
        self.up.forward_activation(pass, x, kept.z, self.activation, kept.h)
    }

    /// Y = H W_down^T + b.
    pub fn forward_down(&self, pass: &mut Pass<'_>, kept: FfnActivations, y: Tensor) -> Result {
        self.down.forward(pass, kept.h, y)
    }

    /// The gradients; `dz`, the shape of Z, and `dh`, the shape of H, are scratch.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        kept: FfnActivations,
        dy: Tensor,
        FfnActivations { z: dz, h: dh }: FfnActivations,
        dx: Tensor,
    ) -> Result {
        let through = Through { activation: self.activation, z: kept.z, dh };
        let sampling = self.up.sampling(pass, dz);
        self.down.backward_activation(pass, kept.h, dy, through, dz, sampling)?;
        self.up.backward_sampled(pass, x, dz, dx)
    }
}
