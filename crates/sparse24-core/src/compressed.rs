//! Kept values and 2-bit metadata of a row-wise 2:4 matrix, in the logical layout from which
//! hardware layouts are made.
//!
//! Invariant: every group of every row has one of the six patterns. Deliberately absent: hardware
//! layouts.

use alloc::{vec, vec::Vec};

use ndarray::{Array2, ArrayView2, ArrayViewMut2};

use crate::{
    Element, Error, group::Pattern, mask::Mask, mask::MaskKind, mask::check_shape, mvue::Kept24,
};

/// A `[m, k]` matrix that is 2:4 along its rows: values `[m, k/2]` and one metadata nibble a group.
///
/// Logical layout: row-major. Byte b of a row's metadata holds group 2b in its low nibble and group
/// 2b+1 in its high nibble; a row is padded to a whole byte with a zero nibble. A nibble is
/// `i0 | i1 << 2`.
#[derive(Debug, Clone, PartialEq)]
pub struct Compressed24<T> {
    values: Array2<T>,
    metadata: Vec<u8>,
}

impl<T: Element> Compressed24<T> {
    /// A matrix of zeros, every group keeping its first two.
    ///
    /// # Errors
    /// [`Error::NotGrouped`] unless `k` is a multiple of 4.
    pub fn zeros(m: usize, k: usize) -> Result<Self, Error> {
        if !k.is_multiple_of(4) {
            return Err(Error::NotGrouped { operation: "compress", length: k });
        }
        let mut out = Self {
            values: Array2::default((m, k / 2)),
            metadata: vec![0; m * (k / 4).div_ceil(2)],
        };
        let first = Pattern::ALL[0].nibble();
        for row in 0..m {
            for group in 0..k / 4 {
                out.set_nibble(row, group, first);
            }
        }
        Ok(out)
    }

    /// A matrix of these parts; values in another layout than row-major are copied into it.
    ///
    /// # Errors
    /// [`Error::NotGrouped`] for an odd number of values a row, [`Error::Length`] for too much or
    /// too little metadata, [`Error::Metadata`] for a nibble that is no pattern, [`Error::Padding`]
    /// for a padding nibble that is not zero.
    pub fn from_parts(values: Array2<T>, metadata: Vec<u8>) -> Result<Self, Error> {
        let (m, half) = values.dim();
        if half % 2 != 0 {
            return Err(Error::NotGrouped { operation: "compressed matrix", length: 2 * half });
        }
        let expected = m * (half / 2).div_ceil(2);
        if metadata.len() != expected {
            return Err(Error::Length {
                operation: "compressed matrix",
                expected,
                found: metadata.len(),
            });
        }
        let values = if values.is_standard_layout() {
            values
        } else {
            values.as_standard_layout().into_owned()
        };
        let out = Self { values, metadata };
        for row in 0..m {
            for group in 0..half / 2 {
                let nibble = out.nibble(row, group);
                if Pattern::from_nibble(nibble).is_none() {
                    return Err(Error::Metadata {
                        operation: "compressed matrix",
                        row,
                        group,
                        nibble,
                    });
                }
            }
            if !(half / 2).is_multiple_of(2) {
                let nibble = out.nibble(row, half / 2);
                if nibble != 0 {
                    return Err(Error::Padding { operation: "compressed matrix", row, nibble });
                }
            }
        }
        Ok(out)
    }

    /// Keeps what the mask keeps; kept values are unchanged to the bit.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the mask has the shape of `w`; [`Error::Structure`] unless it is
    /// row-wise 2:4.
    pub fn encode(w: ArrayView2<'_, T>, mask: &Mask) -> Result<Self, Error> {
        check_shape("encode", [w.nrows(), w.ncols()], mask.shape())?;
        mask.check(MaskKind::RowWise)?;
        let mut out = Self::zeros(w.nrows(), w.ncols())?;
        for row in 0..w.nrows() {
            for group in 0..w.ncols() / 4 {
                let bits =
                    (0..4).fold(0, |bits, i| bits | u8::from(mask.keeps(row, 4 * group + i)) << i);
                let pattern = Pattern::from_bits(bits).expect("the mask was checked");
                out.set_nibble(row, group, pattern.nibble());
                for (at, i) in pattern.indices().into_iter().enumerate() {
                    out.values[[row, 2 * group + at]] = w[[row, 4 * group + usize::from(i)]];
                }
            }
        }
        Ok(out)
    }

    /// The dense `[m, k]` matrix; pruned elements are +0.
    #[must_use]
    pub fn decode(&self) -> Array2<T> {
        let (m, half) = self.values.dim();
        let mut out = Array2::default((m, 2 * half));
        for row in 0..m {
            for group in 0..half / 2 {
                for (at, i) in self.pattern(row, group).indices().into_iter().enumerate() {
                    out[[row, 4 * group + usize::from(i)]] = self.values[[row, 2 * group + at]];
                }
            }
        }
        out
    }

    /// `[m, k]` of the dense matrix.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.values.nrows(), 2 * self.values.ncols()]
    }

    /// Kept values, `[m, k/2]`.
    #[must_use]
    pub fn values(&self) -> ArrayView2<'_, T> {
        self.values.view()
    }

    /// Metadata bytes in the logical layout.
    #[must_use]
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// Values (row-major, contiguous) and metadata, to be overwritten.
    ///
    /// The caller keeps the invariant: the nibble of every group is one of the six patterns and a
    /// padding nibble is zero. A matrix whose invariant is broken panics when it is read.
    #[must_use]
    pub fn parts_mut(&mut self) -> (ArrayViewMut2<'_, T>, &mut [u8]) {
        (self.values.view_mut(), &mut self.metadata)
    }

    /// Bytes of metadata a row: two groups a byte.
    #[must_use]
    pub fn metadata_stride(&self) -> usize {
        (self.values.ncols() / 2).div_ceil(2)
    }

    /// The kept pair of one group.
    ///
    /// # Panics
    /// Outside of the shape.
    #[must_use]
    pub fn pattern(&self, row: usize, group: usize) -> Pattern {
        Pattern::from_nibble(self.nibble(row, group))
            .expect("every nibble of a compressed matrix is a pattern")
    }

    /// Overwrites one group; the values are rounded to the storage type.
    pub(crate) fn set(&mut self, row: usize, group: usize, kept: Kept24) {
        self.set_nibble(row, group, kept.pattern().nibble());
        for (at, value) in kept.values.into_iter().enumerate() {
            self.values[[row, 2 * group + at]] = T::from_f32(value);
        }
    }

    fn nibble(&self, row: usize, group: usize) -> u8 {
        self.metadata[row * self.metadata_stride() + group / 2] >> (4 * (group % 2)) & 0xf
    }

    fn set_nibble(&mut self, row: usize, group: usize, nibble: u8) {
        let at = row * self.metadata_stride() + group / 2;
        let shift = 4 * (group % 2);
        self.metadata[at] = self.metadata[at] & !(0xf << shift) | nibble << shift;
    }
}

#[cfg(test)]
mod tests {
    use alloc::{string::ToString, vec};

    use ndarray::{Array2, arr2};

    use super::Compressed24;
    use crate::{Error, Mask};

    #[test]
    fn metadata_by_hand() {
        // Rows keep 01, 23, 02, 13 of the first group and 12, 03, 12, 03 of the second; the third
        // is as the first.
        let mask = Mask::from_tiles(4, 12, vec![0xa5c3, 0x9696, 0xa5c3]).expect("tiled");
        let w = Array2::from_shape_fn((4, 12), |(row, column)| (100 * row + column) as f32);
        let out = Compressed24::encode(w.view(), &mask).expect("row-wise");
        assert_eq!(out.metadata(), [0x94, 0x04, 0xce, 0x0e, 0x98, 0x08, 0xcd, 0x0d]);
        assert_eq!(out.metadata_stride(), 2);
        assert_eq!(out.values().row(1).to_vec(), [102.0, 103.0, 104.0, 107.0, 110.0, 111.0]);
        assert_eq!(out.decode(), crate::prune::masked(w.view(), &mask).expect("one shape"));
        let rebuilt = Compressed24::from_parts(out.values().to_owned(), out.metadata().to_vec());
        assert_eq!(rebuilt, Ok(out));
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let message = |values, metadata| {
            Compressed24::<f32>::from_parts(values, metadata).expect_err("refused").to_string()
        };
        let values = || arr2(&[[1.0, 2.0]]);
        assert_eq!(
            message(values(), vec![0x05]),
            "compressed matrix: metadata nibble 0x5 of row 0, group 0 is none of 4, 8, c, 9, d, e"
        );
        assert_eq!(
            message(values(), vec![0x14]),
            "compressed matrix: the padding nibble of row 0 is 0x1, not 0"
        );
        assert_eq!(
            message(values(), vec![0x04, 0x04]),
            "compressed matrix: expected 1 elements, found 2"
        );
        assert_eq!(
            message(arr2(&[[1.0, 2.0, 3.0]]), vec![]),
            "compressed matrix: 6 elements along the sparse dimension are not made of groups of 4"
        );
        let mask = Mask::from_tiles(4, 4, vec![0x0ff0]).expect("tiled");
        let refused = Compressed24::encode(Array2::<f32>::zeros((4, 4)).view(), &mask);
        assert!(matches!(
            refused,
            Err(Error::Structure { tile_row: 0, tile_column: 0, bits: 0x0ff0, .. })
        ));
    }
}
