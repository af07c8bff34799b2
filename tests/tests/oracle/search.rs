//! The transposable search over ternary tiles, whose sums are exact in f32, so that its kept norm
//! must equal the brute-force optimum.

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
    is_pattern: Vec<bool>,
}

impl Ternary {
    fn new() -> Self {
        let rows: Vec<[u8; 4]> =
            (0..ROWS as u8).map(|n| [n / 27, n / 9 % 3, n / 3 % 3, n % 3]).collect();
        let pair_sums =
            rows.iter().map(|row| oracle::PAIRS.map(|[j, k]| row[j] + row[k])).collect();
        let patterns = oracle::tile_patterns();
        let mut is_pattern = vec![false; 1 << 16];
        for rows in &patterns {
            is_pattern[usize::from(oracle::bits(rows.map(|row| oracle::PAIRS[row])))] = true;
        }
        Self { rows, pair_sums, patterns, is_pattern }
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

    /// The exact search is optimal on a tile with exact sums.
    fn check(&self, n: u64) {
        let (rows, tile) = self.tile(n);
        let found = search::transposable(&tile).bits();
        assert!(self.is_pattern[usize::from(found)], "tile {n}: {found:#06x} is none of the 90");
        assert_eq!(
            self.kept(rows, found),
            self.best(rows),
            "tile {n}: {found:#06x} is not optimal"
        );
        assert_eq!(found, oracle::canonical(&tile), "tile {n}: a tie was not broken as decided");
    }

    /// The greedy search keeps at least half of the optimum.
    fn check_greedy(&self, n: u64) {
        let (rows, tile) = self.tile(n);
        let found = search::greedy(&tile).bits();
        assert!(self.is_pattern[usize::from(found)], "tile {n}: {found:#06x} is none of the 90");
        assert!(
            2 * self.kept(rows, found) >= self.best(rows),
            "tile {n}: {found:#06x} keeps less than half of the best"
        );
    }
}

#[test]
fn the_patterns_equal_an_enumeration() {
    let mut expected: Vec<u16> = oracle::tile_patterns()
        .into_iter()
        .map(|rows| oracle::bits(rows.map(|row| oracle::PAIRS[row])))
        .collect();
    expected.sort_unstable();
    assert_eq!(TilePattern::ALL.map(TilePattern::bits).to_vec(), expected);
}

#[test]
fn a_sample_of_ternary_tiles() {
    let ternary = Ternary::new();
    // A stride coprime to 3, so that every digit varies.
    for n in (0..TILES).step_by(if cfg!(miri) { 4_000_037 } else { 1_009 }) {
        ternary.check(n);
        ternary.check_greedy(n);
        let (_, tile) = ternary.tile(n);
        assert_eq!(search::greedy(&tile).bits(), oracle::greedy(&tile), "tile {n}");
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "43,046,721 tiles take a release build")]
fn all_ternary_tiles() {
    let ternary = Ternary::new();
    (0..TILES).into_par_iter().for_each(|n| ternary.check(n));
}

#[test]
#[cfg_attr(debug_assertions, ignore = "43,046,721 tiles take a release build")]
fn all_ternary_tiles_greedy() {
    let ternary = Ternary::new();
    (0..TILES).into_par_iter().for_each(|n| ternary.check_greedy(n));
}
