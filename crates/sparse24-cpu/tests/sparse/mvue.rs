//! The estimates of dZ^T against core.

use half::{bf16, f16};
use ndarray::{Array2, s};
use proptest::prelude::*;
use sparse24_core::{
    Element,
    compressed::Compressed24,
    mvue::{self as core, Estimator},
    philox::{Purpose, Site, Stream},
};
use sparse24_cpu::mvue;

use crate::hostile::{
    Bits, Layout, assert_same, assert_same_compressed, everywhere, laid_out, layouts, matrix,
    poisoned, poisoned24,
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

fn estimates_are_those_of_core<T: Bits>(dz: &Array2<T>, seed: u64, layout: Layout) {
    let (p, r) = dz.dim();
    for estimator in ESTIMATORS {
        let expected = core::compress(dz.view(), estimator, stream(seed)).expect("grouped");
        laid_out(dz, layout, |dz| {
            everywhere(|level| {
                let mut found = poisoned24(r, p.next_multiple_of(4));
                mvue::mvue_compress_at(level, dz, estimator, stream(seed), &mut found)
                    .expect("shapes agree");
                assert_same_compressed(&found, &expected);
            });
        });
    }
}

fn dense_estimates_are_the_compressed_ones(dz: &Array2<f32>, seed: u64, layout: Layout) {
    let (p, r) = dz.dim();
    for estimator in ESTIMATORS {
        let expected =
            core::compress(dz.view(), estimator, stream(seed)).expect("grouped").decode();
        let expected = expected.t().slice_move(s![..p, ..]);
        laid_out(dz, layout, |dz| {
            everywhere(|level| {
                let mut found = poisoned(p, r);
                mvue::mvue_prune_at(level, dz, estimator, stream(seed), found.view_mut())
                    .expect("shapes agree");
                assert_same(found.view(), expected);
                let mut found = poisoned(r, p);
                mvue::mvue_prune_at(
                    level,
                    dz,
                    estimator,
                    stream(seed),
                    found.view_mut().reversed_axes(),
                )
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
        estimates_are_those_of_core::<f32>(&matrix(p, r, seed), seed, layout);
        estimates_are_those_of_core::<f16>(&matrix(p, r, seed), seed, layout);
        estimates_are_those_of_core::<bf16>(&matrix(p, r, seed), seed, layout);
    }

    #[test]
    fn dense(p in 0..150_usize, r in 0..40_usize, seed: u64, layout in layouts()) {
        dense_estimates_are_the_compressed_ones(&matrix(p, r, seed), seed, layout);
    }

    /// A group a feature, so that every seed meets many groups of one kind: few nonzeros, ties,
    /// sums that overflow, the smallest numbers, two that absorb the others, zeros of both signs.
    #[test]
    fn groups(seed: u64, kind in 0..6_u32) {
        let dz = matrix::<f32>(4, 600, seed).mapv(|x| match kind {
            0 => f32::from_bits((x.to_bits() % 6) | (x.to_bits() & (1 << 31))),
            1 => (x.to_bits() % 3) as f32,
            4 => if x.to_bits() % 2 == 0 { 1e30_f32.copysign(x) } else { (x.to_bits() % 5) as f32 },
            5 => if x.to_bits() % 7 == 0 { x } else { 0_f32.copysign(x) },
            2 => f32::from_bits(0x7f00_0000 | (x.to_bits() % 0x80_0000) | (x.to_bits() & (1 << 31))),
            _ => if x.to_bits() % 5 < 2 { 0.0 } else { x },
        });
        estimates_are_those_of_core(&dz, seed, Layout::RowMajor);
        dense_estimates_are_the_compressed_ones(&dz, seed, Layout::RowMajor);
    }
}

/// Tokens around those of a call, a metadata word and a panel; features around those of a vector
/// and a panel.
#[test]
fn borders_of_blocks() {
    for (p, r) in [
        (15, 17),
        (17, 127),
        (31, 128),
        (33, 129),
        (255, 15),
        (256, 16),
        (257, 144),
        (287, 128),
        (289, 130),
        (516, 128),
    ] {
        for layout in [Layout::RowMajor, Layout::Strided] {
            estimates_are_those_of_core::<f32>(&matrix(p, r, 11), 11, layout);
            estimates_are_those_of_core::<bf16>(&matrix(p, r, 12), 12, layout);
            estimates_are_those_of_core::<f16>(&matrix(p, r, 13), 13, layout);
            dense_estimates_are_the_compressed_ones(&matrix(p, r, 14), 14, layout);
        }
    }
}

/// An element type that the kernels do not know.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Eighths(i16);

impl Element for Eighths {
    fn to_f32(self) -> f32 {
        f32::from(self.0) / 8.0
    }
    fn from_f32(value: f32) -> Self {
        Self((value * 8.0) as i16)
    }
}

#[test]
fn foreign_elements_are_converted_one_by_one() {
    let dz = matrix::<f32>(300, 40, 15).mapv(|x| Eighths((x.to_bits() >> 20) as i16 - 2000));
    let expected = core::compress(dz.view(), Estimator::Exact, stream(15)).expect("grouped");
    everywhere(|level| {
        let mut found = poisoned24(40, 300);
        mvue::mvue_compress_at(level, dz.view(), Estimator::Exact, stream(15), &mut found)
            .expect("shapes agree");
        assert_eq!(found, expected);
    });
}

#[test]
fn many_tasks_estimate_as_one() {
    let dz = matrix::<f32>(1100, 132, 9);
    estimates_are_those_of_core(&dz, 9, Layout::RowMajor);
    dense_estimates_are_the_compressed_ones(&dz, 9, Layout::RowMajor);
}

#[test]
fn refusals_name_the_operand_and_both_shapes() {
    let dz = Array2::<f32>::zeros((6, 8));
    let mut out = Compressed24::zeros(8, 4).expect("grouped");
    let refused = mvue::mvue_compress(dz.view(), Estimator::Exact, stream(0), &mut out)
        .expect_err("too few tokens");
    assert_eq!(refused.to_string(), "mvue compress: out should be [8, 8], found [8, 4]");
    let refused =
        mvue::mvue_prune(dz.view(), Estimator::Exact, stream(0), Array2::zeros((8, 6)).view_mut())
            .expect_err("transposed");
    assert_eq!(refused.to_string(), "mvue prune: out should be [6, 8], found [8, 6]");
}
