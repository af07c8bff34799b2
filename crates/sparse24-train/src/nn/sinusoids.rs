//! Sinusoidal positions: with a learned factor, or fixed.

use super::{
    Pass,
    builder::Builder,
    parameter::{Handle, ParameterSpec},
};
use crate::{
    Result,
    backend::{
        DType, Region, Tensor,
        op::{Fill, Scale, ScaleGrad},
    },
};

/// P = s S `[sequence length, d]` with a learned s, which starts at d^-0.5, and the sinusoids
/// (Vaswani et al. 2017, interleaved)
///
/// ```text
/// S[p, 2i] = sin(p / 10000^(2i / d))
/// S[p, 2i + 1] = cos(p / 10000^(2i / d))
/// ```
///
/// S is computed in f64 and rounded once.
#[derive(Debug)]
pub struct ScaledSinusoids {
    scale: Handle,
    sinusoids: Tensor,
    /// P and dP.
    positions: Tensor,
    dpositions: Tensor,
}

impl ScaledSinusoids {
    /// Allocates s, given by its name, and S for the longest sequence.
    pub fn new(
        builder: &mut Builder<'_>,
        (name, longest): (&str, usize),
        d: usize,
    ) -> Result<Self> {
        let initial = libm::pow(d as f64, -0.5) as f32;
        let scale = builder.parameter(ParameterSpec::gain(name, 1, initial))?;
        let shape = [longest, d];
        let sinusoids = builder.constant("sinusoids", shape, sinusoid)?;
        let mut table = |name| builder.tensor(name, shape, DType::F32, Region::Activations);
        let (positions, dpositions) = (table("positions")?, table("dpositions")?);
        Ok(Self { scale, sinusoids, positions, dpositions })
    }

    /// P, for the positions of the batch.
    pub fn forward(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        let [x, out] = [self.sinusoids, self.positions].map(|table| used(pass, table));
        pass.run(Scale { x, scale: self.scale.weight, out })?;
        Ok(out)
    }

    /// dP = 0, for the positions of the batch.
    pub fn cleared_gradient(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        let to = used(pass, self.dpositions);
        pass.run(Fill { to, value: 0.0 })?;
        Ok(to)
    }

    /// ds, from dP.
    pub fn backward(&self, pass: &mut Pass<'_>) -> Result {
        let [x, dout] = [self.sinusoids, self.dpositions].map(|table| used(pass, table));
        pass.run(ScaleGrad { x, dout, ds: self.scale.gradient, accumulate: pass.accumulate })
    }
}

/// The rows of the positions of a batch.
fn used(pass: &Pass<'_>, table: Tensor) -> Tensor {
    table.first_rows(pass.batch.sequence_length)
}

/// S `[longest, d]`, the fixed positions of fairseq's Transformer, for an even d of at least 4:
///
/// ```text
/// S[p, i] = sin((p + 2) 10000^(-i / (d/2 - 1)))    S[p, d/2 + i] = cos(the same)    i < d/2
/// ```
///
/// fairseq numbers positions after its padding token, whose id is 1, so the first is 2. S is
/// computed in f64 and rounded once.
pub(super) fn fixed_sinusoids(
    builder: &mut Builder<'_>,
    longest: usize,
    d: usize,
) -> Result<Tensor> {
    builder.constant("sinusoids", [longest, d], fixed_sinusoid)
}

/// S[p, j] of fairseq's Transformer.
#[must_use]
pub fn fixed_sinusoid([p, j]: [usize; 2], d: usize) -> f32 {
    let (half, position) = (d / 2, (p + 2) as f64);
    let angle = position * libm::pow(10000.0, -((j % half) as f64) / (half - 1) as f64);
    (if j < half { libm::sin(angle) } else { libm::cos(angle) }) as f32
}

fn sinusoid([p, j]: [usize; 2], d: usize) -> f32 {
    let angle = p as f64 / libm::pow(10000.0, (j - j % 2) as f64 / d as f64);
    (if j.is_multiple_of(2) { libm::sin(angle) } else { libm::cos(angle) }) as f32
}

#[cfg(test)]
mod tests {
    use super::sinusoid;

    /// The bits of sines and cosines in f64, rounded to f32.
    #[test]
    fn sinusoids_have_the_documented_bits() {
        for (at, bits) in [
            ([0, 0], 0),
            ([0, 1], 0x3f80_0000),
            ([1, 0], 0x3f57_6aa4),
            ([1, 1], 0x3f0a_5140),
            ([1, 2], 0x3d3e_0d1d),
            ([1, 3], 0x3f7f_b96b),
            ([127, 4], 0x3e8a_593a),
            ([127, 5], 0x3f76_7a1e),
            ([511, 0], 0x3f61_bbb4),
            ([511, 1], 0xbef1_7fe5),
        ] {
            assert_eq!(sinusoid(at, 6).to_bits(), bits, "{at:?}");
        }
    }
}
