//! Matrices of every dtype: masks, pruning, compression, decay, flips, refusal of ragged shapes.

use half::{bf16, f16};
use ndarray::Array2;
use proptest::prelude::*;
use sparse24_core::{
    Element, Error, Mask, MaskKind, compressed::Compressed24, decay, flip, group::Pattern, mvue,
    mvue::Estimator, philox::Purpose, philox::Site, philox::Stream, prune, search,
};
use sparse24_tests::oracle;

use super::input::{any_bits, cases, hostile, tied};

/// Elements compared by bits, so that NaN and -0 count.
trait Bits: Element {
    fn bits(self) -> u32;
}

impl Bits for f32 {
    fn bits(self) -> u32 {
        self.to_bits()
    }
}
impl Bits for f16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}
impl Bits for bf16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

/// A matrix of 4x4 tiles, possibly empty.
fn matrix() -> impl Strategy<Value = Array2<f32>> {
    (0_usize..4, 0_usize..5).prop_flat_map(|(rows, columns)| {
        let element = prop_oneof![any_bits(), hostile(), tied()];
        prop::collection::vec(element, 16 * rows * columns).prop_map(move |data| {
            Array2::from_shape_vec((4 * rows, 4 * columns), data).expect("as long as its shape")
        })
    })
}

fn masks(rows: usize, columns: usize) -> impl Strategy<Value = Mask> {
    let bits = prop::collection::vec(prop::sample::select(&Pattern::ALL[..]), rows * columns / 4)
        .prop_map(|patterns| {
            let four = |four: &[Pattern]| {
                four.iter()
                    .enumerate()
                    .map(|(row, pattern)| u16::from(pattern.bits()) << (4 * row))
                    .sum()
            };
            patterns.chunks(4).map(four).collect::<Vec<u16>>()
        });
    bits.prop_map(move |tiles| Mask::from_tiles(rows, columns, tiles).expect("tiled"))
}

fn matrix_and_mask() -> impl Strategy<Value = (Array2<f32>, Mask)> {
    matrix().prop_flat_map(|w| {
        let masks = masks(w.nrows(), w.ncols());
        (Just(w), masks)
    })
}

/// Encode followed by decode applies the mask; the matrix can be rebuilt from its parts.
fn compression_is_masking<T: Bits>(w: &Array2<f32>, mask: &Mask) {
    let w = w.mapv(T::from_f32);
    let compressed = Compressed24::encode(w.view(), mask).expect("row-wise");
    let (decoded, masked) =
        (compressed.decode(), prune::masked(w.view(), mask).expect("one shape"));
    for ((row, column), &x) in w.indexed_iter() {
        let expected = if mask.keeps(row, column) { x.bits() } else { 0 };
        assert_eq!(decoded[[row, column]].bits(), expected, "({row}, {column})");
        assert_eq!(masked[[row, column]].bits(), expected, "({row}, {column})");
    }
    let rebuilt =
        Compressed24::from_parts(compressed.values().to_owned(), compressed.metadata().to_vec())
            .expect("its own parts");
    assert_eq!(rebuilt.metadata(), compressed.metadata());
    assert_eq!(rebuilt.shape(), [w.nrows(), w.ncols()]);
}

/// Each kind of search, tile by tile and group by group.
fn searches_have_their_structure<T: Bits>(w: &Array2<f32>) {
    let w = w.mapv(T::from_f32);
    let search = |kind| search::mask_search(w.view(), kind).expect("tiled");
    let transposable = search(MaskKind::Transposable);
    let greedy = search::mask_search_greedy(w.view()).expect("tiled");
    for kind in MaskKind::ALL {
        assert_eq!(search(kind).check(kind), Ok(()));
        assert_eq!(transposable.check(kind), Ok(()));
        assert_eq!(greedy.check(kind), Ok(()));
    }
    for (at, (&found, &greedy)) in transposable.tiles().iter().zip(greedy.tiles()).enumerate() {
        let (row, column) = (4 * (at / (w.ncols() / 4)), 4 * (at % (w.ncols() / 4)));
        let tile = std::array::from_fn(|at| w[[row + at / 4, column + at % 4]].to_f32());
        assert_eq!((found, greedy), (oracle::canonical(&tile), oracle::greedy(&tile)));
    }
    let (rows, columns) = (search(MaskKind::RowWise), search(MaskKind::ColumnWise));
    for ((row, column), _) in w.indexed_iter() {
        let along_row =
            oracle::largest_two(std::array::from_fn(|i| w[[row, column / 4 * 4 + i]].to_f32()));
        let along_column =
            oracle::largest_two(std::array::from_fn(|i| w[[row / 4 * 4 + i, column]].to_f32()));
        assert_eq!(rows.keeps(row, column), along_row.contains(&((column % 4) as u8)));
        assert_eq!(columns.keeps(row, column), along_column.contains(&((row % 4) as u8)));
    }
}

/// Every group of the compressed estimate equals the estimate at its address, rounded to storage.
fn gradients_are_estimated_group_by_group<T: Bits>(dz: &Array2<f32>, stream: Stream) {
    let dz = dz.mapv(T::from_f32);
    let (p, r) = dz.dim();
    for estimator in [Estimator::Exact, Estimator::Approximate] {
        let dense = mvue::compress(dz.view(), estimator, stream).expect("padded").decode();
        assert_eq!(dense.dim(), (r, p.div_ceil(4) * 4));
        for (i, j) in (0..r).flat_map(|i| (0..p.div_ceil(4)).map(move |j| (i, j))) {
            let x: [f32; 4] =
                std::array::from_fn(|at| dz.get((4 * j + at, i)).map_or(0.0, |x| x.to_f32()));
            let [u, v] = [Purpose::Mvue, Purpose::MvueSecond].map(|purpose| {
                let words = stream.with_purpose(purpose).words((i * p.div_ceil(16) + j / 4) as u32);
                oracle::uniform(words[j % 4] >> 8)
            });
            let kept = match estimator {
                Estimator::Exact => mvue::exact(x, u),
                Estimator::Approximate => mvue::approximate(x, [u, v]),
            };
            let mut expected = [T::default(); 4];
            for (i, value) in kept.indices.into_iter().zip(kept.values) {
                expected[usize::from(i)] = T::from_f32(value);
            }
            let found: [u32; 4] = std::array::from_fn(|at| dense[[i, 4 * j + at]].bits());
            assert_eq!(found, expected.map(T::bits), "row {i}, group {j}");
        }
    }
}

proptest! {
    #![proptest_config(cases(250))]

    #[test]
    fn decoding_an_encoded_matrix_masks_it((w, mask) in matrix_and_mask()) {
        compression_is_masking::<f32>(&w, &mask);
        compression_is_masking::<f16>(&w, &mask);
        compression_is_masking::<bf16>(&w, &mask);
    }

    #[test]
    fn masks_have_the_structure_asked_for(w in matrix()) {
        searches_have_their_structure::<f32>(&w);
        searches_have_their_structure::<f16>(&w);
        searches_have_their_structure::<bf16>(&w);
    }

    #[test]
    fn a_transposed_mask_keeps_the_transposed_elements((w, mask) in matrix_and_mask()) {
        let transposed = mask.transpose();
        prop_assert_eq!(transposed.shape(), [mask.columns(), mask.rows()]);
        for ((row, column), _) in w.indexed_iter() {
            prop_assert_eq!(mask.keeps(row, column), transposed.keeps(column, row));
        }
        prop_assert_eq!(mask.count_kept(), (w.len() / 2) as u64);
        prop_assert_eq!(transposed.transpose(), mask);
    }

    #[test]
    fn gradients_of_any_bits(
        p in 0_usize..40,
        r in 0_usize..4,
        seed in any::<u64>(),
        step in any::<u32>(),
        bits in prop::collection::vec(any_bits(), 160),
    ) {
        let dz = Array2::from_shape_vec((p, r), bits[..p * r].to_vec()).expect("p * r values");
        let stream = Stream::new(seed, Site::new(Purpose::Mvue, 3), 1, step);
        gradients_are_estimated_group_by_group::<f32>(&dz, stream);
        gradients_are_estimated_group_by_group::<f16>(&dz, stream);
        gradients_are_estimated_group_by_group::<bf16>(&dz, stream);
    }

    #[test]
    fn masked_decay_pulls_what_is_pruned(
        (w, mask) in matrix_and_mask(),
        lambda in 0.0_f32..1.0,
        start in any_bits(),
    ) {
        let mut g = Array2::from_elem(w.dim(), start);
        decay::masked_decay(g.view_mut(), w.view(), &mask, lambda).expect("one shape");
        for ((row, column), &g) in g.indexed_iter() {
            let kept = mask.keeps(row, column);
            let expected = if kept { start } else { start + lambda * w[[row, column]] };
            prop_assert!(
                g.to_bits() == expected.to_bits() || g.is_nan() && expected.is_nan(),
                "({row}, {column}): {g}, not {expected}"
            );
        }
    }

    #[test]
    fn flips_are_counted_element_by_element((w, a) in matrix_and_mask(), seed in any::<u16>()) {
        let mut b = a.clone();
        for (at, bits) in b.tiles_mut().iter_mut().enumerate() {
            *bits ^= seed.rotate_left(at as u32);
        }
        let flipped = |&((row, column), _): &((usize, usize), _)| {
            a.keeps(row, column) != b.keeps(row, column)
        };
        let expected = w.indexed_iter().filter(flipped).count() as u64;
        prop_assert_eq!(flip::flip_count(&a, &b), Ok(expected));
        let rate = flip::flip_rate(expected, w.len() as u64);
        prop_assert!((0.0..=1.0).contains(&rate));
        prop_assert!((rate * w.len() as f64 - expected as f64).abs() <= 1e-9);
    }

    #[test]
    fn ragged_shapes_are_refused_by_name(rows in 0_usize..10, columns in 0_usize..10) {
        let w = Array2::<f32>::zeros((rows, columns));
        let tiled = rows.is_multiple_of(4) && columns.is_multiple_of(4);
        let error_of = |result: Result<(), Error>| result.err();
        let refused = |operation| (!tiled).then_some(Error::NotTiled { operation, rows, columns });
        for kind in MaskKind::ALL {
            let error = error_of(search::mask_search(w.view(), kind).map(drop));
            prop_assert_eq!(error, refused("mask search"));
        }
        let error = error_of(search::mask_search_greedy(w.view()).map(drop));
        prop_assert_eq!(error, refused("mask search"));
        prop_assert_eq!(error_of(Mask::empty(rows, columns).map(drop)), refused("mask"));
        let tiles = vec![0; rows * columns / 16];
        let error = error_of(Mask::from_tiles(rows, columns, tiles).map(drop));
        prop_assert_eq!(error, refused("mask"));

        let grouped = |operation| {
            let error = Error::NotGrouped { operation, length: columns };
            (!columns.is_multiple_of(4)).then_some(error)
        };
        let error = error_of(prune::soft_threshold_scale(w.view()).map(drop));
        prop_assert_eq!(error, grouped("soft threshold"));
        let error = error_of(Compressed24::<f32>::zeros(rows, columns).map(drop));
        prop_assert_eq!(error, grouped("compress"));

        let other = Mask::empty(12, 12).expect("tiled");
        let (expected, found) = ([rows, columns], [12, 12]);
        let shape = |operation| Some(Error::Shape { operation, expected, found });
        prop_assert_eq!(error_of(prune::masked(w.view(), &other).map(drop)), shape("prune"));
        let error = error_of(Compressed24::encode(w.view(), &other).map(drop));
        prop_assert_eq!(error, shape("encode"));
        let error = error_of(decay::masked_decay(w.clone().view_mut(), w.view(), &other, 1.0));
        prop_assert_eq!(error, shape("masked decay"));
        if tiled {
            let own = Mask::empty(rows, columns).expect("tiled");
            let error = error_of(flip::flip_count(&own, &other).map(drop));
            prop_assert_eq!(error, shape("flip count"));
        }
    }

    #[test]
    fn a_soft_threshold_is_continuous_and_scaled(
        x in prop::array::uniform4(-4.0_f32..4.0),
        scale in 0.5_f32..2.0,
    ) {
        let pattern = prune::largest_two(x);
        let found = prune::group(x, pattern, prune::ValueMap::SoftThreshold { scale });
        let mut sorted = x.map(f32::abs);
        sorted.sort_by(f32::total_cmp);
        for i in 0..4 {
            let kept = pattern.indices().contains(&(i as u8));
            let shrunk = (x[i].abs() - sorted[1]) * x[i].signum() * scale;
            let expected = if kept { shrunk } else { 0.0 };
            prop_assert_eq!(found[i], expected);
        }
        // The scale is a minimum: the squared distance is no smaller slightly to either side.
        let w = Array2::from_shape_vec((1, 4), x.to_vec()).expect("one group");
        let best = f64::from(prune::soft_threshold_scale(w.view()).expect("one group"));
        let distance = |scale: f64| -> f64 {
            let soft = prune::group(x, pattern, prune::ValueMap::SoftThreshold { scale: 1.0 });
            (0..4).map(|i| (f64::from(x[i]) - scale * f64::from(soft[i])).powi(2)).sum()
        };
        for nearby in [best * 0.999, best * 1.001] {
            prop_assert!(distance(best) <= distance(nearby));
        }
    }
}
