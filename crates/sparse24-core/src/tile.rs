//! 4x4 tiles of a mask, and the 90 transposable patterns, which keep two elements in every row and
//! in every column.

use crate::group::Pattern;

/// One of the 90 4x4 patterns with two kept elements in every row and column.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TilePattern(u16);

impl TilePattern {
    /// All 90, in ascending order of their bits.
    pub const ALL: [Self; 90] = enumerate();

    /// The pattern with these bits; `None` unless every row and column keeps two.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Option<Self> {
        if is_row_wise(bits) && is_row_wise(transpose(bits)) { Some(Self(bits)) } else { None }
    }

    /// Bit `4*row + column` is set if that element is kept.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Whether the element is kept.
    ///
    /// # Panics
    /// Unless row and column are below 4.
    #[must_use]
    pub const fn keeps(self, row: usize, column: usize) -> bool {
        assert!(row < 4 && column < 4, "an element outside a tile");
        self.0 >> (4 * row + column) & 1 == 1
    }

    /// The pattern of one row.
    ///
    /// # Panics
    /// Unless the row is below 4.
    #[must_use]
    pub fn row(self, row: usize) -> Pattern {
        assert!(row < 4, "a row outside a tile");
        Pattern::from_bits((self.0 >> (4 * row)) as u8 & 0xf)
            .expect("a tile pattern keeps two in every row")
    }

    /// The transposed pattern.
    #[must_use]
    pub const fn transpose(self) -> Self {
        Self(transpose(self.0))
    }
}

impl core::fmt::Debug for TilePattern {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "TilePattern({:#06x})", self.0)
    }
}

/// The structure of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MaskKind {
    /// Two kept in every row and column of every 4x4 tile.
    Transposable,
    /// Two kept in every group of four along a row.
    RowWise,
    /// Two kept in every group of four along a column.
    ColumnWise,
}

impl MaskKind {
    /// Every structure.
    pub const ALL: [Self; 3] = [Self::Transposable, Self::RowWise, Self::ColumnWise];

    /// Whether sixteen mask bits have this structure.
    #[must_use]
    pub const fn admits(self, bits: u16) -> bool {
        match self {
            Self::Transposable => TilePattern::from_bits(bits).is_some(),
            Self::RowWise => is_row_wise(bits),
            Self::ColumnWise => is_row_wise(transpose(bits)),
        }
    }
}

impl core::fmt::Display for MaskKind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Transposable => "transposable",
            Self::RowWise => "row-wise 2:4",
            Self::ColumnWise => "column-wise 2:4",
        })
    }
}

/// Whether every row of sixteen mask bits keeps exactly two.
#[must_use]
pub const fn is_row_wise(bits: u16) -> bool {
    let mut row = 0;
    while row < 4 {
        if (bits >> (4 * row) & 0xf).count_ones() != 2 {
            return false;
        }
        row += 1;
    }
    true
}

/// Transposes sixteen mask bits: bit `4*row + column` moves to `4*column + row`.
#[must_use]
pub const fn transpose(bits: u16) -> u16 {
    // Swap the off-diagonal bits of each 2x2 block, then the off-diagonal 2x2 blocks.
    let swap = (bits ^ bits >> 3) & 0x0a0a;
    let bits = bits ^ swap ^ swap << 3;
    let swap = (bits ^ bits >> 6) & 0x00cc;
    bits ^ swap ^ swap << 6
}

const fn enumerate() -> [TilePattern; 90] {
    let mut all = [TilePattern(0); 90];
    let (mut bits, mut found) = (0, 0);
    while bits < u16::MAX {
        if let Some(pattern) = TilePattern::from_bits(bits) {
            all[found] = pattern;
            found += 1;
        }
        bits += 1;
    }
    assert!(found == 90);
    all
}

#[cfg(test)]
mod tests {
    use super::{TilePattern, is_row_wise, transpose};

    #[test]
    fn transposing_every_bit() {
        for at in 0..16 {
            assert_eq!(transpose(1 << at), 1 << (at % 4 * 4 + at / 4), "bit {at}");
        }
    }

    #[test]
    fn ninety_have_two_in_every_row_and_column() {
        let two = |bits: u16, cells: [u16; 4]| {
            cells.iter().filter(|&&at| bits >> at & 1 == 1).count() == 2
        };
        let valid = |bits: u16| {
            (0..4).all(|i| {
                two(bits, [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3])
                    && two(bits, [i, i + 4, i + 8, i + 12])
            })
        };
        assert!(TilePattern::ALL.into_iter().all(|pattern| valid(pattern.bits())));
        assert!(TilePattern::ALL.is_sorted_by(|a, b| a < b));
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 251 } else { 1 }) {
            assert_eq!(TilePattern::from_bits(bits).is_some(), valid(bits), "{bits:#06x}");
        }
    }

    #[test]
    fn rows_of_a_pattern() {
        // Kept: 01 / 23 / 02 / 13.
        let pattern = TilePattern::from_bits(0xa5c3).expect("two in every row and column");
        assert_eq!([0, 1, 2, 3].map(|row| pattern.row(row).nibble()), [0x4, 0xe, 0x8, 0xd]);
        assert!(pattern.keeps(2, 2) && !pattern.keeps(2, 1));
        assert!(is_row_wise(0x3333) && TilePattern::from_bits(0x3333).is_none());
        assert_eq!(pattern.transpose().transpose(), pattern);
    }
}
