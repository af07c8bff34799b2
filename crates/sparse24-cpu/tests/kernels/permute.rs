//! Bi-Mask's permuted masks and S-STE's soft threshold, against core.

use ndarray::{Array2, ArrayView2};
use proptest::prelude::*;
use sparse24_core::{
    Element, Mask, MaskKind,
    permute::{self as core_permute, shuffled},
    philox::{Purpose, Site, Stream},
    prune::{ValueMap, group},
    search::mask_search,
};
use sparse24_cpu::{Error, permute, threshold};

use crate::hostile::{any_mask, assert_same, matrix, threads};

fn order(rows: usize, seed: u64) -> Vec<u32> {
    shuffled(rows, Stream::new(seed, Site::new(Purpose::Permutation, 3), 0, 7), 0)
}

fn assert_permuted<T: Element>(w: ArrayView2<'_, T>, mask: &Mask, order: &[u32]) {
    let expected = core_permute::permuted_mask(w, mask, order).expect("shapes agree");
    threads(|| {
        let mut found = any_mask(mask.rows(), mask.columns(), 9);
        permute::permuted_mask(w, mask, order, &mut found).expect("shapes agree");
        assert_eq!(found, expected);
    });
}

/// Compares with the soft threshold of every group by core.
fn assert_softened(w: &Array2<f32>, mask: &Mask, scale: f32) {
    let mut expected = Array2::zeros(w.dim());
    for (row, column) in
        (0..w.nrows()).flat_map(|row| (0..w.ncols() / 4).map(move |column| (row, column)))
    {
        let x = [0, 1, 2, 3].map(|i| w[[row, 4 * column + i]]);
        let bits = (0..4).filter(|i| mask.keeps(row, 4 * column + i)).map(|i| 1 << i).sum();
        let pattern = sparse24_core::group::Pattern::from_bits(bits).expect("two of four");
        let mapped = group(x, pattern, ValueMap::SoftThreshold { scale });
        (0..4).for_each(|i| expected[[row, 4 * column + i]] = mapped[i]);
    }
    threads(|| {
        let mut found = Array2::from_elem(w.dim(), f32::NAN);
        threshold::soft_threshold(w.view(), mask, scale, found.view_mut()).expect("shapes agree");
        assert_same(found.view(), expected.view());
    });
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
    fn soft_thresholds(
        rows in 0..12_usize,
        columns in 0..40_usize,
        seed: u64,
        scale in 0.5..3.0_f32,
    ) {
        let w = matrix::<f32>(4 * rows, 4 * columns, seed);
        let mask = mask_search(w.view(), MaskKind::RowWise).expect("tiled");
        assert_softened(&w, &mask, scale);
    }
}

#[test]
fn many_tasks() {
    let w = matrix::<f32>(1024, 1064, 3);
    let mask = mask_search(w.view(), MaskKind::RowWise).expect("tiled");
    assert_permuted(w.view(), &mask, &order(1024, 3));
    assert_softened(&w, &mask, 1.25);
}

#[test]
fn errors_name_the_operand() {
    let (w, mask) = (Array2::<f32>::zeros((4, 8)), Mask::empty(4, 8).expect("tiled"));
    let mut out = Mask::empty(4, 8).expect("tiled");
    let soften = |[r, q]: [usize; 2]| {
        threshold::soft_threshold(w.view(), &mask, 1.0, Array2::zeros((r, q)).view_mut())
    };
    let structure = soften([4, 8]);
    assert!(matches!(structure, Err(Error::Semantics(sparse24_core::Error::Structure { .. }))));
    let order = permute::permuted_mask(w.view(), &mask, &[0, 1, 2], &mut out);
    for (result, operand, expected) in [(order, "order", [1, 4]), (soften([8, 4]), "out", [4, 8])] {
        let Err(Error::Shape { operand: found, expected: wanted, .. }) = result else {
            panic!("{result:?}");
        };
        assert_eq!((found, wanted), (operand, expected));
    }
}
