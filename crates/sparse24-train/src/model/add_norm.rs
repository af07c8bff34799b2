//! The end of a half block that normalizes its output.

use sparse24_core::{op::Accumulate, philox::Site};

use crate::{
    Result,
    backend::Tensor,
    nn::{Bias, Builder, Norm, NormActivations, Pass},
};

/// y = norm(x + dropout(delta)).
#[derive(Debug)]
pub(super) struct AddNorm {
    norm: Norm,
    dropout: Site,
    kept: NormActivations,
}

impl AddNorm {
    /// Allocates the norm, which has a bias, and what it keeps.
    pub(super) fn new(
        builder: &mut Builder<'_>,
        name: &str,
        d_model: usize,
        epsilon: f32,
    ) -> Result<Self> {
        let norm = Norm::new(builder, name, d_model, Bias::Present, epsilon)?;
        let dropout = builder.dropout_site();
        let x = builder.activation(&format!("{name} x"), d_model)?;
        Ok(Self { norm, dropout, kept: NormActivations::new(builder, name, x)? })
    }

    /// y, for the largest batch.
    pub(super) fn output(&self) -> Tensor {
        self.kept.y
    }

    /// y. `delta` is dropped out in place.
    pub(super) fn forward(&self, pass: &mut Pass<'_>, x: Tensor, delta: Tensor) -> Result<Tensor> {
        let kept = self.kept.rows(pass);
        pass.drop_in_place(delta, self.dropout)?;
        self.norm.forward_residual(pass, x, delta, kept)?;
        Ok(kept.y)
    }

    /// Overwrites `dx` with the gradient of x, from that of y. Returns the gradient of delta: `dx`
    /// without dropout, else `ddelta`.
    pub(super) fn backward(
        &self,
        pass: &mut Pass<'_>,
        dy: Tensor,
        dx: Tensor,
        ddelta: Tensor,
    ) -> Result<Tensor> {
        let kept = self.kept.rows(pass);
        self.norm.backward(pass, dy, kept, dx, Accumulate::Overwrite)?;
        pass.before_dropout(dx, ddelta, self.dropout)
    }
}
