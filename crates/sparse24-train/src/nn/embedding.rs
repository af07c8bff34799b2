//! Token and learned position embeddings, and the head tied to the former.

use super::{
    Pass,
    parameter::{Handle, Init, Parameters},
};
use crate::{
    Error,
    backend::{Backend, Embed, HeadGradients, HeadLoss, Tensor},
};

/// E `[V, d]` and P `[T, d]`; E is also the head.
#[derive(Debug)]
pub struct Embedding {
    tokens: Handle,
    positions: Handle,
}

/// What the head needs besides the embedding.
#[derive(Debug, Clone, Copy)]
pub struct HeadBuffers {
    /// Scratch `[rows at a time, V]`.
    pub logits: Tensor,
    /// `[p, 1]`.
    pub targets: Tensor,
    /// One f32: the sum of the tokens' losses.
    pub loss: Tensor,
}

impl Embedding {
    /// Allocates both tables under these names.
    ///
    /// # Errors
    /// Those of the allocations.
    pub fn new(
        backend: &mut dyn Backend,
        parameters: &mut Parameters,
        [tokens, positions]: [(&str, usize); 2],
        width: usize,
        deviation: f32,
    ) -> Result<Self, Error> {
        let mut table = |(name, rows): (&str, usize)| {
            parameters.add(backend, name.to_owned(), [rows, width], Init::Normal(deviation))
        };
        Ok(Self { tokens: table(tokens)?, positions: table(positions)? })
    }

    /// `x = E[tokens] + P[positions]`.
    ///
    /// # Errors
    /// Those of [`Backend::embed_forward`].
    pub fn forward(&self, pass: &mut Pass<'_>, tokens: Tensor, x: Tensor) -> Result<(), Error> {
        let (token_table, position_table) = (self.tokens.weight, self.positions.weight);
        pass.backend.embed_forward(&Embed {
            tokens,
            context: pass.context,
            token_table,
            position_table,
            rows: x,
        })
    }

    /// Adds to the gradients of both tables. The head's [`Self::loss`] came before and began E's;
    /// P's begins here.
    ///
    /// # Errors
    /// Those of [`Backend::embed_backward`].
    pub fn backward(&self, pass: &mut Pass<'_>, tokens: Tensor, dx: Tensor) -> Result<(), Error> {
        if pass.beta == crate::backend::Beta::Overwrite {
            pass.backend.fill(self.positions.gradient, 0.0)?;
        }
        let (token_table, position_table) = (self.tokens.gradient, self.positions.gradient);
        pass.backend.embed_backward(&Embed {
            tokens,
            context: pass.context,
            token_table,
            position_table,
            rows: dx,
        })
    }

    /// The sum of the tokens' losses, without gradients.
    ///
    /// # Errors
    /// Those of [`Backend::head_loss`].
    pub fn loss(&self, pass: &mut Pass<'_>, x: Tensor, head: HeadBuffers) -> Result<(), Error> {
        pass.backend.head_loss(&self.operation(x, head, None))
    }

    /// The sum of the tokens' losses, and the gradients of `scale` times it.
    ///
    /// # Errors
    /// Those of [`Backend::head_loss`].
    pub fn loss_and_gradient(
        &self,
        pass: &mut Pass<'_>,
        x: Tensor,
        head: HeadBuffers,
        scale: f32,
        dx: Tensor,
    ) -> Result<(), Error> {
        let gradients =
            HeadGradients { scale, dx, dembedding: self.tokens.gradient, beta: pass.beta };
        pass.backend.head_loss(&self.operation(x, head, Some(gradients)))
    }

    /// out = x E^T.
    ///
    /// # Errors
    /// Those of [`Backend::logits`].
    pub fn logits(&self, pass: &mut Pass<'_>, x: Tensor, out: Tensor) -> Result<(), Error> {
        pass.backend.logits(x, self.tokens.weight, out)
    }

    fn operation(
        &self,
        x: Tensor,
        head: HeadBuffers,
        gradients: Option<HeadGradients>,
    ) -> HeadLoss {
        let HeadBuffers { logits, targets, loss } = head;
        HeadLoss {
            x,
            embedding: self.tokens.weight,
            targets,
            smoothing: 0.0,
            logits,
            loss,
            gradients,
        }
    }
}
