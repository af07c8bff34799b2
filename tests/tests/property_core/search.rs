//! The transposable search, its greedy approximation, and the gap.

use proptest::prelude::*;
use sparse24_core::{flip, search};
use sparse24_tests::oracle;

use super::input::{cases, tile};

fn best(tile: &[f32; 16]) -> f64 {
    let patterns = oracle::tile_patterns();
    patterns
        .into_iter()
        .map(|rows| oracle::kept_norm(tile, oracle::bits(rows.map(|row| oracle::PAIRS[row]))))
        .fold(0.0, f64::max)
}

fn is_transposable(bits: u16) -> bool {
    oracle::tile_patterns()
        .into_iter()
        .any(|rows| oracle::bits(rows.map(|row| oracle::PAIRS[row])) == bits)
}

proptest! {
    #![proptest_config(cases(4000))]

    #[test]
    fn the_search_is_optimal(tile in tile()) {
        // A candidate, 2*best - sum, has at most six layers of additions, and each layer errs by
        // 2^-24 of the sum at most. Winner and optimum err by that each, and the norm by half: 6 *
        // 2^-24 < 2^-21.
        let bound = oracle::norm(&tile) * 2.0_f64.powi(-21);
        let best = best(&tile);
        for tile in [tile, oracle::transposed(&tile)] {
            let found = search::transposable(&tile).bits();
            prop_assert!(is_transposable(found));
            let kept = oracle::kept_norm(&tile, found);
            let difference = (best - kept).abs();
            prop_assert!(difference <= bound, "{found:#06x} keeps {kept}, the best {best}");
        }
    }

    #[test]
    fn greedy_is_defined_and_keeps_half(tile in tile()) {
        let found = search::greedy(&tile).bits();
        prop_assert!(is_transposable(found));
        prop_assert_eq!(found, oracle::greedy(&tile));
        let (kept, best, sum) = (oracle::kept_norm(&tile, found), best(&tile), oracle::norm(&tile));
        // A gain is two roundings of at most 2^-24 of the sum off.
        prop_assert!(2.0 * kept >= best - sum * 2.0_f64.powi(-22), "{found:#06x} keeps {kept} of \
                     {best}");
        let exact = oracle::kept_norm(&tile, search::transposable(&tile).bits());
        prop_assert!(exact >= kept - sum * 2.0_f64.powi(-20), "exact keeps {exact}, greedy {kept}");
    }

    #[test]
    fn the_gap_is_to_the_best_other_pattern(tile in tile()) {
        let norm = |rows: [usize; 4]| {
            oracle::kept_norm(&tile, oracle::bits(rows.map(|row| oracle::PAIRS[row])))
        };
        let mut norms: Vec<f64> = oracle::tile_patterns().into_iter().map(norm).collect();
        norms.sort_by(f64::total_cmp);
        // The search may stop short of the best by 2^-21 of the sum; the result is rounded to f32.
        let bound = oracle::norm(&tile) * 2.0_f64.powi(-21);
        let (gap, expected) = (f64::from(flip::tile_gap(&tile)), norms[89] - norms[88]);
        prop_assert!(gap >= 0.0 && (gap - expected).abs() <= bound, "{gap}, expected {expected}");
    }
}
