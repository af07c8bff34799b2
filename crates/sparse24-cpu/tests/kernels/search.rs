//! Masks against core.

use half::{bf16, f16};
use ndarray::Array2;
use proptest::prelude::*;
use sparse24_core::{MaskKind, search as core};
use sparse24_cpu::search;

use crate::input::{Bits, Layout, everywhere, laid_out, layouts, matrix, poisoned_mask};

fn assert_masks<T: Bits>(rows: usize, columns: usize, seed: u64, layout: Layout) {
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
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn masks(rows in 0..12_usize, columns in 0..80_usize, seed: u64, layout in layouts()) {
        assert_masks::<f32>(4 * rows, 4 * columns, seed, layout);
        assert_masks::<f16>(4 * rows, 4 * columns, seed, layout);
        assert_masks::<bf16>(4 * rows, 4 * columns, seed, layout);
    }
}

#[test]
fn many_tasks() {
    for layout in [Layout::RowMajor, Layout::Strided] {
        assert_masks::<f32>(140, 1036, 7, layout);
    }
}

/// Tiles over {0, 1, 2}, different in neighbouring lanes, so that confused lanes are noticed.
#[test]
fn every_lane_searches_its_own_tile() {
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
