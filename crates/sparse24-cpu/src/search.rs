//! Masks of whole matrices: the exact transposable search, group-wise pruning, the greedy baseline,
//! and the L1-norm gap.
//!
//! Every mask equals that of [`sparse24_core::search`] bit for bit, at every SIMD level and for any
//! number of threads. Deliberately absent: the definition of the search and of its ties, which is
//! core's.

use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use sparse24_core::{
    Element, Mask, MaskKind, flip,
    search::{self, MAGNITUDE_LIMIT, PAIR_CODES, SHARED_CODES},
};

use crate::{
    Error, shape,
    simd::{self, Available, Kernel, Vector, lane_of_tile},
    strips::{self, PIECE},
};

/// The mask of `w` `[r, q]`: exact transposable search, or the two largest magnitudes of every
/// group of four.
///
/// Any element type, any strides; rows that are contiguous are fastest. NaN counts as the largest
/// magnitude; ties are core's.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`] unless the mask
/// has the shape of `w`.
pub fn mask_search<T: Element>(
    w: ArrayView2<'_, T>,
    kind: MaskKind,
    mask: &mut Mask,
) -> Result<(), Error> {
    mask_search_at(Available::best(), w, kind, mask)
}

/// [`mask_search`] at a chosen SIMD level; the mask is the same.
///
/// # Errors
/// As [`mask_search`].
pub fn mask_search_at<T: Element>(
    level: Available,
    w: ArrayView2<'_, T>,
    kind: MaskKind,
    mask: &mut Mask,
) -> Result<(), Error> {
    for_strips(w, mask, |w, tiles| level.run(Strips { kind, w, tiles }))
}

/// The transposable mask of core's greedy 2-approximation, the baseline of the exact search.
///
/// # Errors
/// As [`mask_search`].
pub fn mask_search_greedy<T: Element>(w: ArrayView2<'_, T>, mask: &mut Mask) -> Result<(), Error> {
    for_strips(w, mask, |w, tiles| {
        let q = w.ncols();
        for (at, bits) in tiles.iter_mut().enumerate() {
            *bits = search::greedy(&tile_of(w, [at / (q / 4), at % (q / 4)])).bits();
        }
    })
}

/// The L1-norm gap of every tile of `w` `[r, q]`: kept norm of its best pattern minus that of the
/// best other one; `out` is `[r/4, q/4]`.
///
/// # Errors
/// [`Error::Semantics`] unless both lengths are multiples of 4; [`Error::Shape`] unless `out` has
/// one element a tile.
pub fn tile_gap<T: Element>(
    w: ArrayView2<'_, T>,
    mut out: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    let (r, q) = w.dim();
    shape::check_tiled("tile gap", [r, q])?;
    shape::check("tile gap", "out", [r / 4, q / 4], [out.nrows(), out.ncols()])?;
    out.axis_iter_mut(Axis(0)).into_par_iter().enumerate().for_each(|(tile_row, mut out)| {
        out.iter_mut()
            .enumerate()
            .for_each(|(at, out)| *out = flip::tile_gap(&tile_of(w, [tile_row, at])));
    });
    Ok(())
}

/// Runs `f` on some rows and their tiles, until all of `w` is done.
fn for_strips<T: Element>(
    w: ArrayView2<'_, T>,
    mask: &mut Mask,
    f: impl Fn(ArrayView2<'_, T>, &mut [u16]) + Sync,
) -> Result<(), Error> {
    let (r, q) = w.dim();
    shape::check_tiled("mask search", [r, q])?;
    shape::check("mask search", "mask", [r, q], mask.shape())?;
    if w.is_empty() {
        return Ok(());
    }
    let rows = strips::rows_per_task(q).next_multiple_of(4);
    strips::for_chunks(mask.tiles_mut(), rows / 4 * (q / 4), |task, tiles| {
        f(w.slice(s![task * rows..r.min((task + 1) * rows), ..]), tiles)
    });
    Ok(())
}

fn tile_of<T: Element>(w: ArrayView2<'_, T>, [row, column]: [usize; 2]) -> [f32; 16] {
    core::array::from_fn(|at| w[[4 * row + at / 4, 4 * column + at % 4]].to_f32())
}

/// Some strips of four rows.
struct Strips<'a, T> {
    kind: MaskKind,
    w: ArrayView2<'a, T>,
    tiles: &'a mut [u16],
}

impl<T: Element> Kernel for Strips<'_, T> {
    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        match self.kind {
            MaskKind::Transposable => self.search::<V, Transposable>(v),
            MaskKind::RowWise => self.search::<V, LargestTwo<false>>(v),
            MaskKind::ColumnWise => self.search::<V, LargestTwo<true>>(v),
        }
    }
}

// Every function below is part of a kernel and must be inlined into it, closures too: what is not
// is compiled for no level.

impl<T: Element> Strips<'_, T> {
    #[inline(always)]
    fn search<V: Vector, R: Rule>(self, v: V) {
        let q = self.w.ncols();
        let stored = self.w.to_slice().and_then(T::as_f32s);
        let (mut converted, mut lanes) = ([[0.0; PIECE]; 4], [0; PIECE / 4]);
        for (at, tiles) in self.tiles.chunks_exact_mut(q / 4).enumerate() {
            for (first, tiles) in (0..q).step_by(PIECE).zip(tiles.chunks_mut(PIECE / 4)) {
                let length = PIECE.min(q - first);
                let rows = match stored {
                    Some(w) => {
                        let row = |i: usize| &w[(4 * at + i) * q + first..][..length];
                        [row(0), row(1), row(2), row(3)]
                    }
                    None => {
                        let rows = self.w.slice(s![4 * at..4 * at + 4, first..first + length]);
                        strips::widen(rows, &mut converted);
                        let [a, b, c, e] = &converted;
                        [&a[..length], &b[..length], &c[..length], &e[..length]]
                    }
                };
                search_piece::<V, R>(v, rows, 4 * q, &mut lanes, tiles);
            }
        }
    }
}

/// How a tile is searched.
trait Rule {
    /// The code or the bits of `LANES` tiles side by side, each in its lane; true for tiles that
    /// [`search_each`] must search again.
    fn search<V: Vector>(v: V, rows: [&[f32]; 4], lanes: &mut [u32]) -> V::M;
    /// The bits of tiles in order.
    fn finish<V: Vector>(v: V, lanes: &[u32], tiles: &mut [u16]);
}

/// At most [`PIECE`] columns of four rows.
#[inline(always)]
fn search_piece<V: Vector, R: Rule>(
    v: V,
    [a, b, c, e]: [&[f32]; 4],
    next: usize,
    lanes: &mut [u32; PIECE / 4],
    tiles: &mut [u16],
) {
    let (width, length) = (4 * V::LANES, a.len());
    let (b, c, e) = (&b[..length], &c[..length], &e[..length]);
    let mut again = v.above(v.splat(0.0), v.splat(0.0));
    let mut at = 0;
    while at + width <= length {
        let end = at + width;
        for row in [a, b, c, e] {
            for line in (0..width).step_by(16) {
                simd::prefetch(&row[at..end], next + line);
            }
        }
        let found = R::search(
            v,
            [&a[at..end], &b[at..end], &c[at..end], &e[at..end]],
            &mut lanes[at / 4..],
        );
        again = v.or(again, found);
        at = end;
    }
    if at < length {
        let mut rest = [[0.0; WIDEST]; 4];
        rest.iter_mut()
            .zip([a, b, c, e])
            .for_each(|(rest, row)| rest[..length - at].copy_from_slice(&row[at..]));
        let [a, b, c, e] = &rest;
        let found = R::search(
            v,
            [&a[..width], &b[..width], &c[..width], &e[..width]],
            &mut lanes[at / 4..],
        );
        again = v.or(again, found);
    }
    let (whole_tiles, rest) = tiles.split_at_mut(tiles.len() / 32 * 32);
    let (whole_lanes, rest_lanes) = lanes.split_at(whole_tiles.len());
    R::finish(v, whole_lanes, whole_tiles);
    if !rest.is_empty() {
        let mut found = [0; 32];
        R::finish(v, &rest_lanes[..32], &mut found);
        rest.copy_from_slice(&found[..rest.len()]);
    }
    if v.any(again) {
        search_each([a, b, c, e], tiles);
    }
}

/// Columns that the widest level searches at a time.
const WIDEST: usize = 64;

/// The exact search; a lane holds the code of its tile.
struct Transposable;

impl Rule for Transposable {
    /// [`search::code`]: the same operations in the same order.
    #[inline(always)]
    fn search<V: Vector>(v: V, rows: [&[f32]; 4], lanes: &mut [u32]) -> V::M {
        let zero = v.splat(0.0);
        let (mut upper, mut lower, mut across) = ([zero; 4], [zero; 4], [zero; 4]);
        for at in 0..4 {
            let (a, b) = (
                v.quick_magnitude(load(v, rows[0], at), MAGNITUDE_LIMIT),
                v.quick_magnitude(load(v, rows[1], at), MAGNITUDE_LIMIT),
            );
            let (c, e) = (
                v.quick_magnitude(load(v, rows[2], at), MAGNITUDE_LIMIT),
                v.quick_magnitude(load(v, rows[3], at), MAGNITUDE_LIMIT),
            );
            upper[at] = v.sub_aside(a, b);
            lower[at] = v.sub_aside(c, e);
            across[at] = v.sub(v.add(a, b), v.add(c, e));
        }
        let (upper, lower, across) =
            (differences(v, upper), differences(v, lower), differences(v, across));

        let mut best = pair_candidate(v, 0, &upper, &lower, &across);
        for pair in 1..6 {
            best = later(v, best, pair_candidate(v, pair, &upper, &lower, &across));
        }
        best = later(v, best, top_minus_bottom(v, across, SHARED_CODES.into()));
        let ((norm_upper, set_upper), (norm_lower, set_lower)) =
            (top_minus_bottom(v, upper, 0), top_minus_bottom(v, lower, 0));
        best = later(v, best, (v.add(norm_upper, norm_lower), v.join_octal(set_upper, set_lower)));
        v.store_u(best.1, lanes);
        // D_01 and D_23 are sums over the whole tile: one is a NaN where the quick magnitude let
        // one through.
        if V::QUICK_LEAVES_NAN { v.unordered(across[0], across[5]) } else { v.above(zero, zero) }
    }

    #[inline(always)]
    fn finish<V: Vector>(v: V, lanes: &[u32], tiles: &mut [u16]) {
        v.look_up(lanes, tiles);
    }
}

/// The tiles of a piece, one by one.
#[cold]
#[inline(never)]
fn search_each(rows: [&[f32]; 4], tiles: &mut [u16]) {
    for (tile, bits) in tiles.iter_mut().enumerate() {
        *bits = search::transposable(&core::array::from_fn(|at| rows[at / 4][4 * tile + at % 4]))
            .bits();
    }
}

/// Vector `at` of a row.
#[inline(always)]
fn load<V: Vector>(v: V, row: &[f32], at: usize) -> V::F {
    v.load(&row[V::LANES * at..])
}

/// x_01, x_02, x_03, x_12, x_13, x_23 of four rows of tiles.
#[inline(always)]
fn differences<V: Vector>(v: V, x: [V::F; 4]) -> [V::F; 6] {
    let [x0, x1, x2, x3] = v.transpose_tiles(x);
    [
        v.sub(x0, x1),
        v.sub_aside(x0, x2),
        v.sub(x0, x3),
        v.sub(x1, x2),
        v.sub_aside(x1, x3),
        v.sub(x2, x3),
    ]
}

/// Norm and code of the candidate of a pair {j,k}; the complement of the n-th pair is the n-th from
/// the end.
#[inline(always)]
fn pair_candidate<V: Vector>(
    v: V,
    pair: usize,
    upper: &[V::F; 6],
    lower: &[V::F; 6],
    across: &[V::F; 6],
) -> (V::F, V::U) {
    let (d, d_lower, shared) = (upper[pair], lower[pair], across[5 - pair]);
    let norm = v.add(v.add(v.abs(d), v.abs(d_lower)), v.abs(shared));
    let code = v.splat_u((u32::from(PAIR_CODES) >> 3) + pair as u32);
    (norm, v.push_sign(v.push_sign(v.push_sign(code, d_lower), d), shared))
}

/// The later candidate where its norm is strictly greater.
#[inline(always)]
fn later<V: Vector>(
    v: V,
    (best, code): (V::F, V::U),
    (norm, candidate): (V::F, V::U),
) -> (V::F, V::U) {
    (v.most(norm, best), v.select_u(v.above(norm, best), candidate, code))
}

/// tb(x) of the differences x_01, x_02, x_03, x_12, x_13, x_23, and `codes` plus the three bits of
/// its set.
#[inline(always)]
fn top_minus_bottom<V: Vector>(
    v: V,
    [x01, x02, _, _, x13, x23]: [V::F; 6],
    codes: u32,
) -> (V::F, V::U) {
    let across = v.add(x02, x13);
    let split = v.add(v.abs(x01), v.abs(x23));
    let most = v.most_abs(split, across);
    let split_set = v.push_sign(v.push_sign(v.splat_u(codes >> 2), x23), x01);
    let together_set = v.push_sign(v.splat_u((codes | 4) >> 1), across);
    (most, v.select_u(v.above(most, split), together_set, split_set))
}

/// The two largest of every row of a tile, or of every column; a lane holds the bits of its tile.
struct LargestTwo<const COLUMNS: bool>;

impl<const COLUMNS: bool> Rule for LargestTwo<COLUMNS> {
    #[inline(always)]
    fn search<V: Vector>(v: V, rows: [&[f32]; 4], lanes: &mut [u32]) -> V::M {
        let mut m = [[v.splat(0.0); 4]; 4];
        for (m, row) in m.iter_mut().zip(rows) {
            for (at, m) in m.iter_mut().enumerate() {
                *m = v.magnitude(load(v, row, at), f32::INFINITY);
            }
            *m = v.transpose_tiles(*m);
        }
        let mut bits = v.splat_u(0);
        for group in 0..4 {
            let place = |at: usize| if COLUMNS { (at, group) } else { (group, at) };
            let element = |at: usize| m[place(at).0][place(at).1];
            let [a, b, c, e] = [element(0), element(1), element(2), element(3)];
            // A later element beats an earlier one only if it is larger.
            let (b_a, c_a, e_a) = (v.above(b, a), v.above(c, a), v.above(e, a));
            let (c_b, e_b, e_c) = (v.above(c, b), v.above(e, b), v.above(e, c));
            let beaten = [
                two(v, b_a, c_a, e_a),
                two(v, v.not(b_a), c_b, e_b),
                two(v, v.not(c_a), v.not(c_b), e_c),
                two(v, v.not(e_a), v.not(e_b), v.not(e_c)),
            ];
            for (at, beaten) in beaten.into_iter().enumerate() {
                let bit = v.splat_u(1 << (4 * place(at).0 + place(at).1));
                bits = v.xor(bits, v.select_u(beaten, v.splat_u(0), bit));
            }
        }
        v.store_u(bits, lanes);
        v.above(v.splat(0.0), v.splat(0.0))
    }

    #[inline(always)]
    fn finish<V: Vector>(_: V, lanes: &[u32], tiles: &mut [u16]) {
        for (tiles, lanes) in tiles.chunks_exact_mut(V::LANES).zip(lanes.chunks_exact(V::LANES)) {
            tiles
                .iter_mut()
                .enumerate()
                .for_each(|(at, tile)| *tile = lanes[lane_of_tile(at, V::LANES)] as u16);
        }
    }
}

/// At least two of three.
#[inline(always)]
fn two<V: Vector>(v: V, x: V::M, y: V::M, z: V::M) -> V::M {
    v.or(v.and(x, y), v.and(z, v.or(x, y)))
}
