//! Layers: forward and backward written out, no tape. A layer holds handles; a [`Pass`] says how it
//! runs.
//!
//! Data walks one way: a layer reads activations that its caller owns and writes activations that
//! its caller owns.

use sparse24_core::{
    mvue::Estimator,
    philox::{Purpose, Site},
};

use crate::{
    Error,
    backend::{Backend, Beta, Dropout, Tensor},
    method::Phase,
};

pub mod attention;
pub mod embedding;
pub mod ffn;
pub mod linear24;
pub mod norm;
pub mod parameter;

/// How a forward or backward pass runs.
pub struct Pass<'a> {
    /// The device.
    pub backend: &'a mut dyn Backend,
    /// The operands of the products.
    pub phase: &'a Phase,
    /// Sequences in the batch.
    pub sequences: usize,
    /// Tokens a sequence.
    pub context: usize,
    /// The probability of dropout; 0 when evaluating.
    pub dropout: f32,
    /// Whether parameter gradients begin anew or add up.
    pub beta: Beta,
    /// Who looks at gradients before they are sampled; nobody in a recorded segment.
    pub watch: Option<&'a mut Watch<'a>>,
}

/// Called for every output gradient that is about to be sampled.
pub type Watch<'a> = dyn FnMut(&mut dyn Backend, SampledGradient) -> Result<(), Error> + 'a;

/// An output gradient that is about to be sampled.
#[derive(Debug, Clone, Copy)]
pub struct SampledGradient {
    /// The weight whose gradient it is for.
    pub weight: Tensor,
    /// dZ `[p, r]`.
    pub dz: Tensor,
    /// How it will be sampled.
    pub estimator: Estimator,
}

impl Pass<'_> {
    /// p: tokens in the batch.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sequences * self.context
    }

    /// The dropout of one place in the model; none when its probability is 0.
    #[must_use]
    pub fn dropout_at(&self, place: u32) -> Option<Dropout> {
        (self.dropout > 0.0)
            .then(|| Dropout { p: self.dropout, site: Site::new(Purpose::Dropout, place) })
    }

    /// Drops elements of `x` in place, or of its gradient.
    ///
    /// # Errors
    /// Those of [`Backend::dropout`].
    pub fn drop_in_place(&mut self, x: Tensor, place: u32) -> Result<(), Error> {
        match self.dropout_at(place) {
            Some(dropout) => self.backend.dropout(x, dropout),
            None => Ok(()),
        }
    }
}
