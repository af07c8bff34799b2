//! Token embeddings, with learned positions or sinusoidal ones.

use sparse24_core::op::Accumulate;

use super::{
    Pass,
    builder::Builder,
    parameter::{Handle, Init, ParameterSpec, Role},
    sinusoids::{ScaledSinusoids, fixed_sinusoids},
};
use crate::{
    Result,
    backend::{
        Tensor,
        op::{Embed, EmbedBackward, EmbedForward, Fill},
    },
};

/// E `[V, d]` and P `[sequence length, d]`.
#[derive(Debug)]
pub struct Embedding {
    tokens: Handle,
    /// The factor of E.
    scale: f32,
    positions: Positions,
}

#[derive(Debug)]
enum Positions {
    Absent,
    Learned(Handle),
    Sinusoidal(ScaledSinusoids),
    Fixed(Tensor),
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
        init: Init,
    ) -> Result<Self> {
        let mut table = |(name, rows): (&str, usize)| {
            let matrix = ParameterSpec::matrix(name, [rows, d_model], init);
            builder.parameter(ParameterSpec { role: Role::Embedding, ..matrix })
        };
        let tokens = table(tokens)?;
        let positions = match positions {
            None => Positions::Absent,
            Some(positions) => Positions::Learned(table(positions)?),
        };
        Ok(Self { tokens, scale: 1.0, positions })
    }

    /// Allocates the token table, given by name and rows, and [`ScaledSinusoids`], given by the
    /// name of their factor and the longest sequence.
    pub fn with_sinusoids(
        builder: &mut Builder<'_>,
        tokens: (&str, usize),
        positions: (&str, usize),
        d_model: usize,
        init: Init,
    ) -> Result<Self> {
        let tokens = Self::new(builder, tokens, None, d_model, init)?;
        let sinusoids = ScaledSinusoids::new(builder, positions, d_model)?;
        Ok(Self { positions: Positions::Sinusoidal(sinusoids), ..tokens })
    }

    /// Allocates the token table, given by name and rows, with elements from N(0, 1/d), which are
    /// multiplied by sqrt(d), and the sinusoids for the longest sequence.
    pub fn with_fixed_sinusoids(
        builder: &mut Builder<'_>,
        tokens: (&str, usize),
        longest: usize,
        d: usize,
    ) -> Result<Self> {
        let scale = libm::sqrt(d as f64);
        let init = Init::Normal((1.0 / scale) as f32);
        let tokens = Self::new(builder, tokens, None, d, init)?;
        let positions = Positions::Fixed(fixed_sinusoids(builder, longest, d)?);
        Ok(Self { positions, scale: scale as f32, ..tokens })
    }

    /// The token table, for a tied head.
    #[must_use]
    pub fn token_table(&self) -> Handle {
        self.tokens
    }

    /// `x = scale E[tokens] + P[positions]`; the scale is 1 but of fixed sinusoids.
    pub fn forward(&self, pass: &mut Pass<'_>, tokens: Tensor, x: Tensor) -> Result {
        let positions = match &self.positions {
            Positions::Absent => None,
            Positions::Learned(table) => Some(table.weight),
            Positions::Sinusoidal(sinusoids) => Some(sinusoids.forward(pass)?),
            Positions::Fixed(table) => Some(*table),
        };
        let op = self.operation(pass, tokens, self.tokens.weight, positions, x);
        pass.run(EmbedForward(op))
    }

    /// Like [`Self::forward`] for tokens that are all at one position.
    ///
    /// # Panics
    /// Unless positions are fixed sinusoids.
    pub fn forward_at(
        &self,
        pass: &mut Pass<'_>,
        tokens: Tensor,
        position: usize,
        x: Tensor,
    ) -> Result {
        let Positions::Fixed(table) = self.positions else { panic!("positions are not fixed") };
        let position = Some(table.rows(position..position + 1));
        let op = self.operation(pass, tokens, self.tokens.weight, position, x);
        pass.run(EmbedForward(Embed { sequence_length: 1, ..op }))
    }

    /// The gradients of both tables, or of the tokens' and the factor.
    pub fn backward(
        &self,
        pass: &mut Pass<'_>,
        tokens: Tensor,
        dx: Tensor,
        sharing: Sharing,
    ) -> Result {
        if pass.accumulate == Accumulate::Overwrite {
            if sharing == Sharing::Alone {
                pass.run(Fill { to: self.tokens.gradient, value: 0.0 })?;
            }
            if let Positions::Learned(table) = self.positions {
                pass.run(Fill { to: table.gradient, value: 0.0 })?;
            }
        }
        let positions = match &self.positions {
            Positions::Absent | Positions::Fixed(_) => None,
            Positions::Learned(table) => Some(table.gradient),
            Positions::Sinusoidal(sinusoids) => Some(sinusoids.cleared_gradient(pass)?),
        };
        let op = self.operation(pass, tokens, self.tokens.gradient, positions, dx);
        pass.run(EmbedBackward(op))?;
        match &self.positions {
            Positions::Sinusoidal(sinusoids) => sinusoids.backward(pass),
            Positions::Absent | Positions::Learned(_) | Positions::Fixed(_) => Ok(()),
        }
    }

    fn operation(
        &self,
        pass: &Pass<'_>,
        tokens: Tensor,
        token_table: Tensor,
        position_table: Option<Tensor>,
        rows: Tensor,
    ) -> Embed {
        let (sequence_length, scale) = (pass.batch.sequence_length, self.scale);
        Embed { tokens, sequence_length, scale, token_table, position_table, rows }
    }
}
