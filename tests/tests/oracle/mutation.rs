//! The tests detect one wrong bit of metadata and one wrong entry of the code table.

use ndarray::Array2;
use sparse24_core::{Mask, compressed::Compressed24, search, tile::TilePattern};
use sparse24_tests::oracle;

/// Checks a code table. A tile that is 1 where a pattern keeps and 0 elsewhere has that pattern as
/// its only optimum, so the tile's code must map to it; all other codes must be void.
fn is_right(table: &[u16; 128]) -> bool {
    let mut expected = [0; 128];
    for rows in oracle::tile_patterns() {
        let bits = oracle::bits(rows.map(|row| oracle::PAIRS[row]));
        let tile = std::array::from_fn(|at| f32::from(bits >> at & 1));
        expected[usize::from(search::code(&tile))] = bits;
    }
    *table == expected
}

#[test]
fn every_wrong_entry_of_the_code_table_is_noticed() {
    assert!(is_right(&search::CODES));
    for code in 0..128 {
        let wrong = (0..16)
            .map(|bit| search::CODES[code] ^ 1 << bit)
            .chain(TilePattern::ALL.map(TilePattern::bits))
            .chain([0]);
        for entry in wrong.filter(|&entry| entry != search::CODES[code]) {
            let mut table = search::CODES;
            table[code] = entry;
            assert!(!is_right(&table), "entry {code} may be {entry:#06x}");
        }
    }
}

#[test]
fn every_wrong_bit_of_metadata_is_noticed() {
    // Every row of a tile, every pattern, even and odd numbers of groups per row; distinct nonzero
    // values.
    for columns in [4, 8, 12] {
        for pattern in TilePattern::ALL {
            let mask =
                Mask::from_tiles(4, columns, vec![pattern.bits(); columns / 4]).expect("tiled");
            let w = Array2::from_shape_fn((4, columns), |(row, column)| {
                (1 + row * columns + column) as f32
            });
            let right = Compressed24::encode(w.view(), &mask).expect("row-wise");
            let dense = right.decode();
            for (at, bit) in
                (0..right.metadata().len()).flat_map(|at| (0..8).map(move |bit| (at, bit)))
            {
                let mut metadata = right.metadata().to_vec();
                metadata[at] ^= 1 << bit;
                if let Ok(wrong) = Compressed24::from_parts(right.values().to_owned(), metadata) {
                    assert_ne!(
                        wrong.decode(),
                        dense,
                        "bit {bit} of byte {at}, {pattern:?}, {columns} columns"
                    );
                }
            }
        }
    }
}
