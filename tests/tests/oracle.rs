//! Core's searches against exhaustive enumeration: the 90 patterns, and ternary tiles, whose sums
//! are exact in f32, so that the kept norm must equal the brute-force optimum.
//!
//! Expected values come from `sparse24_tests::oracle`, which shares no table with the crates under
//! test.

use rayon::prelude::*;
use sparse24_core::{search, tile::TilePattern};
use sparse24_tests::oracle;

const ROWS: usize = 81;
const TILES: u64 = (ROWS as u64).pow(4);

/// Tables for a fast brute force: the pair sums of all 81 ternary rows, and each pattern as four
/// pairs.
struct Ternary {
    rows: Vec<[u8; 4]>,
    pair_sums: Vec<[u8; 6]>,
    patterns: Vec<[usize; 4]>,
}

impl Ternary {
    fn new() -> Self {
        let rows: Vec<[u8; 4]> =
            (0..ROWS as u8).map(|n| [n / 27, n / 9 % 3, n / 3 % 3, n % 3]).collect();
        let pair_sums =
            rows.iter().map(|row| oracle::PAIRS.map(|[j, k]| row[j] + row[k])).collect();
        Self { rows, pair_sums, patterns: oracle::tile_patterns() }
    }

    /// Tile number n of 3^16; its rows are the base-81 digits of n.
    fn tile(&self, n: u64) -> ([usize; 4], [f32; 16]) {
        let rows = [0, 1, 2, 3].map(|i| (n / (ROWS as u64).pow(3 - i) % ROWS as u64) as usize);
        (rows, std::array::from_fn(|at| f32::from(self.rows[rows[at / 4]][at % 4])))
    }

    fn best(&self, rows: [usize; 4]) -> u8 {
        let [a, b, c, e] = rows.map(|row| self.pair_sums[row]);
        self.patterns
            .iter()
            .map(|&[i, j, k, l]| (a[i] + b[j]) + (c[k] + e[l]))
            .max()
            .expect("there are 90")
    }

    fn kept(&self, rows: [usize; 4], bits: u16) -> u8 {
        (0..16).filter(|at| bits >> at & 1 == 1).map(|at| self.rows[rows[at / 4]][at % 4]).sum()
    }

    /// On a tile with exact sums, the exact search is optimal, and the greedy one keeps at least
    /// half of the optimum.
    fn check(&self, n: u64) {
        let (rows, tile) = self.tile(n);
        let [found, greedy] =
            [search::transposable(&tile), search::greedy(&tile)].map(TilePattern::bits);
        let best = self.best(rows);
        assert_eq!(self.kept(rows, found), best, "tile {n}: {found:#06x} is not optimal");
        assert_eq!(found, oracle::canonical(&tile), "tile {n}: a tie was not broken as decided");
        assert!(
            2 * self.kept(rows, greedy) >= best,
            "tile {n}: {greedy:#06x} keeps less than half of the best"
        );
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "43,046,721 tiles take a release build")]
fn all_ternary_tiles() {
    let ternary = Ternary::new();
    (0..TILES).into_par_iter().for_each(|n| ternary.check(n));
}

/// A tile that is 1 where a pattern keeps and 0 elsewhere has that pattern as its only optimum, so
/// the tile's code must map to it; all other codes must be void.
#[test]
fn every_pattern_has_its_code() {
    let mut expected = [0; 128];
    for rows in oracle::tile_patterns() {
        let bits = oracle::bits(rows.map(|row| oracle::PAIRS[row]));
        let tile = std::array::from_fn(|at| f32::from(bits >> at & 1));
        expected[usize::from(search::code(&tile))] = bits;
    }
    assert_eq!(search::CODES, expected);
}
