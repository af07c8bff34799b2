//! Sixteen mask nibbles in one word: four tiles side by side, rearranged by rows or columns, and
//! turned into metadata.
//!
//! Invariant: bit `16*tile + 4*row + column` of a word of tiles is that element of that tile.
//! Deliberately absent: memory.

const EACH: u64 = 0x1111_1111_1111_1111;

/// Four tiles as one word, missing ones empty.
#[inline(always)]
pub(crate) fn word(tiles: &[u16]) -> u64 {
    tiles
        .iter()
        .take(4)
        .enumerate()
        .fold(0, |word, (at, &bits)| word | u64::from(bits) << (16 * at))
}

/// Bit `16*row + 4*tile + column`: the mask of sixteen columns, row after row.
#[inline(always)]
pub(crate) fn rows(word: u64) -> u64 {
    let swap = (word ^ word >> 12) & 0x0000_f0f0_0000_f0f0;
    let word = word ^ swap ^ swap << 12;
    let swap = (word ^ word >> 24) & 0x0000_0000_ff00_ff00;
    word ^ swap ^ swap << 24
}

/// Every tile transposed: nibble `4*tile + column` holds the kept rows of that column.
#[inline(always)]
pub(crate) fn transpose_tiles(word: u64) -> u64 {
    let swap = (word ^ word >> 3) & 0x0a0a_0a0a_0a0a_0a0a;
    let word = word ^ swap ^ swap << 3;
    let swap = (word ^ word >> 6) & 0x00cc_00cc_00cc_00cc;
    word ^ swap ^ swap << 6
}

/// Each nibble with two set bits becomes its metadata `i0 | i1 << 2`; any other nibble becomes some
/// metadata.
#[inline(always)]
pub(crate) fn metadata(word: u64) -> u64 {
    let bit = |at: u32| word >> at & EACH;
    let not = |x: u64| x ^ EACH;
    let first_low = bit(1) & not(bit(0));
    let first_high = not(bit(0) | bit(1));
    let second_low = bit(3) | not(bit(2));
    let second_high = bit(2) | bit(3);
    first_low | first_high << 1 | second_low << 2 | second_high << 3
}

/// Sixteen words as a matrix of nibbles, transposed: nibble j of word i becomes nibble i of word j.
/// Many matrices side by side.
#[inline(always)]
pub(crate) fn transpose<const N: usize>(words: &mut [[u64; N]; 16]) {
    for (distance, low) in [
        (8, 0xffff_ffff),
        (4, 0xffff_0000_ffff),
        (2, 0x00ff_00ff_00ff_00ff),
        (1, 0x0f0f_0f0f_0f0f_0f0f),
    ] {
        for at in (0..16).filter(|at| at & distance == 0) {
            let (before, after) = words.split_at_mut(at + distance);
            for (a, b) in before[at].iter_mut().zip(&mut after[0]) {
                let swap = (*a >> (4 * distance) ^ *b) & low;
                *b ^= swap;
                *a ^= swap << (4 * distance);
            }
        }
    }
}

/// Zero if each of the sixteen nibbles has exactly two set bits.
#[inline(always)]
pub(crate) fn not_pairs(word: u64) -> u64 {
    let twos = word - (word >> 1 & 0x5555_5555_5555_5555);
    ((twos & 0x3333_3333_3333_3333) + (twos >> 2 & 0x3333_3333_3333_3333)) ^ (2 * EACH)
}

#[cfg(test)]
mod tests {
    use sparse24_core::{group::Pattern, tile};

    use super::*;

    #[test]
    fn metadata_is_that_of_every_pattern_in_every_place() {
        for pattern in Pattern::ALL {
            for at in 0..16 {
                let nibble = metadata(u64::from(pattern.bits()) << (4 * at)) >> (4 * at) & 0xf;
                assert_eq!(nibble as u8, pattern.nibble(), "{pattern:?} at {at}");
            }
        }
    }

    #[test]
    fn pairs_are_the_six_patterns() {
        for nibble in 0..16 {
            for at in 0..16 {
                let word = 0x3333_3333_3333_3333 & !(0xf << (4 * at)) | nibble << (4 * at);
                assert_eq!(
                    not_pairs(word) == 0,
                    Pattern::from_bits(nibble as u8).is_some(),
                    "{nibble:#x} at {at}"
                );
            }
        }
    }

    #[test]
    fn a_matrix_of_nibbles_is_transposed() {
        let words: [[u64; 2]; 16] = core::array::from_fn(|i| {
            [1, 2].map(|at| 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(at * (i as u64 + 1)))
        });
        let mut transposed = words;
        transpose(&mut transposed);
        for (i, j, at) in (0..512).map(|n| (n / 32, n / 2 % 16, n % 2)) {
            assert_eq!(
                transposed[j][at] >> (4 * i) & 0xf,
                words[i][at] >> (4 * j) & 0xf,
                "matrix {at}, word {j}, nibble {i}"
            );
        }
    }

    #[test]
    fn rows_and_columns_of_single_bits() {
        for at in 0..64 {
            let (of, row, column) = (at / 16, at / 4 % 4, at % 4);
            assert_eq!(rows(1 << at), 1 << (16 * row + 4 * of + column));
            assert_eq!(transpose_tiles(1 << at), 1 << (16 * of + 4 * column + row));
        }
        let tiles = [0x1234, 0xfedc, 0x0f55, 0x8001];
        assert_eq!(transpose_tiles(word(&tiles)), word(&tiles.map(tile::transpose)));
    }
}
