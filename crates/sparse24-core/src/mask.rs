//! A mask over a matrix: one bit per element, 1 = kept, stored as one `u16` per 4x4 tile. A mask
//! may have any structure; [`Mask::check`] verifies it.

use alloc::{vec, vec::Vec};

use crate::{
    Error,
    tile::{self, MaskKind},
};

/// One bit per element of a `[rows, columns]` matrix; both are multiples of 4.
///
/// Bit `4*r + c` of tile `(i, j)` is element `(4i + r, 4j + c)`; tiles are row-major.
///
/// ```
/// use sparse24_core::{Mask, MaskKind};
///
/// let mask = Mask::from_tiles(4, 4, vec![0xa5c3])?;
/// assert!(mask.keeps(0, 0) && !mask.keeps(0, 2));
/// mask.check(MaskKind::Transposable)?;
/// # Ok::<(), sparse24_core::Error>(())
/// ```
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
    /// [`Error::NotTiled`] unless both dimensions are multiples of 4.
    ///
    /// # Panics
    /// If there are more tiles than memory can address.
    pub fn empty(rows: usize, columns: usize) -> Result<Self, Error> {
        check_tiled("mask", [rows, columns])?;
        let tiles = (rows / 4).checked_mul(columns / 4).expect("a mask fits in memory");
        Ok(Self { rows, columns, tiles: vec![0; tiles] })
    }

    /// A mask from row-major tiles of any structure.
    ///
    /// # Errors
    /// [`Error::NotTiled`] unless both dimensions are multiples of 4; [`Error::Length`] unless
    /// there are `rows*columns/16` tiles.
    pub fn from_tiles(rows: usize, columns: usize, tiles: Vec<u16>) -> Result<Self, Error> {
        check_tiled("mask", [rows, columns])?;
        let expected = (rows / 4).saturating_mul(columns / 4);
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

    /// Sixteen bits per tile, tiles row-major.
    #[must_use]
    pub fn tiles(&self) -> &[u16] {
        &self.tiles
    }

    /// Mutable tiles.
    #[must_use]
    pub fn tiles_mut(&mut self) -> &mut [u16] {
        &mut self.tiles
    }

    /// Whether the element is kept.
    ///
    /// # Panics
    /// If the element is outside the matrix.
    #[must_use]
    pub fn keeps(&self, row: usize, column: usize) -> bool {
        assert!(
            row < self.rows && column < self.columns,
            "element ({row}, {column}) outside a mask of shape {:?}",
            self.shape()
        );
        self.tiles[row / 4 * (self.columns / 4) + column / 4] >> (row % 4 * 4 + column % 4) & 1 == 1
    }

    /// The number of kept elements.
    #[must_use]
    pub fn count_kept(&self) -> u64 {
        self.tiles.iter().map(|bits| u64::from(bits.count_ones())).sum()
    }

    /// Verifies the structure.
    ///
    /// # Errors
    /// [`Error::Structure`] with the first tile that does not have it.
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
            .take(self.tiles.len())
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

    use super::Mask;
    use crate::{Error, MaskKind};

    #[test]
    fn elements_and_transpose() {
        // One row of two tiles; the second keeps only its element (3, 0).
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
    fn a_failed_check_names_the_first_invalid_tile() {
        let mut mask = Mask::from_tiles(8, 8, vec![0x33cc, 0x33cc, 0x33cc, 0x3333]).expect("tiled");
        assert_eq!(mask.check(MaskKind::RowWise), Ok(()));
        for kind in [MaskKind::Transposable, MaskKind::ColumnWise] {
            let error = mask.check(kind).expect_err("two columns are full");
            let Error::Structure { expected, tile_row: 1, tile_column: 1, bits: 0x3333, .. } =
                error
            else {
                panic!("{error:?}");
            };
            assert_eq!(expected, kind);
            assert!(error.to_string().contains("tile (1, 1) holds 0x3333"), "{error}");
        }
        mask.tiles_mut()[3] = 0x0ff0;
        assert_eq!(mask.check(MaskKind::ColumnWise), Ok(()));
        assert!(mask.check(MaskKind::RowWise).is_err());
    }

    #[test]
    fn a_missing_tile_is_an_error() {
        let error = Mask::from_tiles(4, 8, vec![0]).expect_err("a tile is missing");
        assert!(matches!(error, Error::Length { expected: 2, found: 1, .. }));
    }
}
