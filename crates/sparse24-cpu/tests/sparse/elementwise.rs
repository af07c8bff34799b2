//! Masked decay and flip count against core.

use ndarray::Array2;
use proptest::prelude::*;
use sparse24_core::{Mask, decay as core_decay, flip as core_flip};
use sparse24_cpu::{decay, flip};

use crate::hostile::{assert_same, everywhere, laid_out, layouts, matrix, threads};

fn any_mask(rows: usize, columns: usize, seed: u64) -> Mask {
    let tiles = matrix::<f32>(rows / 4, columns / 4, seed)
        .mapv(|x| (x.to_bits() ^ x.to_bits() >> 16) as u16);
    Mask::from_tiles(rows, columns, tiles.into_raw_vec_and_offset().0).expect("tiled")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn masked_decay(rows in 0..12_usize, columns in 0..40_usize, seed: u64, layout in layouts(), lambda in -1.0..1.0_f32) {
        let (g, w) = (matrix::<f32>(4 * rows, 4 * columns, seed), matrix::<f32>(4 * rows, 4 * columns, seed ^ 1));
        let mask = any_mask(4 * rows, 4 * columns, seed ^ 2);
        let mut expected = g.clone();
        core_decay::masked_decay(expected.view_mut(), w.view(), &mask, lambda).expect("shapes agree");
        // Which payload a sum of two NaNs takes is the machine's choice; where the mask keeps, even
        // the payload must stay.
        let plain = |found: &Array2<f32>| {
            Array2::from_shape_fn(found.dim(), |(i, j)| {
                let x = found[[i, j]];
                if x.is_nan() && !mask.keeps(i, j) { f32::NAN } else { x }
            })
        };
        laid_out(&w, layout, |w| everywhere(|level| {
            let mut found = g.clone();
            decay::masked_decay_at(level, found.view_mut(), w, &mask, lambda).expect("shapes agree");
            assert_same(plain(&found).view(), plain(&expected).view());
            let mut transposed = g.t().as_standard_layout().into_owned();
            decay::masked_decay_at(level, transposed.view_mut().reversed_axes(), w, &mask, lambda).expect("shapes agree");
            assert_same(plain(&transposed.t().to_owned()).view(), plain(&expected).view());
        }));
    }

    #[test]
    fn flip_count(rows in 0..12_usize, columns in 0..40_usize, seed: u64) {
        let (a, b) = (any_mask(4 * rows, 4 * columns, seed), any_mask(4 * rows, 4 * columns, seed ^ 1));
        threads(|| assert_eq!(flip::flip_count(&a, &b), Ok(core_flip::flip_count(&a, &b).expect("shapes agree"))));
    }
}

#[test]
fn many_tasks_count_as_one() {
    let (a, b) = (any_mask(1024, 1064, 3), any_mask(1024, 1064, 4));
    threads(|| {
        assert_eq!(
            flip::flip_count(&a, &b),
            Ok(core_flip::flip_count(&a, &b).expect("shapes agree"))
        )
    });
}

#[test]
fn refusals_name_the_operand_and_both_shapes() {
    let (a, b) = (Mask::empty(4, 8).expect("tiled"), Mask::empty(8, 4).expect("tiled"));
    assert_eq!(
        flip::flip_count(&a, &b).expect_err("transposed").to_string(),
        "flip count: b should be [4, 8], found [8, 4]"
    );
    let (mut g, w) = (Array2::zeros((4, 8)), Array2::zeros((4, 8)));
    let refused = decay::masked_decay(g.view_mut(), w.view(), &b, 0.1).expect_err("transposed");
    assert_eq!(refused.to_string(), "masked decay: mask should be [4, 8], found [8, 4]");
    let refused = decay::masked_decay(g.view_mut(), w.t(), &a, 0.1).expect_err("transposed");
    assert_eq!(refused.to_string(), "masked decay: w should be [4, 8], found [8, 4]");
}
