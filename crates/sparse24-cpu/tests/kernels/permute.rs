//! Bi-Mask's permuted masks against core.

use ndarray::ArrayView2;
use proptest::prelude::*;
use sparse24_core::{
    Element, Mask, MaskKind,
    permute::{self as core_permute, shuffled},
    philox::{Purpose, Site, Stream},
    search::mask_search,
};
use sparse24_cpu::permute;

use crate::input::{any_mask, matrix, threads};

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
}

#[test]
fn many_tasks() {
    let w = matrix::<f32>(1024, 1064, 3);
    let mask = mask_search(w.view(), MaskKind::RowWise).expect("tiled");
    assert_permuted(w.view(), &mask, &order(1024, 3));
}
