//! Masks of whole matrices: the exact transposable search, group-wise pruning, the greedy baseline, and the L1-norm gap.
//!
//! Every mask equals that of [`sparse24_core::search`] bit for bit, at every SIMD level and for any number of threads. Deliberately
//! absent: the definition of the search and of its ties, which is core's.

use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{
    Element, Mask, MaskKind, flip,
    search::{self, MAGNITUDE_LIMIT, PAIR_CODES, SHARED_CODES},
};

use crate::{
    Error, shape,
    simd::{Available, Kernel, Vector},
    strips,
};

/// The mask of `w` `[r, q]`: exact transposable search, or the two largest magnitudes of every group of four.
///
/// Any element type, any strides; rows that are contiguous are fastest. NaN counts as the largest magnitude; ties are core's.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`] unless the mask has the shape of `w`.
pub fn mask_search<T: Element>(w: ArrayView2<'_, T>, kind: MaskKind, mask: &mut Mask) -> Result<(), Error> {
    mask_search_at(Available::best(), w, kind, mask)
}

/// [`mask_search`] at a chosen SIMD level; the mask is the same.
///
/// # Errors
/// As [`mask_search`].
pub fn mask_search_at<T: Element>(level: Available, w: ArrayView2<'_, T>, kind: MaskKind, mask: &mut Mask) -> Result<(), Error> {
    search_with(w, mask, |rows, tiles| level.run(Strip { kind, rows, tiles }))
}

/// The transposable mask of core's greedy 2-approximation, the baseline of the exact search.
///
/// # Errors
/// As [`mask_search`].
pub fn mask_search_greedy<T: Element>(w: ArrayView2<'_, T>, mask: &mut Mask) -> Result<(), Error> {
    search_with(w, mask, |rows, tiles| {
        for (at, bits) in tiles.iter_mut().enumerate() {
            *bits = search::greedy(&tile_of(rows, at)).bits();
        }
    })
}

/// The L1-norm gap of every tile of `w` `[r, q]`: kept norm of its best pattern minus that of the best other one; `out` is `[r/4, q/4]`.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`] unless `out` has one element a tile.
pub fn tile_gap<T: Element>(w: ArrayView2<'_, T>, mut out: ArrayViewMut2<'_, f32>) -> Result<(), Error> {
    let (r, q) = w.dim();
    shape::check_tiled("tile gap", [r, q])?;
    shape::check("tile gap", "out", [r / 4, q / 4], [out.nrows(), out.ncols()])?;
    out.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(tile_row, mut out)| {
        strips::strip(w.slice(s![4 * tile_row..4 * tile_row + 4, ..]), |first, rows| {
            for at in 0..rows[0].len() / 4 {
                out[first / 4 + at] = flip::tile_gap(&tile_of(rows, at));
            }
        });
    });
    Ok(())
}

/// Runs `kernel` on four rows and their tiles, over all of `w`.
fn search_with<T: Element>(w: ArrayView2<'_, T>, mask: &mut Mask, kernel: impl Fn([&[f32]; 4], &mut [u16]) + Sync) -> Result<(), Error> {
    let (r, q) = w.dim();
    shape::check_tiled("mask search", [r, q])?;
    shape::check("mask search", "mask", [r, q], mask.shape())?;
    if w.is_empty() {
        return Ok(());
    }
    let strips_per_task = strips::rows_per_task(4 * q);
    strips::for_chunks(mask.tiles_mut(), strips_per_task * (q / 4), |task, tiles| {
        for (at, tiles) in tiles.chunks_exact_mut(q / 4).enumerate() {
            let row = 4 * (task * strips_per_task + at);
            strips::strip(w.slice(s![row..row + 4, ..]), |first, rows| {
                kernel(rows, &mut tiles[first / 4..first / 4 + rows[0].len() / 4]);
            });
        }
    });
    Ok(())
}

/// The row-major tile `at` of four rows.
#[inline(always)]
fn tile_of(rows: [&[f32]; 4], at: usize) -> [f32; 16] {
    core::array::from_fn(|i| rows[i / 4][4 * at + i % 4])
}

/// The search of one strip.
struct Strip<'a> {
    kind: MaskKind,
    rows: [&'a [f32]; 4],
    tiles: &'a mut [u16],
}

impl Kernel for Strip<'_> {
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        let Self { kind, rows, tiles } = self;
        let (width, whole) = (4 * V::LANES, tiles.len() / V::LANES * V::LANES);
        let (whole_tiles, rest) = tiles.split_at_mut(whole);
        for (at, tiles) in whole_tiles.chunks_exact_mut(V::LANES).enumerate() {
            search_tiles(v, kind, rows.map(|row| &row[width * at..][..width]), tiles);
        }
        if !rest.is_empty() {
            let (mut columns, mut found) = ([[0.0; WIDEST]; 4], [0; WIDEST / 4]);
            for (columns, row) in columns.iter_mut().zip(rows) {
                columns[..4 * rest.len()].copy_from_slice(&row[4 * whole..]);
            }
            search_tiles(v, kind, columns.each_ref().map(|columns| &columns[..width]), &mut found);
            rest.copy_from_slice(&found[..rest.len()]);
        }
    }
}

// Every function below is part of a kernel and must be inlined into it, closures too: what is not is compiled for no level.

/// `LANES` tiles of four rows.
#[inline(always)]
fn search_tiles<V: Vector>(v: V, kind: MaskKind, rows: [&[f32]; 4], tiles: &mut [u16]) {
    let bits = match kind {
        MaskKind::Transposable => transposable(v, rows),
        MaskKind::RowWise => pairs::<V, false>(v, rows),
        MaskKind::ColumnWise => pairs::<V, true>(v, rows),
    };
    v.store_tiles(bits, tiles);
}

/// Columns that the widest level searches at a time.
const WIDEST: usize = 64;

/// Vector `at` of a row, as magnitudes.
#[inline(always)]
fn magnitudes<V: Vector>(v: V, row: &[f32], at: usize) -> V::F {
    v.least(v.abs(v.load(&row[V::LANES * at..])), v.splat(MAGNITUDE_LIMIT))
}

/// [`search::transposable`] of `LANES` tiles: the same operations in the same order.
#[inline(always)]
fn transposable<V: Vector>(v: V, rows: [&[f32]; 4]) -> V::U {
    let zero = v.splat(0.0);
    let (mut upper, mut lower, mut across) = ([zero; 4], [zero; 4], [zero; 4]);
    for at in 0..4 {
        let (a, b) = (magnitudes(v, rows[0], at), magnitudes(v, rows[1], at));
        let (c, e) = (magnitudes(v, rows[2], at), magnitudes(v, rows[3], at));
        upper[at] = v.sub(a, b);
        lower[at] = v.sub(c, e);
        across[at] = v.sub(v.add(a, b), v.add(c, e));
    }
    let (upper, lower, across) = (differences(v, upper), differences(v, lower), differences(v, across));

    let (mut best, mut code) = pair_candidate(v, 0, &upper, &lower, &across);
    for pair in 1..6 {
        (best, code) = later(v, (best, code), pair_candidate(v, pair, &upper, &lower, &across));
    }
    (best, code) = later(v, (best, code), top_minus_bottom(v, across, SHARED_CODES.into()));
    let ((norm_upper, set_upper), (norm_lower, set_lower)) = (top_minus_bottom(v, upper, 0), top_minus_bottom(v, lower, 0));
    let split = (v.add(norm_upper, norm_lower), v.join_octal(set_upper, set_lower));
    v.tile_bits(later(v, (best, code), split).1)
}

/// x_01, x_02, x_03, x_12, x_13, x_23 of four rows of tiles.
#[inline(always)]
fn differences<V: Vector>(v: V, x: [V::F; 4]) -> [V::F; 6] {
    let [x0, x1, x2, x3] = v.transpose_tiles(x);
    [v.sub(x0, x1), v.sub(x0, x2), v.sub(x0, x3), v.sub(x1, x2), v.sub(x1, x3), v.sub(x2, x3)]
}

/// Norm and code of the candidate of a pair {j,k}; the complement of the n-th pair is the n-th from the end.
#[inline(always)]
fn pair_candidate<V: Vector>(v: V, pair: usize, upper: &[V::F; 6], lower: &[V::F; 6], across: &[V::F; 6]) -> (V::F, V::U) {
    let (d, d_lower, shared) = (upper[pair], lower[pair], across[5 - pair]);
    let norm = v.add(v.add(v.abs(d), v.abs(d_lower)), v.abs(shared));
    let code = v.splat_u((u32::from(PAIR_CODES) >> 3) + pair as u32);
    (norm, v.push_sign(v.push_sign(v.push_sign(code, d_lower), d), shared))
}

/// The later candidate where its norm is strictly greater.
#[inline(always)]
fn later<V: Vector>(v: V, (best, code): (V::F, V::U), (norm, candidate): (V::F, V::U)) -> (V::F, V::U) {
    (v.most(norm, best), v.select_u(v.above(norm, best), candidate, code))
}

/// tb(x) of the differences x_01, x_02, x_03, x_12, x_13, x_23, and `codes` plus the three bits of its set.
#[inline(always)]
fn top_minus_bottom<V: Vector>(v: V, [x01, x02, _, _, x13, x23]: [V::F; 6], codes: u32) -> (V::F, V::U) {
    let across = v.add(x02, x13);
    let (split, together) = (v.add(v.abs(x01), v.abs(x23)), v.abs(across));
    let split_set = v.push_sign(v.push_sign(v.splat_u(codes >> 2), x23), x01);
    let together_set = v.push_sign(v.splat_u((codes | 4) >> 1), across);
    (v.most(together, split), v.select_u(v.above(together, split), together_set, split_set))
}

/// The tile bits of `LANES` tiles whose groups, rows or columns of the tile, keep their two largest.
#[inline(always)]
fn pairs<V: Vector, const COLUMNS: bool>(v: V, rows: [&[f32]; 4]) -> V::U {
    let zero = [v.splat(0.0); 4];
    let mut m = [zero; 4];
    for (m, row) in m.iter_mut().zip(rows) {
        *m = v.transpose_tiles([magnitudes(v, row, 0), magnitudes(v, row, 1), magnitudes(v, row, 2), magnitudes(v, row, 3)]);
    }
    let mut bits = v.splat_u(0);
    for group in 0..4 {
        let element = |at: usize| if COLUMNS { (at, group) } else { (group, at) };
        for at in 0..4 {
            // An element is beaten by a larger one, and by an equal one before it; it is kept unless two beat it.
            let mut beaten = [v.above(zero[0], zero[0]); 3];
            for (beaten, other) in beaten.iter_mut().zip((0..4).filter(|&other| other != at)) {
                let (own, other_m) = (m[element(at).0][element(at).1], m[element(other).0][element(other).1]);
                *beaten = if other > at { v.above(other_m, own) } else { v.not(v.above(own, other_m)) };
            }
            let [x, y, z] = beaten;
            let twice = v.or(v.and(x, y), v.and(z, v.or(x, y)));
            bits = v.xor(bits, v.select_u(twice, v.splat_u(0), v.splat_u(1 << (4 * element(at).0 + element(at).1))));
        }
    }
    bits
}
