//! Handles to device memory.
//!
//! Invariant: a handle lies within an allocation of the device whose mark it carries. A device
//! refuses handles with another mark.

use std::{marker::PhantomData, ops::Range};

use half::bf16;

/// An element type of device matrices.
pub trait Scalar: Copy + Default + Send + Sync + sealed::Sealed + 'static {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! scalars {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Scalar for $t {})* };
}
scalars!(f32, bf16, u8, u16, u32, u64);

/// A handle to a row-major `[rows, columns]` matrix on a device, or to a rectangle of one. It is
/// valid until its device is dropped or reset.
#[derive(Debug)]
pub struct Matrix<T> {
    pub(crate) mark: u64,
    pub(crate) address: u64,
    pub(crate) shape: [usize; 2],
    pub(crate) stride: usize,
    pub(crate) element: PhantomData<fn() -> T>,
}

impl<T> Clone for Matrix<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Matrix<T> {}

impl<T: Scalar> Matrix<T> {
    /// `[rows, columns]`.
    #[must_use]
    pub const fn shape(self) -> [usize; 2] {
        self.shape
    }

    /// Elements from the start of one row to the next.
    #[must_use]
    pub const fn stride(self) -> usize {
        self.stride
    }

    /// Number of elements.
    #[must_use]
    pub const fn elements(self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// The rectangle of these rows.
    ///
    /// # Panics
    /// If a row is out of bounds.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        assert!(
            rows.start <= rows.end && rows.end <= self.shape[0],
            "rows {rows:?} are out of bounds of {:?}",
            self.shape
        );
        let address = self.address + (rows.start * self.stride * size_of::<T>()) as u64;
        Self { address, shape: [rows.len(), self.shape[1]], ..self }
    }

    /// The rectangle of these columns.
    ///
    /// # Panics
    /// If a column is out of bounds.
    #[must_use]
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(
            columns.start <= columns.end && columns.end <= self.shape[1],
            "columns {columns:?} are out of bounds of {:?}",
            self.shape
        );
        Self {
            address: self.address + (columns.start * size_of::<T>()) as u64,
            shape: [self.shape[0], columns.len()],
            ..self
        }
    }

    /// A rectangle that starts `offset` elements after this one, with rows `stride` elements apart.
    ///
    /// # Panics
    /// If it extends beyond this matrix's memory.
    #[must_use]
    pub fn rectangle(self, offset: usize, shape: [usize; 2], stride: usize) -> Self {
        let out = Self {
            address: self.address + (offset * size_of::<T>()) as u64,
            shape,
            stride,
            ..self
        };
        assert!(
            out.elements() == 0 || out.span().end <= self.span().end,
            "{shape:?} at {offset} is out of bounds of {:?}",
            self.shape
        );
        out
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If there are gaps between rows, or the number of elements differs.
    #[must_use]
    pub fn reshaped(self, shape: [usize; 2]) -> Self {
        assert!(
            self.is_contiguous() && shape[0] * shape[1] == self.elements(),
            "{:?} cannot become {shape:?}",
            self.shape
        );
        Self { shape, stride: shape[1], ..self }
    }

    /// The same rows as bytes.
    #[must_use]
    pub const fn as_bytes(self) -> Matrix<u8> {
        let (mark, address, [rows, columns], size) =
            (self.mark, self.address, self.shape, size_of::<T>());
        Matrix {
            mark,
            address,
            shape: [rows, columns * size],
            stride: self.stride * size,
            element: PhantomData,
        }
    }

    /// Whether there are no gaps between rows.
    #[must_use]
    pub const fn is_contiguous(self) -> bool {
        self.stride == self.shape[1] || self.shape[0] <= 1
    }

    /// The addresses from the first element to the end of the last.
    pub(crate) fn span(self) -> Range<u64> {
        let elements = if self.elements() == 0 {
            0
        } else {
            (self.shape[0] - 1) * self.stride + self.shape[1]
        };
        self.address..self.address + (elements * size_of::<T>()) as u64
    }

    /// Whether every row is `bytes`-aligned.
    pub(crate) const fn is_aligned(self, bytes: usize) -> bool {
        self.address.is_multiple_of(bytes as u64)
            && (self.shape[0] <= 1 || (self.stride * size_of::<T>()).is_multiple_of(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(shape: [usize; 2]) -> Matrix<bf16> {
        Matrix { mark: 0, address: 4096, shape, stride: shape[1], element: PhantomData }
    }

    #[test]
    fn rectangles_have_the_addresses_of_their_elements() {
        let of = matrix([6, 10]).rows(2..5).columns(4..8);
        assert_eq!((of.shape, of.stride, of.address), ([3, 4], 10, 4096 + 2 * (2 * 10 + 4)));
        assert_eq!(of.span(), of.address..of.address + 2 * (2 * 10 + 4));
        assert!(!of.is_contiguous() && matrix([6, 10]).rows(1..4).is_contiguous());
        assert!(of.is_aligned(4) && !of.is_aligned(16));
        assert_eq!((of.as_bytes().shape, of.as_bytes().span()), ([3, 8], of.span()));
    }

    #[test]
    fn an_empty_rectangle_spans_nothing() {
        assert!(matrix([0, 8]).span().is_empty() && matrix([8, 0]).span().is_empty());
    }
}
