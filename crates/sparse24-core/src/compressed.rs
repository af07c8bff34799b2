//! Kept values and 2-bit metadata of a row-wise 2:4 matrix, in the logical layout from which hardware layouts are made.
//!
//! Invariant: every group of every row has one of the six patterns. Deliberately absent: hardware layouts.

use alloc::{vec, vec::Vec};

use ndarray::{Array2, ArrayView2, ArrayViewMut2};

use crate::{Element, Error, group::Pattern, mask::Mask, mask::MaskKind, mask::check_shape, mvue::Kept24};

/// A `[m, k]` matrix that is 2:4 along its rows: values `[m, k/2]` and one metadata nibble a group.
///
/// Logical layout: row-major. Byte b of a row's metadata holds group 2b in its low nibble and group 2b+1 in its high nibble; a row is
/// padded to a whole byte with a zero nibble. A nibble is `i0 | i1 << 2`.
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
        let mut out = Self { values: Array2::default((m, k / 2)), metadata: vec![0; m * (k / 4).div_ceil(2)] };
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
    /// [`Error::NotGrouped`] for an odd number of values a row, [`Error::Length`] for too much or too little metadata,
    /// [`Error::Metadata`] for a nibble that is no pattern.
    pub fn from_parts(values: Array2<T>, metadata: Vec<u8>) -> Result<Self, Error> {
        let (m, half) = values.dim();
        if half % 2 != 0 {
            return Err(Error::NotGrouped { operation: "compressed matrix", length: 2 * half });
        }
        let expected = m * (half / 2).div_ceil(2);
        if metadata.len() != expected {
            return Err(Error::Length { operation: "compressed matrix", expected, found: metadata.len() });
        }
        let values = if values.is_standard_layout() { values } else { values.as_standard_layout().into_owned() };
        let out = Self { values, metadata };
        for row in 0..m {
            for group in 0..half / 2 {
                let nibble = out.nibble(row, group);
                if Pattern::from_nibble(nibble).is_none() {
                    return Err(Error::Metadata { operation: "compressed matrix", row, group, nibble });
                }
            }
        }
        Ok(out)
    }

    /// Keeps what the mask keeps; kept values are unchanged to the bit.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the mask has the shape of `w`; [`Error::Structure`] unless it is row-wise 2:4.
    pub fn encode(w: ArrayView2<'_, T>, mask: &Mask) -> Result<Self, Error> {
        check_shape("encode", [w.nrows(), w.ncols()], mask.shape())?;
        mask.check(MaskKind::RowWise)?;
        let mut out = Self::zeros(w.nrows(), w.ncols())?;
        for row in 0..w.nrows() {
            for group in 0..w.ncols() / 4 {
                let bits = (0..4).fold(0, |bits, i| bits | u8::from(mask.keeps(row, 4 * group + i)) << i);
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
    /// The caller keeps the invariant: the nibble of every group is one of the six patterns and a padding nibble is zero. A matrix whose
    /// invariant is broken panics when it is read.
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
        Pattern::from_nibble(self.nibble(row, group)).expect("every nibble of a compressed matrix is a pattern")
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
