//! Compression both ways, decompression, and the sparse product, against core.

use half::{bf16, f16};
use ndarray::{Array2, Axis};
use proptest::prelude::*;
use sparse24_core::{
    Mask, MaskKind, compressed::Compressed24, group::Pattern, prune as core, prune::ValueMap,
    search,
};
use sparse24_cpu::{Error, compressed, prune, spmm24};

use crate::hostile::{
    Bits, Layout, assert_same, assert_same_compressed, everywhere, laid_out, layouts, matrix,
    poisoned, poisoned24, threads,
};

fn mask_of(rows: usize, columns: usize, seed: u64, kind: MaskKind) -> Mask {
    search::mask_search(matrix::<f32>(rows, columns, seed ^ 1).view(), kind).expect("tiled")
}

/// S(w) by core's words, element by element.
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
            everywhere(|level| {
                let (mut found, mut found_dgrad) =
                    (poisoned24(rows, columns), poisoned24(columns, rows));
                prune::compress_weight_at(level, w, &mask, map, &mut found, &mut found_dgrad)
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
    let tiles = matrix::<f32>(rows / 4, columns / 4, seed ^ 2)
        .mapv(|x| x.to_bits() as u16)
        .into_raw_vec_and_offset()
        .0;
    let any = Mask::from_tiles(rows, columns, tiles).expect("tiled");
    let expected = core::masked(w.view(), &any).expect("shapes agree");
    let mask = mask_of(rows, columns, seed, MaskKind::RowWise);
    let encoded = Compressed24::encode(w.view(), &mask).expect("row-wise");
    laid_out(&w, layout, |w| {
        threads(|| {
            let mut out = poisoned(rows, columns);
            prune::masked(w, &any, out.view_mut()).expect("shapes agree");
            assert_same(out.view(), expected.view());
            let mut out = poisoned(columns, rows);
            prune::masked(w, &any, out.view_mut().reversed_axes()).expect("shapes agree");
            assert_same(out.t(), expected.view());
            let mut out = poisoned(rows, columns);
            compressed::decompress(&encoded, out.view_mut()).expect("shapes agree");
            assert_same(out.view(), encoded.decode().view());
            let mut out = poisoned(columns, rows);
            compressed::decompress(&encoded, out.view_mut().reversed_axes()).expect("shapes agree");
            assert_same(out.t(), encoded.decode().view());
        });
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
            let mut d = poisoned::<f32>(m, n);
            spmm24::spmm24(&a, b, d.view_mut()).expect("shapes agree");
            // Which payload a sum of two NaNs takes is the machine's choice.
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
    }

    #[test]
    fn product(rows in 0..4_usize, k in 0..6_usize, n in 0..40_usize, seed: u64, layout in layouts()) {
        products::<f32>(4 * rows, 4 * k, n, seed, layout);
        products::<bf16>(4 * rows, 4 * k, n, seed, layout);
    }
}

/// A little less and a little more than blocks, pieces and words have.
#[test]
fn borders_of_blocks() {
    for [rows, columns] in [[252, 124], [256, 128], [260, 132], [512, 140], [324, 272], [8, 260]] {
        both_ways::<f32, f32>(rows, columns, 13, Layout::RowMajor, |x| x);
        both_ways::<f32, bf16>(rows, columns, 14, Layout::Strided, bf16::from_f32);
        both_ways::<f16, f16>(rows, columns, 15, Layout::ColumnMajor, |x| x);
    }
}

#[test]
fn many_tasks_compress_as_one() {
    both_ways::<f32, f32>(532, 1036, 11, Layout::RowMajor, |x| x);
    both_ways::<f32, bf16>(532, 1036, 11, Layout::RowMajor, bf16::from_f32);
    dense_copies::<f32>(140, 1036, 12, Layout::RowMajor);
}

/// More than is stored by way of the caches, with rows that begin at one place of a cache line or
/// at many.
#[test]
fn outputs_past_the_caches() {
    for [rows, columns] in [[1056, 2048], [1052, 2036]] {
        both_ways::<f32, f32>(rows, columns, 16, Layout::RowMajor, |x| x);
        both_ways::<bf16, bf16>(rows, columns, 17, Layout::RowMajor, |x| x);
    }
}

#[test]
fn small_integer_products_are_exact() {
    let mask = mask_of(8, 16, 5, MaskKind::RowWise);
    let dense = Array2::from_shape_fn((8, 16), |(i, j)| ((i * 7 + j * 3) % 9) as f32 - 4.0);
    let a = Compressed24::encode(dense.view(), &mask).expect("row-wise");
    let b = Array2::from_shape_fn((16, 5), |(i, j)| ((i * 5 + j) % 7) as f32 - 3.0);
    let mut d = poisoned(8, 5);
    spmm24::spmm24(&a, b.view(), d.view_mut()).expect("shapes agree");
    assert_same(d.view(), a.decode().dot(&b).view());
}

#[test]
fn refusals_name_the_operand_and_both_shapes() {
    let w = Array2::<f32>::zeros((8, 12));
    let mask = mask_of(8, 12, 0, MaskKind::Transposable);
    let (mut forward, mut dgrad) = (poisoned24::<f32>(8, 12), poisoned24::<f32>(8, 12));
    let refused =
        prune::compress_weight(w.view(), &mask, ValueMap::Identity, &mut forward, &mut dgrad)
            .expect_err("not transposed");
    assert_eq!(refused.to_string(), "compress weight: dgrad should be [12, 8], found [8, 12]");
    let row_wise = Mask::from_tiles(8, 12, vec![0x3333; 6]).expect("tiled");
    let refused = prune::compress_weight(
        w.view(),
        &row_wise,
        ValueMap::Identity,
        &mut forward,
        &mut poisoned24(12, 8),
    );
    assert!(matches!(
        refused,
        Err(Error::Semantics(sparse24_core::Error::Structure {
            expected: MaskKind::Transposable,
            ..
        }))
    ));
    let refused = compressed::decompress(&forward, Array2::zeros((12, 8)).view_mut())
        .expect_err("transposed");
    assert_eq!(refused.to_string(), "decompress: out should be [8, 12], found [12, 8]");
    let forward = Compressed24::<f32>::zeros(8, 12).expect("grouped");
    let refused =
        spmm24::spmm24(&forward, Array2::zeros((11, 3)).view(), Array2::zeros((8, 3)).view_mut())
            .expect_err("k differs");
    assert_eq!(refused.to_string(), "spmm24: b should be [12, 3], found [11, 3]");
    let refused =
        spmm24::spmm24(&forward, Array2::zeros((12, 3)).view(), Array2::zeros((8, 4)).view_mut())
            .expect_err("n differs");
    assert_eq!(refused.to_string(), "spmm24: d should be [8, 3], found [8, 4]");
}
