//! How much a mask changes: flips, the flip rate, and the L1-norm gap of a tile.

use crate::{
    Error,
    mask::{Mask, check_shape},
    search::{magnitude, transposable},
    tile::TilePattern,
};

/// |m(a) - m(b)|_1: the number of elements that one mask keeps and the other does not.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree.
pub fn flip_count(a: &Mask, b: &Mask) -> Result<u64, Error> {
    check_shape("flip count", a.shape(), b.shape())?;
    Ok(a.tiles().iter().zip(b.tiles()).map(|(a, b)| u64::from((a ^ b).count_ones())).sum())
}

/// The flip rate flips / D over consecutive optimizer steps (the paper's definition 4.1), where D
/// counts the sparsifiable weights. 0 if D is 0.
#[must_use]
pub fn flip_rate(flips: u64, weights: u64) -> f64 {
    if weights == 0 { 0.0 } else { flips as f64 / weights as f64 }
}

/// The L1-norm gap of a row-major tile: the kept norm of its best pattern minus that of the best
/// other one, at least 0. Norms are sums of [`magnitude`]s in f64, row-major.
#[must_use]
pub fn tile_gap(tile: &[f32; 16]) -> f32 {
    let best = transposable(tile);
    let second = TilePattern::ALL
        .into_iter()
        .filter(|&pattern| pattern != best)
        .map(|pattern| kept_norm(tile, pattern));
    (kept_norm(tile, best) - second.fold(f64::NEG_INFINITY, f64::max)).max(0.0) as f32
}

/// The sum of the kept [`magnitude`]s in f64, row-major.
#[must_use]
pub fn kept_norm(tile: &[f32; 16], pattern: TilePattern) -> f64 {
    (0..16)
        .filter(|&at| pattern.keeps(at / 4, at % 4))
        .map(|at| f64::from(magnitude(tile[at])))
        .sum()
}
