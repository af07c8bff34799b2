//! Products with a half-empty operand, in every layout and at every SIMD level.

use ndarray::{Array2, s};
use sparse24_core::{MaskKind, op::Accumulate, prune, search};
use sparse24_cpu::{
    Simd, on_threads,
    strips::{Strips, matmul, matmul_at},
};

use crate::input::{assert_close, column_major, poison, random};

/// Unit roundoff of f32.
const U: f64 = 1.0 / (1_u64 << 24) as f64;

fn wide(x: &Array2<f32>) -> Array2<f64> {
    x.mapv(f64::from)
}

/// A matrix of this shape under the mask that a search finds.
fn pruned([m, k]: [usize; 2], kind: MaskKind) -> Array2<f32> {
    let a = random([m.next_multiple_of(4), k.next_multiple_of(4)], 1, 1.0);
    let mask = search::mask_search(a.view(), kind).unwrap();
    prune::masked(a.view(), &mask).unwrap().slice_move(s![..m, ..k])
}

#[test]
fn every_layout_is_within_the_bound_at_every_level() {
    let shapes = [
        [4, 4, 1],
        [5, 7, 9],
        [64, 128, 64],
        [131, 129, 17],
        [68, 260, 150],
        [1030, 132, 33],
        [3, 0, 5],
    ];
    for ([m, k, n], kind) in
        shapes.into_iter().flat_map(|shape| MaskKind::ALL.map(|kind| (shape, kind)))
    {
        let (a, b) = (pruned([m, k], kind), random([k, n], 2, 1.0));
        let (c, bias) = (random([m, n], 3, 1.0), random([1, m], 4, 1.0));
        let expected = wide(&a).dot(&wide(&b));
        let magnitudes = wide(&a).mapv(f64::abs).dot(&wide(&b).mapv(f64::abs));
        let column = wide(&bias).t().to_owned();
        let bound = (magnitudes + column.mapv(f64::abs)) * ((k + 2) as f64 * U);
        let biased = &expected + &column;
        let sum = wide(&c) + &expected;
        let added_bound = &bound + &(sum.mapv(f64::abs) * U);
        let mut packed = Strips::zeros([8, 300]).unwrap();
        for a in [a.clone(), column_major(&a)] {
            packed.pack(a.view());
            assert_eq!(packed.shape(), [m, k]);
            for b in [b.clone(), column_major(&b)] {
                for level in Simd::ALL.into_iter().filter_map(Simd::available) {
                    let [over, add] = [Accumulate::Overwrite, Accumulate::Add];
                    let mut rows = poison([m, n]);
                    let mut columns = poison([n, m]);
                    let mut added = c.clone();
                    let bias = Some(bias.row(0));
                    matmul_at(level, &packed, b.view(), bias, rows.view_mut(), over).unwrap();
                    let transposed = columns.view_mut().reversed_axes();
                    matmul_at(level, &packed, b.view(), bias, transposed, over).unwrap();
                    matmul_at(level, &packed, b.view(), None, added.view_mut(), add).unwrap();
                    assert_close("biased", rows.view(), &biased, &bound);
                    assert_eq!(columns.t(), rows, "the same bits in either layout");
                    assert_close("added", added.view(), &sum, &added_bound);
                }
            }
        }
    }
}

#[test]
fn packing_again_and_threads_change_no_bits() {
    let b = random([260, 200], 2, 1.0);
    let product = |packed: &Strips, threads| {
        let mut c = poison([300, 200]);
        let work = || matmul(packed, b.view(), None, c.view_mut(), Accumulate::Overwrite);
        on_threads(threads, work).unwrap().unwrap();
        c
    };
    let a = pruned([300, 260], MaskKind::Transposable);
    let mut fresh = Strips::default();
    fresh.pack(a.view());
    let expected = product(&fresh, 1);
    // Another pattern, another shape, and the same pattern with other values before.
    let mut used = Strips::zeros([300, 260]).unwrap();
    for before in
        [pruned([300, 260], MaskKind::RowWise), pruned([40, 33], MaskKind::RowWise), 2.0 * &a]
    {
        used.pack(before.view());
        used.pack(a.view());
        assert_eq!(product(&used, 3), expected);
    }
}

#[test]
fn zeros_are_left_out_and_nan_is_not() {
    let (mut a, mut b) = (Array2::zeros((8, 12)), random([12, 20], 3, 1.0));
    a[[5, 2]] = f32::NAN;
    b.row_mut(7).fill(f32::INFINITY);
    let (mut packed, mut c) = (Strips::default(), poison([8, 20]));
    packed.pack(a.view());
    matmul(&packed, b.view(), None, c.view_mut(), Accumulate::Overwrite).unwrap();
    assert!(c.indexed_iter().all(|((row, _), &x)| if row == 5 { x.is_nan() } else { x == 0.0 }));
}
