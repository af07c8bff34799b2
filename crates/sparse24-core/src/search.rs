//! The transposable search: the tile pattern of largest kept L1 norm, and the greedy
//! 2-approximation that it is compared with.
//!
//! With rows a, b, c, e of the magnitudes m, d = a-b, d' = c-e, D = (a+b)-(c+e) and x_jk = x_j -
//! x_k,
//!
//! ```text
//! 2*best - sum(m) = max{ (|d_jk| + |d'_jk|) + |D_il| for the 6 pairs {j,k} with complement {i,l},
//!                        tb(D),
//!                        tb(d) + tb(d') }
//! tb(x) = max(|x_01| + |x_23|, |x_02 + x_13|)
//! ```
//!
//! because the column sums of rows a+b of the 90 patterns are (1,1,1,1) (36 of them), (2,2,0,0) (6)
//! or (2,1,1,0) (48). The order of evaluation and the ties are part of the definition: every
//! operation is rounded to f32, and none are fused. The kept norm is optimal within 2^-21 of the
//! tile's sum, and exactly optimal if the sums are exact. A transposed tile keeps the same norm but
//! not always the same elements, so a mask belongs to the orientation in which it was searched:
//! [out, in].

use ndarray::ArrayView2;

use crate::{
    Element, Error,
    group::Pattern,
    mask::{Mask, check_tiled},
    prune,
    tile::{self, MaskKind, TilePattern},
};

/// Magnitudes saturate at this value, so that no sum over a tile overflows.
pub const MAGNITUDE_LIMIT: f32 = (1_u128 << 124) as f32;

/// m(w) = min(|w|, 2^124); a NaN counts as 2^124, so it is kept and noticed downstream.
#[must_use]
#[inline]
pub fn magnitude(w: f32) -> f32 {
    let a = w.abs();
    if a < MAGNITUDE_LIMIT { a } else { MAGNITUDE_LIMIT }
}

/// The pairs {j, k} of the first six candidates, in their order of precedence.
pub const PAIRS: [[usize; 2]; 6] = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]];

/// First code of the pair candidates:
/// `64 + 8*pair + (sign D_il | sign d_jk << 1 | sign d'_jk << 2)`.
///
/// Below it, `8*set(d) + set(d')` are the codes of tb(d) + tb(d').
pub const PAIR_CODES: u8 = 64;

/// First code of the candidate tb(D): `112 + set(D)`.
///
/// A set has three bits: first form `sign x_01 | sign x_23 << 1`, second form
/// `4 | sign (x_02 + x_13)`.
pub const SHARED_CODES: u8 = 112;

/// The tile bits of every 7-bit code; 0 for codes that the search never returns.
pub const CODES: [u16; 128] = code_table();

/// The pattern of largest kept L1 norm of a row-major tile: exact, canonical, and the same bits on
/// every backend. Every input gives one of the 90 patterns.
///
/// ```
/// use sparse24_core::search::transposable;
///
/// let tile = [9.0, 8.0, 0.0, 1.0, 1.0, 9.0, 8.0, 0.0, 0.0, 1.0, 9.0, 8.0, 8.0, 0.0, 1.0, 9.0];
/// assert_eq!(transposable(&tile).row(0).indices(), [0, 1]);
/// assert_eq!(transposable(&tile).row(3).indices(), [0, 3]);
/// ```
#[must_use]
#[inline]
pub fn transposable(tile: &[f32; 16]) -> TilePattern {
    TilePattern::from_bits(CODES[usize::from(code(tile))])
        .expect("the search yields only codes of the table")
}

/// The 7-bit code of the winning candidate and its signs, an index into [`CODES`].
#[must_use]
#[inline]
pub fn code(tile: &[f32; 16]) -> u8 {
    let row = |i: usize| -> [f32; 4] { core::array::from_fn(|j| magnitude(tile[4 * i + j])) };
    let [a, b, c, e] = [row(0), row(1), row(2), row(3)];
    let upper: [f32; 4] = core::array::from_fn(|j| a[j] - b[j]);
    let lower: [f32; 4] = core::array::from_fn(|j| c[j] - e[j]);
    let across: [f32; 4] = core::array::from_fn(|j| (a[j] + b[j]) - (c[j] + e[j]));
    let minus = |x: &[f32; 4], [j, k]: [usize; 2]| x[j] - x[k];

    let mut best = f32::NEG_INFINITY;
    let mut code = 0;
    let mut offer = |norm: f32, candidate: u8| {
        if norm > best {
            (best, code) = (norm, candidate);
        }
    };
    for pair in 0..6 {
        // Lexicographic pairs: the complement of the n-th is the n-th from the end.
        let (jk, il) = (PAIRS[pair], PAIRS[5 - pair]);
        let (d, d_lower, shared) = (minus(&upper, jk), minus(&lower, jk), minus(&across, il));
        let signs = sign(shared) | sign(d) << 1 | sign(d_lower) << 2;
        offer((d.abs() + d_lower.abs()) + shared.abs(), PAIR_CODES + 8 * pair as u8 + signs);
    }
    let (norm, set) = top_minus_bottom(&across);
    offer(norm, SHARED_CODES + set);
    let ((norm_upper, set_upper), (norm_lower, set_lower)) =
        (top_minus_bottom(&upper), top_minus_bottom(&lower));
    offer(norm_upper + norm_lower, 8 * set_upper + set_lower);
    code
}

/// The greedy 2-approximation: keep the largest element whose row and column keep fewer than two,
/// repeat, then complete the pattern to one of the 90.
///
/// If the greedy pass stalls at seven with the open cell (i,j) already kept, it exchanges a kept
/// (k,l) for the free (i,l) and (k,j) with the largest m(i,l) + m(k,j) - m(k,l). Ties go to the
/// lowest (k,l), and equal magnitudes are taken lowest index first.
///
/// Source: Hubara et al., "Accelerated sparse neural training", NeurIPS 2021, section 4.
#[must_use]
pub fn greedy(tile: &[f32; 16]) -> TilePattern {
    let m = tile.map(magnitude);
    let mut order: [usize; 16] = core::array::from_fn(|i| i);
    order.sort_by(|&x, &y| m[y].total_cmp(&m[x]));
    let (mut bits, mut row_kept, mut column_kept) = (0_u16, [0; 4], [0; 4]);
    for at in order {
        let (row, column) = (at / 4, at % 4);
        if row_kept[row] < 2 && column_kept[column] < 2 {
            bits |= 1 << at;
            row_kept[row] += 1;
            column_kept[column] += 1;
        }
    }
    TilePattern::from_bits(bits).unwrap_or_else(|| complete(&m, bits, row_kept, column_kept))
}

fn complete(m: &[f32; 16], bits: u16, row_kept: [u8; 4], column_kept: [u8; 4]) -> TilePattern {
    let open = |kept: [u8; 4]| {
        kept.iter()
            .position(|&n| n < 2)
            .expect("a stalled greedy pass leaves an open row and column")
    };
    let (i, j) = (open(row_kept), open(column_kept));
    let keeps = |row: usize, column: usize| bits >> (4 * row + column) & 1 == 1;
    let mut best: Option<(f32, u16)> = None;
    for (k, l) in (0..16).map(|at| (at / 4, at % 4)) {
        if keeps(k, l) && !keeps(i, l) && !keeps(k, j) {
            let gain = (m[4 * i + l] + m[4 * k + j]) - m[4 * k + l];
            if best.is_none_or(|(most, _)| gain > most) {
                best = Some((gain, bits ^ 1 << (4 * k + l) ^ 1 << (4 * i + l) ^ 1 << (4 * k + j)));
            }
        }
    }
    let completed = best.expect("a stalled greedy pass can be completed by one exchange").1;
    TilePattern::from_bits(completed).expect("the exchange restores two in every row and column")
}

/// The mask of a `[rows, columns]` matrix: the exact transposable search, or the two largest of
/// every group.
///
/// # Errors
/// [`Error::NotTiled`] unless both dimensions are multiples of 4.
pub fn mask_search<T: Element>(w: ArrayView2<'_, T>, kind: MaskKind) -> Result<Mask, Error> {
    let rows_of = |tile: &[f32; 16]| {
        (0..4).fold(0, |bits, row| {
            let group: Pattern = prune::largest_two(core::array::from_fn(|j| tile[4 * row + j]));
            bits | u16::from(group.bits()) << (4 * row)
        })
    };
    per_tile(w, |tile| match kind {
        MaskKind::Transposable => transposable(tile).bits(),
        MaskKind::RowWise => rows_of(tile),
        MaskKind::ColumnWise => {
            tile::transpose(rows_of(&core::array::from_fn(|at| tile[at % 4 * 4 + at / 4])))
        }
    })
}

/// The transposable mask of [`greedy`].
///
/// # Errors
/// Like [`mask_search`].
pub fn mask_search_greedy<T: Element>(w: ArrayView2<'_, T>) -> Result<Mask, Error> {
    per_tile(w, |tile| greedy(tile).bits())
}

fn per_tile<T: Element>(
    w: ArrayView2<'_, T>,
    bits: impl Fn(&[f32; 16]) -> u16,
) -> Result<Mask, Error> {
    let (rows, columns) = w.dim();
    check_tiled("mask search", [rows, columns])?;
    let tiles = (0..rows / 4)
        .flat_map(|i| (0..columns / 4).map(move |j| (i, j)))
        // Rows without columns are not counted through.
        .take((rows / 4).saturating_mul(columns / 4))
        .map(|(i, j)| {
            bits(&core::array::from_fn(|at| w[[4 * i + at / 4, 4 * j + at % 4]].to_f32()))
        })
        .collect();
    Mask::from_tiles(rows, columns, tiles)
}

fn sign(x: f32) -> u8 {
    u8::from(x.is_sign_negative())
}

/// tb(x) and the three bits of its set.
fn top_minus_bottom(x: &[f32; 4]) -> (f32, u8) {
    let (x01, x23) = (x[0] - x[1], x[2] - x[3]);
    let across = (x[0] - x[2]) + (x[1] - x[3]);
    let (split, together) = (x01.abs() + x23.abs(), across.abs());
    if together > split {
        (together, 4 | sign(across))
    } else {
        (split, sign(x01) | sign(x23) << 1)
    }
}

const fn code_table() -> [u16; 128] {
    const fn tile(rows: [u16; 4]) -> u16 {
        rows[0] | rows[1] << 4 | rows[2] << 8 | rows[3] << 12
    }
    /// The two columns of a set of top_minus_bottom.
    const fn set(code: usize) -> u16 {
        if code & 4 == 0 { 1 << (code & 1) | 4 << (code >> 1 & 1) } else { 3 << (2 * (code & 1)) }
    }
    let mut table = [0; 128];
    let mut upper = 0;
    while upper < 6 {
        let mut lower = 0;
        while lower < 6 {
            let (a, c) = (set(upper), set(lower));
            table[8 * upper + lower] = tile([a, a ^ 0xf, c, c ^ 0xf]);
            lower += 1;
        }
        let a = set(upper);
        table[SHARED_CODES as usize + upper] = tile([a, a, a ^ 0xf, a ^ 0xf]);
        upper += 1;
    }
    let mut pair = 0;
    while pair < 6 {
        let ([j, k], [i, l]) = (PAIRS[pair], PAIRS[5 - pair]);
        let mut signs = 0;
        while signs < 8 {
            let (above, below) = if signs & 1 == 0 { (1 << i, 1 << l) } else { (1 << l, 1 << i) };
            let (a, b) = if signs & 2 == 0 { (1 << j, 1 << k) } else { (1 << k, 1 << j) };
            let (c, e) = if signs & 4 == 0 { (1 << j, 1 << k) } else { (1 << k, 1 << j) };
            table[PAIR_CODES as usize + 8 * pair + signs] =
                tile([above | a, above | b, below | c, below | e]);
            signs += 1;
        }
        pair += 1;
    }
    table
}
