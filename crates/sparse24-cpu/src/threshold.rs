//! The soft threshold of S-STE, dense. Bit-identical to [`sparse24_core::prune::group`] for any
//! number of threads.

use ndarray::{ArrayView2, ArrayViewMut2};
use sparse24_core::{
    Mask, MaskKind,
    prune::{ValueMap, group},
};

use crate::{Error, check, prune::pattern, tasks};

/// S(w) `[r, q]`: 0 where pruned, otherwise `copysign(max(|w| - t, 0), w) * scale`, where t is the
/// second-smallest magnitude of the row group.
///
/// # Errors
/// [`Error::Shape`] unless the mask and `out` have the shape of `w`; [`Error::Semantics`] unless
/// the mask is row-wise 2:4.
pub fn soft_threshold(
    w: ArrayView2<'_, f32>,
    mask: &Mask,
    scale: f32,
    out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    const OPERATION: &str = "soft threshold";
    let (r, q) = w.dim();
    check::shape(OPERATION, "mask", [r, q], mask.shape())?;
    check::matrix(OPERATION, "out", &out, [r, q])?;
    mask.check(MaskKind::RowWise)?;
    tasks::for_rows(out, q, |row, mut out| {
        for first in (0..q).step_by(4) {
            let x = [0, 1, 2, 3].map(|i| w[[row, first + i]]);
            let map = ValueMap::SoftThreshold { scale };
            let mapped = group(x, pattern(mask, row, first / 4), map);
            (0..4).for_each(|i| out[first + i] = mapped[i]);
        }
    });
    Ok(())
}
