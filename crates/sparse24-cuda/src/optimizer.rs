//! The step of an optimizer with clipping and masked decay over a table of tensors, and the
//! gradient norm for clipping.
//!
//! A step has the bits of `sparse24_cpu::optimizer`, with the scalars of the device's step state.
//! The norm and the flag stay on the device: neither operation waits.

use half::bf16;
use sparse24_core::op::{Adam, MaskedDecay, Optimizer, UpdateRule};

use crate::{
    Device, Error, Matrix, Result,
    health::Health,
    launch::{Grid, arguments},
    search::check_tiled,
};

/// One tensor of the optimizer, `[rows, columns]`, contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// Weights, updated in place.
    pub w: Matrix<f32>,
    /// Their gradient.
    pub g: Matrix<f32>,
    /// First moment, updated in place.
    pub m: Matrix<f32>,
    /// Second moment, updated in place; a rule without one does not read it.
    pub v: Option<Matrix<f32>>,
    /// Mask of the forward pass `[rows/4, columns/4]`, if masked decay applies.
    pub tiles: Option<Matrix<u16>>,
    /// The weights rounded to bf16, overwritten by every step.
    pub shadow: Option<Matrix<bf16>>,
    /// Weight decay.
    pub weight_decay: f32,
}

/// A table of tensors on a device, cut into chunks, one per thread block.
#[derive(Debug, Clone, Copy)]
pub struct Parameters {
    table: Matrix<u64>,
    chunks: Matrix<u64>,
    sums: Matrix<u64>,
    /// Whether every tensor has a second moment.
    has_v: bool,
}

/// Elements of a chunk, and threads that share it, as in `kernels/parameters.cuh`.
const CHUNK: usize = 8192;
const CHUNK_THREADS: u32 = 256;

const OPERATION: &str = "optimizer";

impl Parameters {
    /// Uploads the table. Norms are summed in its order, and a bad gradient is reported by its row.
    ///
    /// # Errors
    /// [`Error::Semantics`] if a masked tensor cannot be tiled; [`Error::Shape`], [`Error::Gaps`],
    /// [`Error::Alignment`], [`Error::Stale`]; [`Error::Alias`] if anything in the table overlaps;
    /// [`Error::TooLarge`], [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn new(device: &mut Device, parameters: &[Parameter]) -> Result<Self> {
        const LIMIT: usize = u32::MAX as usize;
        let mut checks = device.checks(OPERATION);
        let (mut table, mut chunks) = (Vec::new(), Vec::new());
        for (row, &Parameter { w, g, m, v, tiles, shadow, weight_decay }) in
            parameters.iter().enumerate()
        {
            let shape @ [_, columns] = w.shape();
            for (operand, matrix) in [("w", w), ("g", g), ("m", m)] {
                checks.input(operand, matrix, shape, 16)?;
            }
            checks.optional("v", v, shape, 16)?;
            if let Some(tiles) = tiles {
                checks.input("the mask", tiles, check_tiled(OPERATION, shape)?, 2)?;
            }
            checks
                .optional("the bf16 copy", shadow, shape, 8)?
                .limit("the number of columns", columns, LIMIT)?
                .limit("the number of groups", w.elements() / 4, LIMIT)?;
            table.extend([w, g, m].map(|matrix| matrix.address));
            table.extend([
                v.map_or(0, |v| v.address),
                tiles.map_or(0, |tiles| tiles.address),
                shadow.map_or(0, |shadow| shadow.address),
                w.elements() as u64,
                columns as u64 | u64::from(weight_decay.to_bits()) << 32,
            ]);
            let parts = w.elements().div_ceil(CHUNK) as u64;
            chunks.extend((0..parts).map(|part| row as u64 | part << 32));
        }
        checks.limit("the number of chunks", chunks.len(), LIMIT)?.all_apart("")?;
        let mut upload = |name, words: &[u64]| -> Result<Matrix<u64>> {
            let matrix = device.alloc(name, [1, words.len()])?;
            device.upload(matrix, words)?;
            Ok(matrix)
        };
        Ok(Self {
            table: upload("optimizer table", &table)?,
            chunks: upload("optimizer chunks", &chunks)?,
            sums: upload("sums of squares", &vec![0; chunks.len()])?,
            has_v: parameters.iter().all(|parameter| parameter.v.is_some()),
        })
    }

    fn check(&self, device: &Device, health: Matrix<u32>) -> Result {
        device.check_live(OPERATION, "the table", self.table)?;
        device.checks(OPERATION).input("health", health, [1, Health::WORDS], 4)?;
        Ok(())
    }
}

/// Computes the L2 norm of all gradients into `health` `[1, 2]`. Raises its flag, unless it is up,
/// if a gradient or the norm is not finite.
///
/// # Errors
/// [`Error::Shape`], [`Error::Stale`], [`Error::Driver`].
pub fn grad_norm(device: &mut Device, parameters: &Parameters, health: Matrix<u32>) -> Result {
    let Parameters { table, chunks, sums, .. } = *parameters;
    parameters.check(device, health)?;
    let grid = Grid::line(chunks.elements(), CHUNK_THREADS);
    device.launch("square_sums", grid, &arguments![table, chunks, sums])?;
    let count = chunks.elements() as u32;
    device.launch("norm_of_sums", Grid::line(1, 1024), &arguments![chunks, sums, health, count])
}

/// One step of the optimizer for every tensor of the table, with the norm of [`grad_norm`] and the
/// scalars of the step state. Does nothing while the flag is up. NaNs stay NaN, with any payload.
///
/// # Errors
/// [`Error::Shape`] for a rule whose second moment a tensor lacks; see [`grad_norm`].
pub fn optimizer_step(
    device: &mut Device,
    parameters: &Parameters,
    optimizer: &Optimizer,
    decay: MaskedDecay,
    health: Matrix<u32>,
) -> Result {
    let Parameters { table, chunks, has_v, .. } = *parameters;
    parameters.check(device, health)?;
    let Optimizer { rule, clip } = *optimizer;
    if rule.adam().is_some() && !has_v {
        let (expected, found) = ([1, 1], [0, 0]);
        return Err(Error::Shape { operation: OPERATION, operand: "v", expected, found });
    }
    let [on_gradients, on_weights] = decay.placed();
    let (kernel, Adam { beta1, beta2, epsilon }) = match rule {
        UpdateRule::AdamW(adam) => ("adamw_step", adam),
        UpdateRule::Adam(adam) => ("adam_step", adam),
        UpdateRule::Sgd { momentum } => {
            ("sgd_step", Adam { beta1: momentum, beta2: 0.0, epsilon: 0.0 })
        }
        UpdateRule::Lion { beta1, beta2 } => ("lion_step", Adam { beta1, beta2, epsilon: 0.0 }),
    };
    let state = device.state();
    device.launch(
        kernel,
        Grid::line(chunks.elements(), CHUNK_THREADS),
        &arguments![
            table,
            chunks,
            health,
            state,
            beta1,
            beta2,
            epsilon,
            clip,
            on_gradients,
            on_weights
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, CHUNK_THREADS};

    #[test]
    fn chunks_match_the_kernels() {
        let text = include_str!("../kernels/parameters.cuh");
        assert!(text.contains(&format!("CHUNK = {CHUNK}, CHUNK_THREADS = {CHUNK_THREADS};")));
    }
}
