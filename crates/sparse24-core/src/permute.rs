//! Bi-Mask: a column-wise mask of masked weights, with groups of four rows in another order.
//!
//! The forward pass multiplies by the weights under a row-wise mask m. dgrad contracts rows, so its
//! operand is pruned once more, to two of every four rows in `order`: W m m', which is 2:4 only in
//! that order. The order is the one of [`CANDIDATES`] random ones in which m' prunes least of m.
//!
//! Source: Zhang et al., "Bi-directional masks for efficient N:M sparse training", ICML 2023, with
//! the numbers and the criterion of its code.

use alloc::{vec, vec::Vec};

use ndarray::ArrayView2;

use crate::{
    Element, Error,
    mask::{Mask, check_shape},
    philox::Stream,
    prune::largest_two,
};

/// Number of random orders to choose from.
pub const CANDIDATES: u32 = 100;

/// Optimizer steps from one choice to the next.
pub const INTERVAL: u32 = 100;

/// The best of [`CANDIDATES`] random orders of the mask's rows: the one in which most elements
/// remain if every group of four rows keeps at most two per column; the first on ties.
///
/// The stream has [`crate::philox::Purpose::Permutation`], the tensor and the step.
#[must_use]
pub fn row_order(mask: &Mask, stream: Stream) -> Vec<u32> {
    let rows = Rows::of(mask);
    let candidates = (0..CANDIDATES).map(|candidate| shuffled(mask.rows(), stream, candidate));
    let least = candidates
        .map(|order| (rows.lost(&order), order))
        .reduce(|best, next| if next.0 < best.0 { next } else { best });
    least.expect("there are candidates").1
}

/// A uniform order of `rows` rows: a Fisher-Yates shuffle from the last place down, which exchanges
/// place i with place floor(word (i+1) / 2^32). Candidate c uses the words of the calls from
/// `c*ceil(rows/4)` on, and place i uses word number `rows - 1 - i`.
#[must_use]
pub fn shuffled(rows: usize, stream: Stream, candidate: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..rows as u32).collect();
    let first = candidate.wrapping_mul(rows.div_ceil(4) as u32);
    for (call, places) in (1..rows).rev().collect::<Vec<_>>().chunks(4).enumerate() {
        for (&place, word) in places.iter().zip(stream.words(first.wrapping_add(call as u32))) {
            order.swap(place, ((u64::from(word) * (place as u64 + 1)) >> 32) as usize);
        }
    }
    order
}

/// The mask m m': `mask` restricted to the two largest masked magnitudes of every group of four
/// rows in `order`.
///
/// # Errors
/// [`Error::Shape`] unless the mask has the shape of `w`; [`Error::Length`] unless `order` has one
/// entry per row.
///
/// # Panics
/// If `order` names a row that is not there. It should be a permutation: a row that it leaves out
/// keeps nothing, and of groups that share a row each keeps its two.
pub fn permuted_mask<T: Element>(
    w: ArrayView2<'_, T>,
    mask: &Mask,
    order: &[u32],
) -> Result<Mask, Error> {
    check_shape("permuted mask", [w.nrows(), w.ncols()], mask.shape())?;
    if order.len() != w.nrows() {
        return Err(Error::Length {
            operation: "permuted mask",
            expected: w.nrows(),
            found: order.len(),
        });
    }
    let mut out = Mask::empty(mask.rows(), mask.columns())?;
    let tile_columns = mask.columns() / 4;
    for group in order.as_chunks::<4>().0.iter().map(|group| group.map(|row| row as usize)) {
        for column in 0..w.ncols() {
            let masked = group
                .map(|row| if mask.keeps(row, column) { w[[row, column]].to_f32() } else { 0.0 });
            for row in largest_two(masked)
                .indices()
                .map(|i| group[usize::from(i)])
                .into_iter()
                .filter(|&row| mask.keeps(row, column))
            {
                out.tiles_mut()[row / 4 * tile_columns + column / 4] |=
                    1 << (row % 4 * 4 + column % 4);
            }
        }
    }
    Ok(out)
}

/// Whether `both` could be a result of [`permuted_mask`] for `mask`, of the same shape, and
/// `order`: it keeps only elements that `mask` keeps, and in each column at most two of every four
/// rows in that order.
///
/// # Panics
/// If `order` names a row that is not there.
#[must_use]
pub fn is_permuted(both: &Mask, mask: &Mask, order: &[u32]) -> bool {
    let is_within = both.tiles().iter().zip(mask.tiles()).all(|(both, mask)| both & !mask == 0);
    is_within && Rows::of(both).lost(order) == 0
}

/// The bits of a mask, row by row.
struct Rows {
    words: usize,
    bits: Vec<u64>,
}

impl Rows {
    fn of(mask: &Mask) -> Self {
        let words = mask.columns().div_ceil(64);
        let mut bits = vec![0; mask.rows() * words];
        for (at, &tile) in mask.tiles().iter().enumerate() {
            let (row, column) = (at / (mask.columns() / 4) * 4, at % (mask.columns() / 4) * 4);
            for i in 0..4 {
                bits[(row + i) * words + column / 64] |=
                    u64::from(tile >> (4 * i) & 15) << (column % 64);
            }
        }
        Self { words, bits }
    }

    fn row(&self, row: u32) -> &[u64] {
        &self.bits[row as usize * self.words..][..self.words]
    }

    /// The number of kept elements beyond the second of their group.
    fn lost(&self, order: &[u32]) -> u64 {
        let groups = order.as_chunks::<4>().0.iter().map(|group| group.map(|row| self.row(row)));
        let lost = |[a, b, c, d]: [u64; 4]| {
            (a & b & (c | d) | c & d & (a | b)).count_ones() + (a & b & c & d).count_ones()
        };
        groups
            .flat_map(|rows| (0..self.words).map(move |word| rows.map(|row| row[word])))
            .map(|words| u64::from(lost(words)))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use alloc::{vec, vec::Vec};

    use ndarray::{Array2, arr2};

    use super::{CANDIDATES, permuted_mask, row_order, shuffled};
    use crate::{
        Error, Mask, MaskKind,
        philox::{Purpose, Site, Stream},
        search::mask_search,
    };

    fn stream(tensor: u32) -> Stream {
        Stream::new(5, Site::new(Purpose::Permutation, tensor), 0, 100)
    }

    /// Weights whose rows have equal masks in pairs, so that the original order loses elements and
    /// others lose none.
    fn row_wise(rows: usize, columns: usize) -> (Array2<f32>, Mask) {
        let w = Array2::from_shape_fn((rows, columns), |(row, column)| {
            let mixed =
                (row as u32 / 2 * 7919 + column as u32 * 104_729).wrapping_mul(2_654_435_761) >> 8;
            mixed as f32 / (1 << 24) as f32 - 0.5
        });
        let mask = mask_search(w.view(), MaskKind::RowWise).expect("tiled");
        (w, mask)
    }

    #[test]
    fn orders_are_distinct_permutations() {
        let orders: Vec<Vec<u32>> =
            (0..CANDIDATES).map(|candidate| shuffled(12, stream(0), candidate)).collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..12), "{order:?}");
        }
        assert!(
            (1..orders.len()).all(|i| !orders[..i].contains(&orders[i])),
            "one of 12! drawn twice"
        );
        assert_ne!(shuffled(12, stream(1), 0), orders[0]);
        assert_eq!((shuffled(0, stream(0), 3), shuffled(1, stream(0), 3)), (vec![], vec![0]));
    }

    #[test]
    fn the_chosen_order_keeps_most() {
        let (_, mask) = row_wise(16, 68);
        let naive = |order: &[u32]| -> u64 {
            let group = |group: &[u32], column| {
                group.iter().filter(|&&row| mask.keeps(row as usize, column)).count().min(2) as u64
            };
            order.chunks(4).map(|rows| (0..68).map(|column| group(rows, column)).sum::<u64>()).sum()
        };
        let candidates: Vec<Vec<u32>> =
            (0..CANDIDATES).map(|candidate| shuffled(16, stream(2), candidate)).collect();
        let most = candidates.iter().map(|order| naive(order)).max().expect("candidates");
        let chosen = row_order(&mask, stream(2));
        assert_eq!(Some(&chosen), candidates.iter().find(|order| naive(order) == most));
        assert!(most > naive(&(0..16).collect::<Vec<_>>()), "the search gains nothing");
    }

    #[test]
    fn a_permuted_mask_keeps_the_two_largest() {
        let (w, mask) = row_wise(16, 68);
        let order = row_order(&mask, stream(3));
        let both = permuted_mask(w.view(), &mask, &order).expect("one shape");
        for group in order.chunks(4) {
            for column in 0..68 {
                let of = |m: &Mask| {
                    group
                        .iter()
                        .copied()
                        .filter(|&row| m.keeps(row as usize, column))
                        .collect::<Vec<u32>>()
                };
                let (kept, before) = (of(&both), of(&mask));
                assert!(
                    kept.len() == before.len().min(2)
                        && kept.iter().all(|row| before.contains(row))
                );
                let least = kept
                    .iter()
                    .map(|&row| w[[row as usize, column]].abs())
                    .fold(f32::INFINITY, f32::min);
                let beyond = before
                    .iter()
                    .filter(|row| !kept.contains(row))
                    .map(|&row| w[[row as usize, column]].abs());
                assert!(beyond.fold(0.0, f32::max) <= least);
            }
        }
        assert!(both.check(MaskKind::ColumnWise).is_err(), "not in the order of the matrix");
    }

    #[test]
    fn shape_errors() {
        let mask = Mask::empty(4, 4).expect("tiled");
        let error = permuted_mask(arr2(&[[0.0_f32; 4]; 4]).view(), &mask, &[0, 1]);
        assert!(matches!(error, Err(Error::Length { expected: 4, found: 2, .. })));
        assert!(permuted_mask(arr2(&[[0.0_f32; 8]; 4]).view(), &mask, &[0, 1, 2, 3]).is_err());
    }
}
