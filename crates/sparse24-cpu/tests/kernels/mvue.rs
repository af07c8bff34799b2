//! The estimates of dZ^T against core.

use half::{bf16, f16};
use ndarray::{Array2, s};
use proptest::prelude::*;
use sparse24_core::{
    mvue::{self as core, Estimator},
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::mvue;

use crate::input::{
    Bits, Layout, assert_same, assert_same_compressed, everywhere, laid_out, layouts, matrix,
    poison, poisoned24, threads,
};

const ESTIMATORS: [Estimator; 2] = [Estimator::Exact, Estimator::Approximate];

fn stream(seed: u64) -> Stream {
    Stream::new(
        seed,
        Site::new(Purpose::Mvue, seed as u32 % 1000),
        (seed >> 10) as u32,
        (seed >> 20) as u32,
    )
}

fn assert_compressed<T: Bits>(dz: &Array2<T>, seed: u64, layout: Layout) {
    let (p, r) = dz.dim();
    for estimator in ESTIMATORS {
        let expected = core::compress(dz.view(), estimator, stream(seed)).expect("grouped");
        laid_out(dz, layout, |dz| {
            threads(|| {
                let mut found = poisoned24(r, p.next_multiple_of(4));
                mvue::mvue_compress(dz, estimator, stream(seed), &mut found).expect("shapes agree");
                assert_same_compressed(&found, &expected);
            });
        });
    }
}

fn assert_dense(dz: &Array2<f32>, seed: u64, layout: Layout) {
    let ((p, r), stream) = (dz.dim(), stream(seed));
    for estimator in ESTIMATORS {
        let expected = core::compress(dz.view(), estimator, stream).expect("grouped").decode();
        let expected = expected.t().slice_move(s![..p, ..]);
        laid_out(dz, layout, |dz| {
            everywhere(|level| {
                let mut found = poison([p, r]);
                mvue::mvue_prune_at(level, dz, estimator, stream, found.view_mut())
                    .expect("shapes agree");
                assert_same(found.view(), expected);
                let mut found = poison([r, p]);
                let transposed = found.view_mut().reversed_axes();
                mvue::mvue_prune_at(level, dz, estimator, stream, transposed)
                    .expect("shapes agree");
                assert_same(found.t(), expected);
            });
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn compressed(p in 0..150_usize, r in 0..40_usize, seed: u64, layout in layouts()) {
        assert_compressed::<f32>(&matrix(p, r, seed), seed, layout);
        assert_compressed::<f16>(&matrix(p, r, seed), seed, layout);
        assert_compressed::<bf16>(&matrix(p, r, seed), seed, layout);
    }

    #[test]
    fn dense(p in 0..150_usize, r in 0..40_usize, seed: u64, layout in layouts()) {
        assert_dense(&matrix(p, r, seed), seed, layout);
    }

    /// One group per feature, so that every seed has many groups of one kind: few nonzeros, ties,
    /// sums that overflow, subnormals, two that absorb the others, zeros of both signs.
    #[test]
    fn groups(seed: u64, kind in 0..6_u32) {
        let dz = matrix::<f32>(4, 600, seed).mapv(|x| match kind {
            0 => f32::from_bits(x.to_bits() % 6).copysign(x),
            1 => (x.to_bits() % 3) as f32,
            4 => if x.to_bits() % 2 == 0 { 1e30_f32.copysign(x) } else { (x.to_bits() % 5) as f32 },
            5 => if x.to_bits() % 7 == 0 { x } else { 0_f32.copysign(x) },
            2 => f32::from_bits(0x7f00_0000 | (x.to_bits() % 0x80_0000)).copysign(x),
            _ => if x.to_bits() % 5 < 2 { 0.0 } else { x },
        });
        assert_compressed(&dz, seed, Layout::RowMajor);
        assert_dense(&dz, seed, Layout::RowMajor);
    }
}

/// Numbers of tokens around a Philox call, of features around a vector and a staged block, and of
/// elements beyond a task.
#[test]
fn borders_of_blocks() {
    for (p, r) in [(15, 17), (17, 127), (31, 128), (33, 129), (256, 16), (257, 144), (1100, 132)] {
        assert_compressed::<f32>(&matrix(p, r, 14), 14, Layout::RowMajor);
        for layout in [Layout::RowMajor, Layout::Strided] {
            assert_dense(&matrix(p, r, 14), 14, layout);
        }
    }
}
