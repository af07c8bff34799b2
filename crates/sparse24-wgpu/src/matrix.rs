//! Plain handles to parts of a device's memory.

use sparse24_core::{Error, Mask};

/// A row-major matrix of 32-bit elements in a buffer of a [`Device`](crate::Device), or a
/// rectangular part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Index of the buffer.
    pub buffer: usize,
    /// Offset in elements.
    pub offset: usize,
    /// `[rows, columns]`.
    pub shape: [usize; 2],
    /// Elements from one row to the next.
    pub stride: usize,
}

/// A mask: one bit per element, in words of two tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// The words `[1, tiles / 2]`, rounded up.
    pub words: Matrix,
    /// `[rows, columns]` of the masked matrix.
    pub shape: [usize; 2],
}

impl Matrix {
    /// Number of elements.
    #[must_use]
    pub fn elements(self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// Whether the elements are consecutive.
    #[must_use]
    pub fn is_contiguous(self) -> bool {
        self.stride == self.shape[1] || self.shape[0] <= 1
    }

    /// The leading elements of a contiguous matrix in another shape.
    #[must_use]
    pub fn reshaped(self, shape: [usize; 2]) -> Self {
        assert!(
            self.is_contiguous() && shape[0] * shape[1] <= self.elements(),
            "{shape:?} of {self:?}"
        );
        Self { shape, stride: shape[1], ..self }
    }

    /// Whether any four columns that start at a multiple of 4 can be read by one vec4 load.
    pub(crate) fn has_fours(self) -> bool {
        self.elements() > 0 && self.offset.is_multiple_of(4) && self.stride.is_multiple_of(4)
    }

    /// Offset and stride as constants of a kernel.
    pub(crate) fn place(self) -> [u32; 2] {
        [self.offset as u32, self.stride as u32]
    }
}

impl Tiles {
    /// The number of tiles.
    #[must_use]
    pub fn count(self) -> usize {
        self.shape[0] / 4 * (self.shape[1] / 4)
    }

    /// The mask with these words, as they were copied from the device.
    ///
    /// # Errors
    /// [`Error`] if there are fewer words than the tiles need.
    pub fn mask(self, words: &[u32]) -> Result<Mask, Error> {
        let mut tiles: Vec<u16> =
            words.iter().flat_map(|&word| [word as u16, (word >> 16) as u16]).collect();
        tiles.truncate(self.count());
        Mask::from_tiles(self.shape[0], self.shape[1], tiles)
    }
}
