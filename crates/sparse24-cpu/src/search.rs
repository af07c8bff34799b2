//! Masks of whole matrices: the exact transposable search, and the two largest of every group.
//! Every mask equals that of [`sparse24_core::search`] bit for bit, at every SIMD level and for any
//! number of threads.

use ndarray::{ArrayView2, s};
use sparse24_core::{
    Element, Mask, MaskKind,
    search::{MAGNITUDE_LIMIT, PAIR_CODES, SHARED_CODES},
};

use crate::{
    Error, check,
    simd::{self, Available, Kernel, Vector, lane_of_tile},
    tasks,
};

/// Searches the mask of `w` `[r, q]`: the transposable mask of largest kept L1 norm, or the two
/// largest magnitudes of every group of four.
///
/// Any element type and any strides; rows that are contiguous are fastest. A NaN counts as the
/// largest magnitude, and ties are broken as in core.
///
/// ```
/// use ndarray::Array2;
/// use sparse24_core::{Mask, MaskKind};
/// use sparse24_cpu::search::mask_search;
///
/// let w = Array2::from_shape_fn((8, 8), |(i, j)| ((7 * i + 5 * j) % 13) as f32 - 6.0);
/// let mut mask = Mask::empty(8, 8)?;
/// mask_search(w.view(), MaskKind::Transposable, &mut mask)?;
/// assert_eq!(mask.count_kept(), 32);
/// # Ok::<(), sparse24_cpu::Error>(())
/// ```
///
/// # Errors
/// [`Error::Semantics`] unless both dimensions are multiples of 4; [`Error::Shape`] unless the mask
/// has the shape of `w`.
pub fn mask_search<T: Element>(
    w: ArrayView2<'_, T>,
    kind: MaskKind,
    mask: &mut Mask,
) -> Result<(), Error> {
    mask_search_at(Available::best(), w, kind, mask)
}

/// [`mask_search`] at a given SIMD level, with the same result.
///
/// # Errors
/// Like [`mask_search`].
pub fn mask_search_at<T: Element>(
    level: Available,
    w: ArrayView2<'_, T>,
    kind: MaskKind,
    mask: &mut Mask,
) -> Result<(), Error> {
    let (r, q) = w.dim();
    check::tiled("mask search", [r, q])?;
    check::shape("mask search", "mask", [r, q], mask.shape())?;
    if w.is_empty() {
        return Ok(());
    }
    let rows = tasks::rows_per_task(q).next_multiple_of(4);
    tasks::for_chunks(mask.tiles_mut(), rows / 4 * (q / 4), |task, tiles| {
        let w = w.slice(s![task * rows..r.min((task + 1) * rows), ..]);
        level.run(Strips { kind, w, tiles });
    });
    Ok(())
}

/// Columns that are searched together.
const PIECE: usize = 1024;

/// Rows of tiles, and where their bits go.
struct Strips<'a, T> {
    kind: MaskKind,
    w: ArrayView2<'a, T>,
    tiles: &'a mut [u16],
}

impl<T: Element> Kernel for Strips<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, v: V) {
        match self.kind {
            MaskKind::Transposable => self.search::<V, Transposable>(v),
            MaskKind::RowWise => self.search::<V, LargestTwo<false>>(v),
            MaskKind::ColumnWise => self.search::<V, LargestTwo<true>>(v),
        }
    }
}

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
                        for (i, to) in converted.iter_mut().enumerate() {
                            let row = self.w.slice(s![4 * at + i, first..first + length]);
                            to.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_f32());
                        }
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
    /// The codes or the bits of `LANES` tiles, each in the lane of its tile.
    fn search<V: Vector>(v: V, rows: [&[f32]; 4], lanes: &mut [u32]);
    /// The bits of tiles in order.
    fn finish<V: Vector>(v: V, lanes: &[u32], tiles: &mut [u16]);
}

/// Searches four rows of at most [`PIECE`] columns; the next rows are `next` elements further on.
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
    let mut at = 0;
    while at + width <= length {
        let end = at + width;
        for row in [a, b, c, e] {
            for line in (0..width).step_by(16) {
                simd::prefetch(&row[at..end], next + line);
            }
        }
        let rows = [&a[at..end], &b[at..end], &c[at..end], &e[at..end]];
        R::search(v, rows, &mut lanes[at / 4..]);
        at = end;
    }
    if at < length {
        let mut rest = [[0.0; WIDEST]; 4];
        rest.iter_mut()
            .zip([a, b, c, e])
            .for_each(|(rest, row)| rest[..length - at].copy_from_slice(&row[at..]));
        let [a, b, c, e] = &rest;
        R::search(v, [&a[..width], &b[..width], &c[..width], &e[..width]], &mut lanes[at / 4..]);
    }
    let (whole_tiles, rest) = tiles.split_at_mut(tiles.len() / 32 * 32);
    let (whole_lanes, rest_lanes) = lanes.split_at(whole_tiles.len());
    R::finish(v, whole_lanes, whole_tiles);
    if !rest.is_empty() {
        let mut found = [0; 32];
        R::finish(v, &rest_lanes[..32], &mut found);
        rest.copy_from_slice(&found[..rest.len()]);
    }
}

/// Columns that the widest level searches at a time.
const WIDEST: usize = 64;

/// The exact search; a lane holds the code of its tile.
struct Transposable;

impl Rule for Transposable {
    /// [`sparse24_core::search::code`]: the same operations in the same order.
    #[inline(always)]
    fn search<V: Vector>(v: V, rows: [&[f32]; 4], lanes: &mut [u32]) {
        let (zero, limit) = (v.splat(0.0), v.splat(MAGNITUDE_LIMIT));
        let (mut upper, mut lower, mut across) = ([zero; 4], [zero; 4], [zero; 4]);
        for at in 0..4 {
            let (a, b) = (load(v, rows[0], at, limit), load(v, rows[1], at, limit));
            let (c, e) = (load(v, rows[2], at, limit), load(v, rows[3], at, limit));
            upper[at] = v.sub(a, b);
            lower[at] = v.sub(c, e);
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
    }

    #[inline(always)]
    fn finish<V: Vector>(v: V, lanes: &[u32], tiles: &mut [u16]) {
        v.look_up(lanes, tiles);
    }
}

/// The magnitudes of vector `at` of a row.
#[inline(always)]
fn load<V: Vector>(v: V, row: &[f32], at: usize, limit: V::F) -> V::F {
    v.magnitude(v.load(&row[V::LANES * at..]), limit)
}

/// x_01, x_02, x_03, x_12, x_13, x_23 of four rows of tiles.
#[inline(always)]
fn differences<V: Vector>(v: V, x: [V::F; 4]) -> [V::F; 6] {
    let [x0, x1, x2, x3] = v.transpose_tiles(x);
    [v.sub(x0, x1), v.sub(x0, x2), v.sub(x0, x3), v.sub(x1, x2), v.sub(x1, x3), v.sub(x2, x3)]
}

/// Norm and code of the candidate of pair {j,k}; the complement of the n-th pair is the n-th from
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

/// The later candidate if its norm is strictly greater, otherwise the best one so far.
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
    let most = v.most(split, v.abs(across));
    let split_set = v.push_sign(v.push_sign(v.splat_u(codes >> 2), x23), x01);
    let together_set = v.push_sign(v.splat_u((codes | 4) >> 1), across);
    (most, v.select_u(v.above(most, split), together_set, split_set))
}

/// The two largest of every row of a tile, or of every column; a lane holds the bits of its tile.
struct LargestTwo<const COLUMNS: bool>;

impl<const COLUMNS: bool> Rule for LargestTwo<COLUMNS> {
    #[inline(always)]
    fn search<V: Vector>(v: V, rows: [&[f32]; 4], lanes: &mut [u32]) {
        let mut m = [[v.splat(0.0); 4]; 4];
        for (m, row) in m.iter_mut().zip(rows) {
            for (at, m) in m.iter_mut().enumerate() {
                *m = load(v, row, at, v.splat(f32::INFINITY));
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
                bits = v.or_u(bits, v.select_u(beaten, v.splat_u(0), bit));
            }
        }
        v.store_u(bits, lanes);
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
