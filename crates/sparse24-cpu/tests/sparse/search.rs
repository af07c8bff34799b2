//! Masks and gaps against core.

use half::{bf16, f16};
use ndarray::Array2;
use proptest::prelude::*;
use sparse24_core::{Mask, MaskKind, flip, search as core};
use sparse24_cpu::{Error, search};

use crate::hostile::{
    Bits, Layout, assert_same, everywhere, laid_out, layouts, matrix, poisoned, poisoned_mask,
    threads,
};

fn masks_are_those_of_core<T: Bits>(rows: usize, columns: usize, seed: u64, layout: Layout) {
    let w = matrix::<T>(rows, columns, seed);
    for kind in [MaskKind::Transposable, MaskKind::RowWise, MaskKind::ColumnWise] {
        let expected = core::mask_search(w.view(), kind).expect("tiled");
        laid_out(&w, layout, |w| {
            everywhere(|level| {
                let mut found = poisoned_mask(rows, columns);
                search::mask_search_at(level, w, kind, &mut found).expect("tiled");
                assert_eq!(found, expected, "{kind} at {}", level.simd());
            });
        });
    }
    let expected = core::mask_search_greedy(w.view()).expect("tiled");
    let mut found = poisoned_mask(rows, columns);
    laid_out(&w, layout, |w| threads(|| search::mask_search_greedy(w, &mut found).expect("tiled")));
    assert_eq!(found, expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn masks(rows in 0..12_usize, columns in 0..80_usize, seed: u64, layout in layouts()) {
        masks_are_those_of_core::<f32>(4 * rows, 4 * columns, seed, layout);
        masks_are_those_of_core::<f16>(4 * rows, 4 * columns, seed, layout);
        masks_are_those_of_core::<bf16>(4 * rows, 4 * columns, seed, layout);
    }

    #[test]
    fn gaps(rows in 0..5_usize, columns in 0..5_usize, seed: u64, layout in layouts()) {
        let w = matrix::<f32>(4 * rows, 4 * columns, seed);
        let expected = Array2::from_shape_fn((rows, columns), |(i, j)| {
            flip::tile_gap(&std::array::from_fn(|at| w[[4 * i + at / 4, 4 * j + at % 4]]))
        });
        let mut found = poisoned(rows, columns);
        laid_out(&w, layout, |w| threads(|| search::tile_gap(w, found.view_mut()).expect("tiled")));
        assert_same(found.view(), expected.view());
    }
}

#[test]
fn many_tasks_give_the_mask_of_one() {
    for layout in [Layout::RowMajor, Layout::Strided] {
        masks_are_those_of_core::<f32>(140, 1036, 7, layout);
    }
}

/// Every tile over {0, 1, 2, NaN payloads} that a shuffle of lanes could confuse: each of 16 lanes
/// holds another tile.
#[test]
fn every_lane_sees_its_own_tile() {
    let tiles = 4096;
    let w = Array2::from_shape_fn((4, 4 * tiles), |(row, column)| {
        let code = (column / 4).wrapping_mul(0x9e37_79b9) >> 3;
        ((code >> (2 * (4 * row + column % 4) % 31)) % 3) as f32
    });
    let expected = core::mask_search(w.view(), MaskKind::Transposable).expect("tiled");
    everywhere(|level| {
        let mut found = poisoned_mask(4, 4 * tiles);
        search::mask_search_at(level, w.view(), MaskKind::Transposable, &mut found).expect("tiled");
        assert_eq!(found, expected);
    });
}

#[test]
fn refusals_name_the_operand_and_both_shapes() {
    let w = Array2::<f32>::zeros((8, 12));
    let mut mask = Mask::empty(8, 8).expect("tiled");
    let refused = search::mask_search(w.view(), MaskKind::Transposable, &mut mask)
        .expect_err("the shapes differ");
    assert_eq!(refused.to_string(), "mask search: mask should be [8, 12], found [8, 8]");
    let refused =
        search::mask_search(Array2::<f32>::zeros((8, 6)).view(), MaskKind::RowWise, &mut mask)
            .expect_err("not tiled");
    assert!(
        matches!(
            refused,
            Error::Semantics(sparse24_core::Error::NotTiled { rows: 8, columns: 6, .. })
        ),
        "{refused}"
    );
    let refused = search::tile_gap(w.view(), Array2::zeros((2, 2)).view_mut())
        .expect_err("the shapes differ");
    assert_eq!(refused.to_string(), "tile gap: out should be [2, 3], found [2, 2]");
}
