//! A mask over a matrix: one bit an element, 1 = kept, stored as one `u16` a 4x4 tile.
//!
//! Invariant: rows and columns are multiples of 4 and there is one tile for each. A mask may be
//! transposable, row-wise, column-wise or none of them; [`Mask::check`] proves it. Deliberately
//! absent: where a mask comes from.

use alloc::{vec, vec::Vec};

use crate::{Error, tile};

/// Which structure a mask has, or a search must give it.
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
    /// Whether sixteen mask bits have this structure.
    #[must_use]
    pub const fn admits(self, bits: u16) -> bool {
        match self {
            Self::Transposable => tile::TilePattern::from_bits(bits).is_some(),
            Self::RowWise => tile::is_row_wise(bits),
            Self::ColumnWise => tile::is_row_wise(tile::transpose(bits)),
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

/// One bit an element of a `[rows, columns]` matrix; both are multiples of 4.
///
/// Bit `4*r + c` of tile `(i, j)` is element `(4i + r, 4j + c)`; tiles are row-major.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mask {
    rows: usize,
    columns: usize,
    tiles: Vec<u16>,
}

impl Mask {
    /// A mask that keeps nothing.
    ///
    /// # Errors
    /// [`Error::NotTiled`] unless both lengths are multiples of 4.
    pub fn empty(rows: usize, columns: usize) -> Result<Self, Error> {
        check_tiled("mask", [rows, columns])?;
        Ok(Self { rows, columns, tiles: vec![0; rows / 4 * (columns / 4)] })
    }

    /// A mask of these tiles, row-major, whatever their structure.
    ///
    /// # Errors
    /// [`Error::NotTiled`] unless both lengths are multiples of 4; [`Error::Length`] unless there
    /// are `rows*columns/16` tiles.
    pub fn from_tiles(rows: usize, columns: usize, tiles: Vec<u16>) -> Result<Self, Error> {
        check_tiled("mask", [rows, columns])?;
        let expected = rows / 4 * (columns / 4);
        if tiles.len() != expected {
            return Err(Error::Length { operation: "mask", expected, found: tiles.len() });
        }
        Ok(Self { rows, columns, tiles })
    }

    /// Rows, in elements.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, in elements.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// `[rows, columns]`, in elements.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Sixteen bits a tile, tiles row-major.
    #[must_use]
    pub fn tiles(&self) -> &[u16] {
        &self.tiles
    }

    /// The tiles, to be overwritten.
    #[must_use]
    pub fn tiles_mut(&mut self) -> &mut [u16] {
        &mut self.tiles
    }

    /// Whether the element is kept.
    ///
    /// # Panics
    /// Outside of the shape.
    #[must_use]
    pub fn keeps(&self, row: usize, column: usize) -> bool {
        assert!(
            row < self.rows && column < self.columns,
            "element ({row}, {column}) outside of {:?}",
            self.shape()
        );
        self.tiles[row / 4 * (self.columns / 4) + column / 4] >> (row % 4 * 4 + column % 4) & 1 == 1
    }

    /// How many elements are kept.
    #[must_use]
    pub fn count_kept(&self) -> u64 {
        self.tiles.iter().map(|bits| u64::from(bits.count_ones())).sum()
    }

    /// Proves the structure.
    ///
    /// # Errors
    /// [`Error::Structure`] with the first tile that lacks it.
    pub fn check(&self, expected: MaskKind) -> Result<(), Error> {
        match self.tiles.iter().position(|&bits| !expected.admits(bits)) {
            None => Ok(()),
            Some(at) => Err(Error::Structure {
                operation: "mask check",
                expected,
                tile_row: at / (self.columns / 4),
                tile_column: at % (self.columns / 4),
                bits: self.tiles[at],
            }),
        }
    }

    /// The mask of the transposed matrix.
    #[must_use]
    pub fn transpose(&self) -> Self {
        let (tile_rows, tile_columns) = (self.rows / 4, self.columns / 4);
        let tiles = (0..tile_columns)
            .flat_map(|j| (0..tile_rows).map(move |i| (i, j)))
            .map(|(i, j)| tile::transpose(self.tiles[i * tile_columns + j]))
            .collect();
        Self { rows: self.columns, columns: self.rows, tiles }
    }
}

pub(crate) fn check_tiled(
    operation: &'static str,
    [rows, columns]: [usize; 2],
) -> Result<(), Error> {
    if rows % 4 == 0 && columns % 4 == 0 {
        Ok(())
    } else {
        Err(Error::NotTiled { operation, rows, columns })
    }
}

pub(crate) fn check_shape(
    operation: &'static str,
    expected: [usize; 2],
    found: [usize; 2],
) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Shape { operation, expected, found }) }
}

#[cfg(test)]
mod tests {
    use alloc::{string::ToString, vec};

    use super::{Mask, MaskKind};

    #[test]
    fn elements_lie_tile_by_tile() {
        // One row of two tiles; the second keeps element (3, 0) of it alone.
        let mask = Mask::from_tiles(4, 8, vec![0, 1 << 12]).expect("tiled");
        for (row, column) in (0..4).flat_map(|row| (0..8).map(move |column| (row, column))) {
            assert_eq!(mask.keeps(row, column), (row, column) == (3, 4));
        }
        let transposed = mask.transpose();
        assert_eq!((transposed.shape(), transposed.tiles()), ([8, 4], &[0, 1 << 3][..]));
        assert!(transposed.keeps(4, 3));
        assert_eq!(mask.count_kept(), 1);
    }

    #[test]
    fn a_check_names_the_first_tile_that_fails() {
        let mut mask = Mask::from_tiles(8, 8, vec![0x33cc, 0x33cc, 0x33cc, 0x3333]).expect("tiled");
        assert_eq!(mask.check(MaskKind::RowWise), Ok(()));
        for kind in [MaskKind::Transposable, MaskKind::ColumnWise] {
            let message = mask.check(kind).expect_err("two columns are full").to_string();
            assert_eq!(
                message,
                alloc::format!("mask check: the mask is not {kind}: tile (1, 1) holds 0x3333")
            );
        }
        mask.tiles_mut()[3] = 0x0ff0;
        assert_eq!(mask.check(MaskKind::ColumnWise), Ok(()));
        assert!(mask.check(MaskKind::RowWise).is_err());
    }

    #[test]
    fn ragged_and_empty_shapes() {
        assert_eq!(
            Mask::empty(6, 8).expect_err("ragged").to_string(),
            "mask: shape [6, 8] is not made of 4x4 tiles: both 6 and 8 must be multiples of 4"
        );
        assert_eq!(
            Mask::from_tiles(4, 8, vec![0]).expect_err("a tile short").to_string(),
            "mask: expected 2 elements, found 1"
        );
        let empty = Mask::empty(8, 0).expect("nothing is tiled");
        assert_eq!(
            (empty.check(MaskKind::Transposable), empty.transpose().shape()),
            (Ok(()), [0, 8])
        );
    }
}
