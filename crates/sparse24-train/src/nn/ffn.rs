//! The feed-forward block: Y = act(X W_up^T) W_down^T, where the paper's sparsity lives.

use super::{Pass, linear24::Linear24};
use crate::{
    Error,
    backend::{Activation, Tensor},
};

/// Two linear layers around an activation.
#[derive(Debug)]
pub struct Ffn {
    /// `[d_ff * activation.width(), d]`.
    pub up: Linear24,
    /// `[d, d_ff]`.
    pub down: Linear24,
    /// Between them.
    pub activation: Activation,
}

/// What the block keeps between forward and backward.
#[derive(Debug, Clone, Copy)]
pub struct FfnActivations {
    /// Z = X W_up^T `[p, d_ff * activation.width()]`.
    pub z: Tensor,
    /// H = act(Z) `[p, d_ff]`.
    pub h: Tensor,
}

impl Ffn {
    /// y = act(x W_up^T) W_down^T.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn forward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        kept: FfnActivations,
        y: Tensor,
    ) -> Result<(), Error> {
        self.widen(pass, x, kept)?;
        self.narrow(pass, kept, y)
    }

    /// Z = x W_up^T and H = act(Z): all that the backward pass wants.
    ///
    /// # Errors
    /// Those of the layer.
    pub fn widen(&self, pass: &mut Pass<'_>, x: Tensor, kept: FfnActivations) -> Result<(), Error> {
        self.up.forward(pass, x, kept.z, Some((self.activation, kept.h)))
    }

    /// y = H W_down^T.
    ///
    /// # Errors
    /// Those of the layer.
    pub fn narrow(
        &self,
        pass: &mut Pass<'_>,
        kept: FfnActivations,
        y: Tensor,
    ) -> Result<(), Error> {
        self.down.forward(pass, kept.h, y, None)
    }

    /// The gradients; `dz` `[p, d_ff * activation.width()]` is scratch.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        kept: FfnActivations,
        dy: Tensor,
        dz: Tensor,
        dx: Tensor,
    ) -> Result<(), Error> {
        self.down.backward(pass, kept.h, dy, dz, Some((self.activation, kept.z)))?;
        self.up.backward(pass, x, dz, dx, None)
    }
}
