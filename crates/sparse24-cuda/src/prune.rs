//! Pruned weights, compressed for both products in one pass, or dense.
//!
//! Values are those of [`sparse24_core::prune::group`], rounded to bf16, in the order of
//! [`layout`](crate::layout).

use half::bf16;
use sparse24_core::prune::ValueMap;

use crate::{
    Device, Error, Matrix,
    compressed::Compressed,
    launch::{Argument, Grid, arguments},
    layout::blocks,
    search::check_tiled,
};

/// Weights, their mask, and the map of kept values. Kernels trust the mask: if it lacks the
/// required structure, values and metadata are unspecified.
#[derive(Debug, Clone, Copy)]
pub struct Pruned {
    /// Weights `[r, q]`.
    pub w: Matrix<f32>,
    /// Mask `[r/4, q/4]`.
    pub tiles: Matrix<u16>,
    /// How kept values are mapped.
    pub map: ValueMap,
}

/// Compresses S(w) `[r, q]` into `forward` and its transpose `[q, r]` into `dgrad`, with the same
/// values. The mask must be transposable. NaNs stay NaN, with any payload.
///
/// # Errors
/// [`Error::Semantics`] unless r and q are multiples of 4; [`Error::Shape`], [`Error::Stale`],
/// [`Error::Alignment`], [`Error::Alias`], [`Error::TooLarge`], [`Error::Driver`].
pub fn compress_weight(
    device: &mut Device,
    pruned: &Pruned,
    forward: Compressed,
    dgrad: Compressed,
) -> Result<(), Error> {
    pruned.compress(device, "compress_weight", &[("forward", forward), ("dgrad", dgrad)])
}

/// Compresses S(w) `[r, q]` along its rows only. The mask must be 2:4 along rows.
///
/// # Errors
/// See [`compress_weight`].
pub fn compress_forward(
    device: &mut Device,
    pruned: &Pruned,
    forward: Compressed,
) -> Result<(), Error> {
    pruned.compress(device, "compress_forward", &[("forward", forward)])
}

/// out = S(w) `[r, q]` in bf16, with pruned elements +0 and the values of [`compress_forward`]. Any
/// mask will do.
///
/// # Errors
/// See [`compress_weight`].
pub fn prune_dense(device: &mut Device, pruned: &Pruned, out: Matrix<bf16>) -> Result<(), Error> {
    const OPERATION: &str = "prune";
    let Pruned { w, tiles, .. } = *pruned;
    let shape @ [r, q] = w.shape();
    let tiled = check_tiled(OPERATION, shape)?;
    device
        .checks(OPERATION)
        .strided("w", w, shape, 16)?
        .input("the mask", tiles, tiled, 2)?
        .output("S(w)", out, shape, 8)?
        .limit("the number of columns", q, i32::MAX as usize)?;
    let (soft, scale) = pruned.soft();
    let grid = Grid::line((r * q / 4).div_ceil(256), 256);
    let (stride, r, q) = (w.stride() as u64, r as u32, q as u32);
    device.launch("prune_dense", grid, &arguments![w, tiles, out, stride, r, q, soft, scale])
}

impl Pruned {
    /// Whether kept values are thresholded, and their scale.
    fn soft(&self) -> (u32, f32) {
        match self.map {
            ValueMap::Identity => (0, 1.0),
            ValueMap::SoftThreshold { scale } => (1, scale),
        }
    }

    /// The outputs are S(w), and S(w)^T if there are two.
    fn compress(
        &self,
        device: &mut Device,
        entry: &'static str,
        outputs: &[(&'static str, Compressed)],
    ) -> Result<(), Error> {
        const OPERATION: &str = "compress weight";
        const MAX_BLOCK_ROWS: usize = 65_535;
        let Self { w, tiles, .. } = *self;
        let shape @ [r, q] = w.shape();
        let [block_rows, block_columns] = blocks(shape);
        let mut checks = device.checks(OPERATION);
        let tiled = check_tiled(OPERATION, shape)?;
        checks.strided("w", w, shape, 16)?.input("the mask", tiles, tiled, 2)?;
        for ((operand, output), expected) in outputs.iter().zip([[r, q], [q, r]]) {
            output.check_output(&mut checks, OPERATION, operand, expected)?;
        }
        checks.limit("the number of block rows", block_rows, MAX_BLOCK_ROWS)?.limit(
            "the number of columns",
            q,
            i32::MAX as usize,
        )?;
        let (soft, scale) = self.soft();
        let outputs: Vec<Argument> = outputs
            .iter()
            .flat_map(|(_, output)| arguments![output.values, output.metadata])
            .collect();
        let sizes = arguments![w.stride() as u64, r as u32, q as u32, soft, scale];
        let arguments = [&arguments![w, tiles], &outputs[..], &sizes].concat();
        device.launch(entry, Grid::plane([block_columns, block_rows], 256), &arguments)
    }
}
