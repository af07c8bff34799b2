//! A masked matrix, dense or compressed. Bit-identical to [`sparse24_core`] for any number of
//! threads.

use std::any::Any;

use ndarray::{ArrayView2, ArrayViewMut2, Axis, Zip};
use sparse24_core::{
    Element, Mask, MaskKind,
    compressed::Compressed24,
    group::Pattern,
    prune::{self, ValueMap},
};

use crate::{Error, check, compressed, simd::vectorized, tasks};

/// S(w) `[r, q]`: pruned elements are +0, kept ones are unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless the mask and `out` have the shape of `w`.
pub fn masked<T: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    out: ArrayViewMut2<'_, T>,
) -> Result<(), Error> {
    let (r, q) = w.dim();
    check::shape("prune", "mask", [r, q], mask.shape())?;
    check::matrix("prune", "out", &out, [r, q])?;
    if w.is_empty() {
        return Ok(());
    }
    tasks::for_rows(out, q, |row, mut out| {
        let w = w.index_axis(Axis(0), row);
        let tiles = &mask.tiles()[row / 4 * (q / 4)..][..q / 4];
        match (out.as_slice_mut(), w.to_slice()) {
            (Some(out), Some(w)) => vectorized(
                #[inline(always)]
                || masked_row(w, tiles, 4 * (row % 4), out),
            ),
            _ => Zip::indexed(&mut out).and(w).for_each(|column, out, &w| {
                *out = if mask.keeps(row, column) { w } else { T::default() };
            }),
        }
    });
    Ok(())
}

/// Masks a row whose bits are at `shift` in each tile, sixteen columns at a time.
#[inline(always)]
fn masked_row<T: Element>(w: &[T], tiles: &[u16], shift: usize, out: &mut [T]) {
    for ((out, w), tiles) in out.chunks_mut(16).zip(w.chunks(16)).zip(tiles.chunks(4)) {
        let mut kept = 0;
        for (at, &tile) in tiles.iter().enumerate() {
            kept |= u32::from(tile >> shift & 15) << (4 * at);
        }
        let select = |(i, (out, &w)): (usize, (&mut T, &T))| {
            *out = if kept & 1 << i == 0 { T::default() } else { w }
        };
        match (out.first_chunk_mut::<16>(), w.first_chunk::<16>()) {
            (Some(out), Some(w)) => out.iter_mut().zip(w).enumerate().for_each(select),
            _ => out.iter_mut().zip(w).enumerate().for_each(select),
        }
    }
}

/// Compresses S(w) to `forward` `[r, q]` and its transpose to `dgrad` `[q, r]`.
///
/// S(w) is [`sparse24_core::prune::group`] of every row group with the mask's pattern, rounded to
/// `U`. With [`ValueMap::Identity`] and `U` = `T`, kept values are unchanged to the bit. (S-STE
/// defines its soft threshold for row-wise magnitude masks; with a transposable mask the threshold
/// is still the second-smallest magnitude of the row group.)
///
/// # Errors
/// [`Error::Shape`] unless the mask and both outputs fit `w`; [`Error::Semantics`] unless the mask
/// is transposable.
pub fn compress_weight<T: Element, U: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: &mut Compressed24<U>,
    dgrad: &mut Compressed24<U>,
) -> Result<(), Error> {
    let (r, q) = w.dim();
    check::shape("compress weight", "dgrad", [q, r], dgrad.shape())?;
    check::shape("compress weight", "mask", [r, q], mask.shape())?;
    mask.check(MaskKind::Transposable)?;
    compress_forward(w, mask, map, forward)?;
    let columns = mask.transpose();
    compressed::write(dgrad, |column, group| {
        let pattern = pattern(&columns, column, group);
        let rows = pattern.indices().map(|i| 4 * group + usize::from(i));
        (pattern, rows.map(|row| element(w, mask, map, [row, column])))
    });
    Ok(())
}

/// Compresses S(w) along its rows only; the mask need only be row-wise 2:4. Otherwise like
/// [`compress_weight`].
///
/// # Errors
/// [`Error::Shape`] unless the mask and the output have the shape of `w`; [`Error::Semantics`]
/// unless the mask is row-wise 2:4.
pub fn compress_forward<T: Element, U: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    forward: &mut Compressed24<U>,
) -> Result<(), Error> {
    let shape = w.dim().into();
    check::shape("compress weight", "mask", shape, mask.shape())?;
    check::shape("compress weight", "forward", shape, forward.shape())?;
    mask.check(MaskKind::RowWise)?;
    compressed::write(forward, |row, group| {
        let pattern = pattern(mask, row, group);
        let columns = pattern.indices().map(|i| 4 * group + usize::from(i));
        (pattern, columns.map(|column| element(w, mask, map, [row, column])))
    });
    Ok(())
}

/// The pattern of a group of a row-wise mask.
pub(crate) fn pattern(mask: &Mask, row: usize, group: usize) -> Pattern {
    let tile = mask.tiles()[row / 4 * (mask.columns() / 4) + group];
    Pattern::from_bits((tile >> (4 * (row % 4))) as u8 & 15).expect("the mask was checked")
}

/// A kept element of S(w).
fn element<T: Element, U: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    map: ValueMap,
    [row, column]: [usize; 2],
) -> U {
    let x = w[[row, column]];
    match ((&x as &dyn Any).downcast_ref(), map) {
        (Some(&same), ValueMap::Identity) => same,
        (None, ValueMap::Identity) => U::from_f32(x.to_f32()),
        (_, ValueMap::SoftThreshold { .. }) => {
            let group = column / 4;
            let x = [0, 1, 2, 3].map(|i| w[[row, 4 * group + i]].to_f32());
            U::from_f32(prune::group(x, pattern(mask, row, group), map)[column % 4])
        }
    }
}
