//! A row-wise 2:4 matrix as kept values and metadata, in a logical layout from which backends make
//! the layouts of their hardware.

use alloc::vec::Vec;

use ndarray::{Array2, ArrayView2, ArrayViewMut2};

use crate::{
    Element, Error,
    group::Pattern,
    mask::{Mask, check_shape},
    tile::MaskKind,
};

const OPERATION: &str = "compressed matrix";

/// Zeros of a `[rows, columns]` matrix; none if no memory can hold them.
fn zeros<T: Clone + Default>(rows: usize, columns: usize) -> Option<Vec<T>> {
    let (mut zeros, length) = (Vec::new(), rows.checked_mul(columns)?);
    zeros.try_reserve_exact(length).ok()?;
    zeros.resize(length, T::default());
    Some(zeros)
}

/// A `[m, k]` matrix that is 2:4 along its rows: values `[m, k/2]`, and one metadata nibble
/// `i0 | i1 << 2` per group.
///
/// Both are row-major. Byte b of a row's metadata holds group 2b in its low nibble and group 2b+1
/// in its high nibble; an odd row is padded with a zero nibble. Every group has one of the six
/// patterns.
#[derive(Debug, Clone, PartialEq)]
pub struct Compressed24<T> {
    values: Array2<T>,
    metadata: Vec<u8>,
}

impl<T: Element> Compressed24<T> {
    /// A matrix of zeros whose groups keep their first two elements.
    ///
    /// # Errors
    /// [`Error::NotGrouped`] unless `k` is a multiple of 4; [`Error::TooLarge`] if no memory can
    /// hold it.
    pub fn zeros(m: usize, k: usize) -> Result<Self, Error> {
        if !k.is_multiple_of(4) {
            return Err(Error::NotGrouped { operation: "compress", length: k });
        }
        let too_large = Error::TooLarge { operation: OPERATION, rows: m, columns: k };
        let values = zeros(m, k / 2).and_then(|values| {
            // Arrays limit the product of the extents that are not 0.
            Array2::from_shape_vec((m, k / 2), values).ok()
        });
        let metadata = zeros(m, (k / 4).div_ceil(2)).ok_or(too_large)?;
        let mut out = Self { values: values.ok_or(too_large)?, metadata };
        let first = Pattern::ALL[0].nibble();
        for (row, group) in groups([m, k]) {
            out.set_nibble(row, group, first);
        }
        Ok(out)
    }

    /// A matrix from its values and metadata. Values are copied unless they are row-major.
    ///
    /// # Errors
    /// [`Error::NotGrouped`] for an odd number of values per row, [`Error::Length`] for too much or
    /// too little metadata, [`Error::Metadata`] for a nibble that is not a pattern,
    /// [`Error::Padding`] for a padding nibble that is not zero.
    pub fn from_parts(values: Array2<T>, metadata: Vec<u8>) -> Result<Self, Error> {
        let (m, half) = values.dim();
        if half % 2 != 0 {
            return Err(Error::NotGrouped { operation: OPERATION, length: 2 * half });
        }
        let expected = m * (half / 2).div_ceil(2);
        if metadata.len() != expected {
            return Err(Error::Length { operation: OPERATION, expected, found: metadata.len() });
        }
        let values = if values.is_standard_layout() {
            values
        } else {
            values.as_standard_layout().into_owned()
        };
        let out = Self { values, metadata };
        for row in 0..if half == 0 { 0 } else { m } {
            for group in 0..half / 2 {
                let nibble = out.nibble(row, group);
                if Pattern::from_nibble(nibble).is_none() {
                    return Err(Error::Metadata { operation: OPERATION, row, group, nibble });
                }
            }
            if !(half / 2).is_multiple_of(2) {
                let nibble = out.nibble(row, half / 2);
                if nibble != 0 {
                    return Err(Error::Padding { operation: OPERATION, row, nibble });
                }
            }
        }
        Ok(out)
    }

    /// Compresses `w` under a mask. Kept values are unchanged to the bit.
    ///
    /// # Errors
    /// [`Error::Shape`] unless the mask has the shape of `w`; [`Error::Structure`] unless it is
    /// row-wise 2:4.
    pub fn encode(w: ArrayView2<'_, T>, mask: &Mask) -> Result<Self, Error> {
        check_shape("encode", [w.nrows(), w.ncols()], mask.shape())?;
        mask.check(MaskKind::RowWise)?;
        let mut out = Self::zeros(w.nrows(), w.ncols())?;
        for (row, group) in groups(out.shape()) {
            let bits =
                (0..4).fold(0, |bits, i| bits | u8::from(mask.keeps(row, 4 * group + i)) << i);
            let pattern = Pattern::from_bits(bits).expect("the mask was checked");
            let kept = pattern.indices().map(|i| w[[row, 4 * group + usize::from(i)]]);
            out.set(row, group, pattern, kept);
        }
        Ok(out)
    }

    /// The dense `[m, k]` matrix; pruned elements are +0.
    #[must_use]
    pub fn decode(&self) -> Array2<T> {
        let (m, half) = self.values.dim();
        let mut out = Array2::default((m, 2 * half));
        for (row, group) in groups(self.shape()) {
            for (at, i) in self.pattern(row, group).indices().into_iter().enumerate() {
                out[[row, 4 * group + usize::from(i)]] = self.values[[row, 2 * group + at]];
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

    /// Mutable values (row-major, contiguous) and metadata.
    ///
    /// The caller must leave one of the six patterns in every group and zero in padding nibbles. A
    /// matrix with any other nibble panics when it is read.
    #[must_use]
    pub fn parts_mut(&mut self) -> (ArrayViewMut2<'_, T>, &mut [u8]) {
        (self.values.view_mut(), &mut self.metadata)
    }

    /// Bytes of metadata per row: one per two groups.
    #[must_use]
    pub fn metadata_stride(&self) -> usize {
        (self.values.ncols() / 2).div_ceil(2)
    }

    /// The kept pair of one group.
    ///
    /// # Panics
    /// If the group is outside the matrix.
    #[must_use]
    pub fn pattern(&self, row: usize, group: usize) -> Pattern {
        assert!(2 * group < self.values.ncols(), "a row has no group {group}");
        Pattern::from_nibble(self.nibble(row, group))
            .expect("every nibble of a compressed matrix is a pattern")
    }

    /// Overwrites one group.
    pub(crate) fn set(&mut self, row: usize, group: usize, pattern: Pattern, values: [T; 2]) {
        self.set_nibble(row, group, pattern.nibble());
        for (at, value) in values.into_iter().enumerate() {
            self.values[[row, 2 * group + at]] = value;
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

/// The row and number of every group of a matrix; rows without groups are not counted through.
fn groups([m, k]: [usize; 2]) -> impl Iterator<Item = (usize, usize)> {
    let of_row = k / 4;
    (0..m).flat_map(move |row| (0..of_row).map(move |group| (row, group))).take(m * of_row)
}

#[cfg(test)]
mod tests {
    use alloc::{format, string::ToString, vec};

    use ndarray::{Array2, arr2};

    use super::Compressed24;
    use crate::{Error, Mask, MaskKind, search::mask_search};

    #[test]
    fn metadata_by_hand() {
        // The rows keep 01, 23, 02, 13 of the first and third group, and 12, 03, 12, 03 of the
        // second.
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
    fn rows_without_groups_take_no_time() {
        const ROWS: usize = 1 << 60;
        let zeros = Compressed24::<f32>::zeros(ROWS, 0).expect("nothing is held");
        let values = Array2::<f32>::zeros((ROWS, 0));
        let mask = mask_search(values.view(), MaskKind::RowWise).expect("tiled");
        assert_eq!(Compressed24::encode(values.view(), &mask).as_ref(), Ok(&zeros));
        assert_eq!((zeros.decode().dim(), mask.transpose().shape()), ((ROWS, 0), [0, ROWS]));
        assert_eq!(Compressed24::from_parts(values, vec![]), Ok(zeros));
    }

    #[test]
    fn invalid_parts_are_errors() {
        let one_group = arr2(&[[1.0_f32, 2.0]]);
        let odd = arr2(&[[1.0, 2.0, 3.0]]);
        for (values, metadata, kind, part) in [
            (&one_group, vec![0x05], "Metadata", "nibble 0x5 of row 0, group 0"),
            (&one_group, vec![0x14], "Padding", "row 0 is 0x1"),
            (&one_group, vec![0x04, 0x04], "Length", "expected 1 elements, found 2"),
            (&odd, vec![], "NotGrouped", "6 elements"),
        ] {
            let error = Compressed24::from_parts(values.clone(), metadata).expect_err("invalid");
            assert!(format!("{error:?}").starts_with(kind), "{error:?}");
            assert!(error.to_string().contains(part), "{error}");
        }
        const MANY: usize = usize::MAX - 3;
        let powers = [(40, 40), (61, 2), (30, 30)].map(|(m, k)| (1 << m, 1 << k));
        for (m, k) in [(usize::MAX, 4), (8, MANY), (MANY, 0)].into_iter().chain(powers) {
            let error = Compressed24::<f32>::zeros(m, k).expect_err("no memory holds it");
            assert!(matches!(error, Error::TooLarge { .. }), "[{m}, {k}]: {error}");
        }
        let mask = Mask::from_tiles(4, 4, vec![0x0ff0]).expect("tiled");
        let error = Compressed24::encode(Array2::<f32>::zeros((4, 4)).view(), &mask);
        let Err(Error::Structure { tile_row: 0, tile_column: 0, bits: 0x0ff0, .. }) = error else {
            panic!("{error:?}");
        };
    }
}
