//! What single methods add, against core: Bi-Mask's permuted masks and S-STE's soft threshold.

use ndarray::{Array2, ArrayView2};
use proptest::prelude::*;
use sparse24_core::{
    Element, Mask, MaskKind,
    permute::{self as core_permute, shuffled},
    philox::{Purpose, Site, Stream},
    prune::{ValueMap, group},
    search::mask_search,
};
use sparse24_cpu::{permute, threshold};

use crate::hostile::{assert_same, matrix, threads};

fn order(rows: usize, seed: u64) -> Vec<u32> {
    shuffled(rows, Stream::new(seed, Site::new(Purpose::Permutation, 3), 0, 7), 0)
}

fn any_mask(rows: usize, columns: usize, seed: u64) -> Mask {
    let tiles = matrix::<f32>(rows / 4, columns / 4, seed)
        .mapv(|x| (x.to_bits() ^ x.to_bits() >> 16) as u16);
    Mask::from_tiles(rows, columns, tiles.into_raw_vec_and_offset().0).expect("tiled")
}

fn assert_permuted<T: Element>(w: ArrayView2<'_, T>, mask: &Mask, order: &[u32]) {
    let expected = core_permute::permuted_mask(w, mask, order).expect("shapes agree");
    threads(|| {
        let mut found = any_mask(mask.rows(), mask.columns(), 9);
        permute::permuted_mask(w, mask, order, &mut found).expect("shapes agree");
        assert_eq!(found, expected);
    });
}

/// Every group by core.
fn softened(w: &Array2<f32>, mask: &Mask, scale: f32) -> Array2<f32> {
    let mut out = Array2::zeros(w.dim());
    for (row, column) in
        (0..w.nrows()).flat_map(|row| (0..w.ncols() / 4).map(move |column| (row, column)))
    {
        let x = [0, 1, 2, 3].map(|i| w[[row, 4 * column + i]]);
        let bits = (0..4).filter(|i| mask.keeps(row, 4 * column + i)).map(|i| 1 << i).sum();
        let pattern = sparse24_core::group::Pattern::from_bits(bits).expect("two of four");
        let mapped = group(x, pattern, ValueMap::SoftThreshold { scale });
        (0..4).for_each(|i| out[[row, 4 * column + i]] = mapped[i]);
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn permuted_masks(rows in 0..12_usize, columns in 0..40_usize, seed: u64) {
        let w = matrix::<f32>(4 * rows, 4 * columns, seed);
        let row_wise = mask_search(w.view(), MaskKind::RowWise).expect("tiled");
        for mask in [&row_wise, &any_mask(4 * rows, 4 * columns, seed ^ 1)] {
            assert_permuted(w.view(), mask, &order(4 * rows, seed));
            assert_permuted(w.mapv(half::bf16::from_f32).view(), mask, &order(4 * rows, seed));
        }
    }

    #[test]
    fn soft_thresholds(rows in 0..12_usize, columns in 0..40_usize, seed: u64, scale in 0.5..3.0_f32) {
        let w = matrix::<f32>(4 * rows, 4 * columns, seed);
        let mask = mask_search(w.view(), MaskKind::RowWise).expect("tiled");
        let expected = softened(&w, &mask, scale);
        threads(|| {
            let mut found = Array2::from_elem(w.dim(), f32::NAN);
            threshold::soft_threshold(w.view(), &mask, scale, found.view_mut()).expect("shapes agree");
            assert_same(found.view(), expected.view());
        });
    }
}

#[test]
fn many_tasks_are_as_one() {
    let w = matrix::<f32>(1024, 1064, 3);
    let mask = mask_search(w.view(), MaskKind::RowWise).expect("tiled");
    assert_permuted(w.view(), &mask, &order(1024, 3));
    threads(|| {
        let mut found = Array2::from_elem(w.dim(), f32::NAN);
        threshold::soft_threshold(w.view(), &mask, 1.25, found.view_mut()).expect("shapes agree");
        assert_same(found.view(), softened(&w, &mask, 1.25).view());
    });
}

#[test]
fn refusals_name_the_operand() {
    let (w, mask) = (Array2::<f32>::zeros((4, 8)), Mask::empty(4, 8).expect("tiled"));
    let mut out = Mask::empty(4, 8).expect("tiled");
    let refused = permute::permuted_mask(w.view(), &mask, &[0, 1, 2], &mut out)
        .expect_err("a row is missing");
    assert_eq!(refused.to_string(), "permuted mask: order should be [1, 4], found [1, 3]");
    let mut values = Array2::zeros((8, 4));
    let refused =
        threshold::soft_threshold(w.view(), &mask, 1.0, values.view_mut()).expect_err("transposed");
    assert_eq!(refused.to_string(), "soft threshold: out should be [4, 8], found [8, 4]");
    let refused = threshold::soft_threshold(w.view(), &mask, 1.0, Array2::zeros((4, 8)).view_mut())
        .expect_err("empty");
    assert_eq!(
        refused.to_string(),
        "mask check: the mask is not row-wise 2:4: tile (0, 0) holds 0x0000"
    );
}
