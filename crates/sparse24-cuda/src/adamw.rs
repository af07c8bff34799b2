//! AdamW with clipping and masked decay over a table of tensors, and the gradient norm that it
//! clips by.
//!
//! The step is that of `sparse24_cpu::adamw`, bit for bit, with the scalars of the device's
//! [`StepState`](crate::StepState). Norm and flag stay on the device: neither operation waits.
//! Deliberately absent: any schedule.

use half::bf16;

use crate::{
    Device, Error, Matrix,
    launch::{Argument, Grid},
    operand::check_packed,
    search::{check_tiled, check_tiles},
};

/// One tensor of the optimizer, `[rows, columns]`, without gaps.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// w, updated in place.
    pub w: Matrix<f32>,
    /// dL/dw.
    pub g: Matrix<f32>,
    /// Adam's m, updated in place.
    pub m: Matrix<f32>,
    /// Adam's v, updated in place.
    pub v: Matrix<f32>,
    /// The mask of the forward `[rows/4, columns/4]`, where masked decay applies.
    pub tiles: Option<Matrix<u16>>,
    /// w rounded to bf16, overwritten by every step.
    pub shadow: Option<Matrix<bf16>>,
    /// Decoupled weight decay.
    pub weight_decay: f32,
}

/// What does not change from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Gradients are scaled by min(1, clip / (norm + 1e-6)); infinity never clips.
    pub clip: f32,
    /// Where pruned weights are pulled to zero.
    pub decay: MaskedDecay,
}

/// Where pruned weights are pulled to zero, and the decay factor lambda.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MaskedDecay {
    /// Nowhere.
    None,
    /// g + lambda * (not m) * w, after clipping and before the moments.
    OnGradients(f32),
    /// w - learning rate * lambda * (not m) * w, beside Adam's step.
    OnWeights(f32),
}

/// What the device knows of the gradients: its memory is [`Health::WORDS`] words, zero at first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Health {
    /// The L2 norm of all gradients.
    pub grad_norm: f32,
    /// What raised the flag, if it is up.
    pub non_finite: Option<NonFinite>,
}

/// The flag of a loss that is not finite: `LOSS` of `kernels/health.cuh`.
const LOSS: u32 = u32::MAX - 1;

/// What was not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NonFinite {
    /// The loss of a micro-batch.
    Loss,
    /// The gradient of the tensor at this place in the table, the first such.
    Gradient(usize),
    /// The norm of gradients that all are finite.
    Norm,
}

impl Health {
    /// 32-bit words on the device: the norm, and the flag, which is lowered by writing 0.
    pub const WORDS: usize = 2;

    /// From downloaded words.
    #[must_use]
    pub const fn of_words([norm, flag]: [u32; Self::WORDS]) -> Self {
        let non_finite = match flag {
            0 => None,
            u32::MAX => Some(NonFinite::Norm),
            LOSS => Some(NonFinite::Loss),
            place => Some(NonFinite::Gradient(place as usize - 1)),
        };
        Self { grad_norm: f32::from_bits(norm), non_finite }
    }
}

/// A table of tensors on a device, cut into chunks of which each block of a kernel takes one.
#[derive(Debug, Clone, Copy)]
pub struct Parameters {
    table: Matrix<u64>,
    chunks: Matrix<u64>,
    sums: Matrix<u64>,
}

/// Elements of a chunk, and threads that share it: `CHUNK` and `CHUNK_THREADS` of
/// `kernels/parameters.cuh`.
const CHUNK: usize = 8192;
const CHUNK_THREADS: u32 = 256;

impl Parameters {
    /// Lays the table down; the order is that in which norms are summed and tensors are named.
    ///
    /// # Errors
    /// [`Error::Semantics`] for a mask of a shape that is not tiled; [`Error::Shape`],
    /// [`Error::Stale`], [`Error::Alignment`]; [`Error::Alias`] if anything in the table shares
    /// memory; [`Error::TooLarge`], [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn new(device: &mut Device, parameters: &[Parameter]) -> Result<Self, Error> {
        const LIMIT: usize = u32::MAX as usize;
        let mut spans = Vec::new();
        let (mut table, mut chunks) = (Vec::new(), Vec::new());
        for (place, parameter) in parameters.iter().enumerate() {
            parameter.check(device, &mut spans)?;
            let (columns, groups) = (parameter.w.shape()[1], parameter.w.elements() / 4);
            for (what, found) in
                [("the number of columns", columns), ("the number of groups", groups)]
            {
                if found > LIMIT {
                    return Err(Error::TooLarge {
                        operation: OPERATION,
                        what,
                        found,
                        limit: LIMIT,
                    });
                }
            }
            let Parameter { w, g, m, v, tiles, shadow, weight_decay } = *parameter;
            let addresses = [w.address, g.address, m.address, v.address];
            let optional =
                [tiles.map_or(0, |tiles| tiles.address), shadow.map_or(0, |shadow| shadow.address)];
            let [columns, decay] = [w.shape()[1] as u32, weight_decay.to_bits()].map(u64::from);
            table.extend(
                addresses
                    .into_iter()
                    .chain(optional)
                    .chain([w.elements() as u64, columns | decay << 32]),
            );
            chunks.extend(
                (0..w.elements().div_ceil(CHUNK)).map(|part| place as u64 | (part as u64) << 32),
            );
        }
        spans.sort_by_key(|(_, span)| span.start);
        for ((other, before), (output, after)) in spans.iter().zip(spans.iter().skip(1)) {
            device.check_apart(OPERATION, (output, after.clone()), &[(other, before.clone())])?;
        }
        if chunks.len() > LIMIT {
            return Err(Error::TooLarge {
                operation: OPERATION,
                what: "the number of chunks",
                found: chunks.len(),
                limit: LIMIT,
            });
        }
        let mut lay = |name, words: &[u64]| -> Result<Matrix<u64>, Error> {
            let matrix = device.alloc(name, [1, words.len()])?;
            device.upload(matrix, words)?;
            Ok(matrix)
        };
        let sums = vec![0; chunks.len()];
        Ok(Self {
            table: lay("optimizer table", &table)?,
            chunks: lay("optimizer chunks", &chunks)?,
            sums: lay("sums of squares", &sums)?,
        })
    }
}

const OPERATION: &str = "optimizer";

impl Parameter {
    /// Adds the spans of what is not empty.
    fn check(
        &self,
        device: &Device,
        spans: &mut Vec<(&'static str, std::ops::Range<u64>)>,
    ) -> Result<(), Error> {
        let shape = self.w.shape();
        for (operand, matrix) in [("w", self.w), ("g", self.g), ("m", self.m), ("v", self.v)] {
            check_packed(device, OPERATION, operand, matrix, shape, 16)?;
            spans.push((operand, matrix.span()));
        }
        if let Some(tiles) = self.tiles {
            check_tiles(device, OPERATION, "the mask", tiles, check_tiled(OPERATION, shape)?)?;
            spans.push(("the mask", tiles.span()));
        }
        if let Some(shadow) = self.shadow {
            check_packed(device, OPERATION, "the bf16 copy", shadow, shape, 8)?;
            spans.push(("the bf16 copy", shadow.span()));
        }
        spans.retain(|(_, span)| !span.is_empty());
        Ok(())
    }
}

/// The L2 norm of all gradients into `health` `[1, 2]`; raises its flag, unless it is up, if a
/// gradient or the norm is not finite.
///
/// # Errors
/// [`Error::Shape`], [`Error::Stale`], [`Error::Driver`].
pub fn grad_norm(
    device: &mut Device,
    parameters: &Parameters,
    health: Matrix<u32>,
) -> Result<(), Error> {
    let Parameters { table, chunks, sums } = *parameters;
    check_health(device, parameters, health)?;
    device.launch(
        "square_sums",
        Grid::line(chunks.elements(), CHUNK_THREADS),
        &[table.into(), chunks.into(), sums.into()],
    )?;
    let count = Argument::U32(chunks.elements() as u32);
    device.launch(
        "norm_of_sums",
        Grid::line(1, 1024),
        &[chunks.into(), sums.into(), health.into(), count],
    )
}

/// One step of AdamW for every tensor of the table, with the norm of [`grad_norm`] and the scalars
/// of the step state; nothing while the flag is up. A NaN stays NaN, its payload does not.
///
/// # Errors
/// As [`grad_norm`].
pub fn adamw_step(
    device: &mut Device,
    parameters: &Parameters,
    rule: &AdamW,
    health: Matrix<u32>,
) -> Result<(), Error> {
    check_health(device, parameters, health)?;
    let (on_gradients, on_weights) = match rule.decay {
        MaskedDecay::None => (0.0, 0.0),
        MaskedDecay::OnGradients(lambda) => (lambda, 0.0),
        MaskedDecay::OnWeights(lambda) => (0.0, lambda),
    };
    let operands =
        [parameters.table.into(), parameters.chunks.into(), health.into(), device.state()];
    let numbers = [rule.beta1, rule.beta2, rule.epsilon, rule.clip, on_gradients, on_weights]
        .map(Argument::F32);
    device.launch(
        "adamw_step",
        Grid::line(parameters.chunks.elements(), CHUNK_THREADS),
        &[&operands[..], &numbers].concat(),
    )
}

fn check_health(
    device: &Device,
    parameters: &Parameters,
    health: Matrix<u32>,
) -> Result<(), Error> {
    device.check(OPERATION, "health", health, [1, Health::WORDS])?;
    device.check_live(OPERATION, "the table", parameters.table)
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, CHUNK_THREADS};

    #[test]
    fn chunks_are_those_of_the_kernels() {
        let text = include_str!("../kernels/parameters.cuh");
        assert!(text.contains(&format!("CHUNK = {CHUNK}, CHUNK_THREADS = {CHUNK_THREADS};")));
    }
}
