//! Masks against core.

use half::{bf16, f16};
use proptest::prelude::*;
use sparse24_core::{MaskKind, search as core};
use sparse24_cpu::search;

use crate::input::{Bits, Layout, everywhere, laid_out, layouts, matrix, poisoned_mask};

fn assert_masks<T: Bits>(rows: usize, columns: usize, seed: u64, layout: Layout) {
    let w = matrix::<T>(rows, columns, seed);
    for kind in MaskKind::ALL {
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
