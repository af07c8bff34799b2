//! A mask over a matrix: one bit an element, 1 = kept, stored as one `u16` a 4x4 tile.
//!
//! Invariant: rows and columns are multiples of 4 and there is one tile for each. A mask may be transposable, row-wise,
//! column-wise or none of them; [`Mask::check`] proves it. Deliberately absent: where a mask comes from.

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
    /// [`Error::NotTiled`] unless both lengths are multiples of 4; [`Error::Length`] unless there are `rows*columns/16` tiles.
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
        assert!(row < self.rows && column < self.columns, "element ({row}, {column}) outside of {:?}", self.shape());
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

pub(crate) fn check_tiled(operation: &'static str, [rows, columns]: [usize; 2]) -> Result<(), Error> {
    if rows % 4 == 0 && columns % 4 == 0 { Ok(()) } else { Err(Error::NotTiled { operation, rows, columns }) }
}

pub(crate) fn check_shape(operation: &'static str, expected: [usize; 2], found: [usize; 2]) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Shape { operation, expected, found }) }
}
