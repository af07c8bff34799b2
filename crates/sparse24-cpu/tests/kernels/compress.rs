//! Masked matrices, dense and compressed, and the sparse product, against core.

use half::{bf16, f16};
use ndarray::{Array2, Axis};
use proptest::prelude::*;
use sparse24_core::{
    Mask, MaskKind, compressed::Compressed24, group::Pattern, prune as core, prune::ValueMap,
    search,
};
use sparse24_cpu::{prune, spmm24, threshold::soft_threshold};

use crate::input::{
    Bits, Layout, any_mask, assert_same, assert_same_compressed, laid_out, layouts, matrix, poison,
    poisoned24, threads,
};

fn mask_of(rows: usize, columns: usize, seed: u64, kind: MaskKind) -> Mask {
    search::mask_search(matrix::<f32>(rows, columns, seed ^ 1).view(), kind).expect("tiled")
}

/// S(w) by core, element by element.
fn mapped<T: Bits, U: Bits>(
    w: &Array2<T>,
    mask: &Mask,
    map: ValueMap,
    same: impl Fn(T) -> U,
) -> Array2<U> {
    let mut out = Array2::default(w.dim());
    for (row, group) in
        (0..w.nrows()).flat_map(|row| (0..w.ncols() / 4).map(move |group| (row, group)))
    {
        let at = |i: usize| [row, 4 * group + i];
        let bits = (0..4).fold(0, |bits, i| bits | u8::from(mask.keeps(row, 4 * group + i)) << i);
        let pattern = Pattern::from_bits(bits).expect("row-wise");
        let values = core::group(std::array::from_fn(|i| w[at(i)].to_f32()), pattern, map);
        for i in pattern.indices().map(usize::from) {
            out[at(i)] =
                if map == ValueMap::Identity { same(w[at(i)]) } else { U::from_f32(values[i]) };
        }
    }
    out
}

fn both_ways<T: Bits, U: Bits>(
    rows: usize,
    columns: usize,
    seed: u64,
    layout: Layout,
    same: impl Fn(T) -> U + Copy,
) {
    let w = matrix::<T>(rows, columns, seed);
    for map in [ValueMap::Identity, ValueMap::SoftThreshold { scale: 1.25 }] {
        let mask = mask_of(rows, columns, seed, MaskKind::Transposable);
        let pruned = mapped(&w, &mask, map, same);
        let forward = Compressed24::encode(pruned.view(), &mask).expect("row-wise");
        let dgrad = Compressed24::encode(pruned.t(), &mask.transpose()).expect("column-wise");
        let row_wise = mask_of(rows, columns, seed, MaskKind::RowWise);
        let alone = Compressed24::encode(mapped(&w, &row_wise, map, same).view(), &row_wise)
            .expect("row-wise");
        laid_out(&w, layout, |w| {
            threads(|| {
                let (mut found, mut found_dgrad) =
                    (poisoned24(rows, columns), poisoned24(columns, rows));
                prune::compress_weight(w, &mask, map, &mut found, &mut found_dgrad)
                    .expect("shapes agree");
                assert_same_compressed(&found, &forward);
                assert_same_compressed(&found_dgrad, &dgrad);
                prune::compress_forward(w, &row_wise, map, &mut found).expect("shapes agree");
                assert_same_compressed(&found, &alone);
            });
        });
    }
}

fn dense_copies<T: Bits>(rows: usize, columns: usize, seed: u64, layout: Layout) {
    let w = matrix::<T>(rows, columns, seed);
    let mask = any_mask(rows, columns, seed ^ 2);
    let expected = core::masked(w.view(), &mask).expect("shapes agree");
    laid_out(&w, layout, |w| {
        threads(|| {
            let mut out = poison([rows, columns]);
            prune::masked(w, &mask, out.view_mut()).expect("shapes agree");
            assert_same(out.view(), expected.view());
            let mut out = poison([columns, rows]);
            prune::masked(w, &mask, out.view_mut().reversed_axes()).expect("shapes agree");
            assert_same(out.t(), expected.view());
        });
    });
}

fn soft_thresholds(rows: usize, columns: usize, seed: u64) {
    let w = matrix::<f32>(rows, columns, seed);
    let mask = mask_of(rows, columns, seed, MaskKind::RowWise);
    let expected = mapped(&w, &mask, ValueMap::SoftThreshold { scale: 1.25 }, |x| x);
    threads(|| {
        let mut found = poison([rows, columns]);
        soft_threshold(w.view(), &mask, 1.25, found.view_mut()).expect("shapes agree");
        assert_same(found.view(), expected.view());
    });
}

fn products<T: Bits>(m: usize, k: usize, n: usize, seed: u64, layout: Layout) {
    let mask = mask_of(m, k, seed, MaskKind::RowWise);
    let a = Compressed24::encode(matrix::<T>(m, k, seed).view(), &mask).expect("row-wise");
    let b = matrix::<f32>(k, n, seed ^ 3);
    let expected = Array2::from_shape_fn((m, n), |(row, column)| {
        let kept = (0..k / 4)
            .flat_map(|group| a.pattern(row, group).indices().map(|i| 4 * group + usize::from(i)));
        kept.zip(a.values().index_axis(Axis(0), row))
            .fold(0.0, |sum: f32, (at, value)| sum + value.to_f32() * b[[at, column]])
    });
    laid_out(&b, layout, |b| {
        threads(|| {
            let mut d = poison::<f32>([m, n]);
            spmm24::spmm24(&a, b, d.view_mut()).expect("shapes agree");
            // The payload of a sum of two NaNs depends on the machine.
            let plain = |x: f32| if x.is_nan() { f32::NAN } else { x };
            assert_same(d.mapv(plain).view(), expected.mapv(plain).view());
        });
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn compression(rows in 0..20_usize, columns in 0..20_usize, seed: u64, layout in layouts()) {
        both_ways::<f32, f32>(4 * rows, 4 * columns, seed, layout, |x| x);
        both_ways::<f16, f16>(4 * rows, 4 * columns, seed, layout, |x| x);
        both_ways::<bf16, bf16>(4 * rows, 4 * columns, seed, layout, |x| x);
        both_ways::<f32, bf16>(4 * rows, 4 * columns, seed, layout, bf16::from_f32);
        both_ways::<bf16, f32>(4 * rows, 4 * columns, seed, layout, bf16::to_f32);
    }

    #[test]
    fn dense(rows in 0..12_usize, columns in 0..20_usize, seed: u64, layout in layouts()) {
        dense_copies::<f32>(4 * rows, 4 * columns, seed, layout);
        dense_copies::<f16>(4 * rows, 4 * columns, seed, layout);
        dense_copies::<bf16>(4 * rows, 4 * columns, seed, layout);
        soft_thresholds(4 * rows, 4 * columns, seed);
    }

    #[test]
    fn product(
        rows in 0..4_usize,
        k in 0..6_usize,
        n in 0..40_usize,
        seed: u64,
        layout in layouts(),
    ) {
        products::<f32>(4 * rows, 4 * k, n, seed, layout);
        products::<bf16>(4 * rows, 4 * k, n, seed, layout);
    }
}

#[test]
fn many_tasks() {
    both_ways::<f32, f32>(532, 1036, 11, Layout::RowMajor, |x| x);
    both_ways::<f32, bf16>(532, 1036, 11, Layout::RowMajor, bf16::from_f32);
    dense_copies::<f32>(140, 1036, 12, Layout::RowMajor);
    soft_thresholds(140, 1036, 12);
}
