//! Token embeddings, with learned positions.

use sparse24_core::op::Accumulate;

use super::{
    Pass,
    builder::Builder,
    parameter::{Handle, ParameterSpec, Role},
};
use crate::{
    Error,
    backend::{
        Tensor,
        op::{Embed, EmbedBackward, EmbedForward, Fill},
    },
};

/// E `[V, d]` and P `[sequence length, d]`.
#[derive(Debug)]
pub struct Embedding {
    tokens: Handle,
    positions: Option<Handle>,
}

/// Whether a head shares the token table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// The head's backward pass comes first, and has written the gradient of the token table.
    Tied,
    /// The embedding alone uses the token table.
    Alone,
}

impl Embedding {
    /// Allocates the tables, given by name and rows.
    pub fn new(
        builder: &mut Builder<'_>,
        tokens: (&str, usize),
        positions: Option<(&str, usize)>,
        d_model: usize,
        deviation: f32,
    ) -> Result<Self, Error> {
        let mut table = |(name, rows): (&str, usize)| {
            let matrix = ParameterSpec::matrix(name, [rows, d_model], deviation);
            builder.parameter(ParameterSpec { role: Role::Embedding, ..matrix })
        };
        Ok(Self { tokens: table(tokens)?, positions: positions.map(table).transpose()? })
    }

    /// The token table, for a tied head.
    #[must_use]
    pub fn token_table(&self) -> Handle {
        self.tokens
    }

    /// `x = E[tokens] + P[positions]`.
    pub fn forward(&self, pass: &mut Pass<'_>, tokens: Tensor, x: Tensor) -> Result<(), Error> {
        let op = self.operation(pass, tokens, x, |handle| handle.weight);
        pass.run(EmbedForward(op))
    }

    /// The gradients of both tables.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        tokens: Tensor,
        dx: Tensor,
        sharing: Sharing,
    ) -> Result<(), Error> {
        if pass.accumulate == Accumulate::Overwrite {
            let alone = (sharing == Sharing::Alone).then_some(self.tokens);
            for table in alone.into_iter().chain(self.positions) {
                pass.run(Fill { to: table.gradient, value: 0.0 })?;
            }
        }
        let op = self.operation(pass, tokens, dx, |handle| handle.gradient);
        pass.run(EmbedBackward(op))
    }

    fn operation(
        &self,
        pass: &Pass<'_>,
        tokens: Tensor,
        rows: Tensor,
        part: fn(Handle) -> Tensor,
    ) -> Embed {
        Embed {
            tokens,
            sequence_length: pass.batch.sequence_length,
            token_table: part(self.tokens),
            position_table: self.positions.map(part),
            rows,
        }
    }
}
