//! What a mask leaves of the weights, compressed for both products in one pass.
//!
//! Values are those of [`sparse24_core::prune::group`] rounded to bf16, in the order of
//! [`layout`](crate::layout). Deliberately absent: which mask ([`crate::search`]).

use sparse24_core::prune::ValueMap;

use crate::{
    Device, Error, Matrix,
    compressed::Compressed,
    launch::{Argument, Grid},
    layout::blocks,
    search::{check_tiled, check_tiles},
};

/// What is compressed, and how. The kernels trust the mask: where it is not of the structure asked
/// for, values and metadata are unspecified.
#[derive(Debug, Clone, Copy)]
pub struct Pruned {
    /// Weights `[r, q]`.
    pub w: Matrix<f32>,
    /// Their mask `[r/4, q/4]`.
    pub tiles: Matrix<u16>,
    /// What becomes of a kept value.
    pub map: ValueMap,
}

/// Compresses S(w) `[r, q]` into `forward` and its transpose `[q, r]` into `dgrad`, both of the
/// same values; the mask is transposable.
///
/// A NaN stays NaN, its payload does not.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`], [`Error::Stale`],
/// [`Error::Alignment`], [`Error::Alias`], [`Error::TooLarge`], [`Error::Driver`].
pub fn compress_weight(
    device: &mut Device,
    pruned: &Pruned,
    forward: Compressed,
    dgrad: Compressed,
) -> Result<(), Error> {
    let [r, q] = pruned.w.shape();
    let grid = pruned.check(
        device,
        [("forward", forward), ("dgrad", dgrad)].into_iter().zip([[r, q], [q, r]]),
    )?;
    let outputs = [
        forward.values.into(),
        forward.metadata.into(),
        dgrad.values.into(),
        dgrad.metadata.into(),
    ];
    device.launch("compress_weight", grid, &pruned.arguments(&outputs))
}

/// Compresses S(w) `[r, q]` along its rows only, as [`compress_weight`] does; the mask is row-wise
/// 2:4.
///
/// # Errors
/// As [`compress_weight`].
pub fn compress_forward(
    device: &mut Device,
    pruned: &Pruned,
    forward: Compressed,
) -> Result<(), Error> {
    let grid = pruned.check(device, std::iter::once((("forward", forward), pruned.w.shape())))?;
    device.launch(
        "compress_forward",
        grid,
        &pruned.arguments(&[forward.values.into(), forward.metadata.into()]),
    )
}

impl Pruned {
    fn check(
        &self,
        device: &Device,
        outputs: impl Iterator<Item = ((&'static str, Compressed), [usize; 2])>,
    ) -> Result<Grid, Error> {
        const OPERATION: &str = "compress weight";
        const MOST_BLOCK_ROWS: usize = 65_535;
        let Self { w, tiles, .. } = *self;
        let shape = check_tiled(OPERATION, w.shape())?;
        device.check_live(OPERATION, "w", w)?;
        device.check_aligned(OPERATION, "w", w, 16)?;
        check_tiles(device, OPERATION, "the mask", tiles, shape)?;
        let mut others = vec![("w", w.span()), ("the mask", tiles.span())];
        for ((operand, output), expected) in outputs {
            output.check(device, OPERATION, operand, expected)?;
            for span in [output.values.span(), output.metadata.span()] {
                device.check_apart(OPERATION, (operand, span.clone()), &others)?;
                others.push((operand, span));
            }
        }
        let [block_rows, block_columns] = blocks(w.shape());
        for (what, found, limit) in [
            ("the number of block rows", block_rows, MOST_BLOCK_ROWS),
            ("the number of columns", w.shape()[1], i32::MAX as usize),
        ] {
            if found > limit {
                return Err(Error::TooLarge { operation: OPERATION, what, found, limit });
            }
        }
        Ok(Grid::plane([block_columns, block_rows], 256))
    }

    fn arguments(&self, outputs: &[Argument]) -> Vec<Argument> {
        let [r, q] = self.w.shape().map(|length| Argument::U32(length as u32));
        let (soft, scale) = match self.map {
            ValueMap::Identity => (0_u32, 1.0),
            ValueMap::SoftThreshold { scale } => (1, scale),
        };
        let inputs = [self.w.into(), self.tiles.into()];
        [
            &inputs,
            outputs,
            &[Argument::U64(self.w.stride() as u64), r, q, soft.into(), scale.into()],
        ]
        .concat()
    }
}
