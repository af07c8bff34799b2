//! Handles to what a backend holds: plain numbers with stable addresses, without device pointers.

use core::ops::Range;

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// The type in which the device stores activations and their gradients: bf16 with CUDA, f32
    /// otherwise (rounded to bf16 if a CPU mimics CUDA). The host reads and writes f32.
    Activation,
    /// Token ids, lengths.
    U32,
}

impl DType {
    /// Name of the elements in error messages.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Activation => "activations",
            Self::U32 => "ids",
        }
    }
}

/// The purpose of memory; reports of memory use group by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Region {
    /// Weights.
    Parameters,
    /// Gradients of weights.
    Gradients,
    /// Optimizer moments.
    Moments,
    /// Masks and compressed operands.
    Sparse,
    /// Activations that the backward pass reads, their gradients, and inputs.
    Activations,
    /// Values that live only within one [sequence](super::Backend::sequence) of operations; a fused
    /// form may never write them.
    Scratch,
}

impl Region {
    /// All regions.
    pub const ALL: [Self; 6] = [
        Self::Parameters,
        Self::Gradients,
        Self::Moments,
        Self::Sparse,
        Self::Activations,
        Self::Scratch,
    ];

    /// The name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "weights",
            Self::Gradients => "gradients",
            Self::Moments => "moments",
            Self::Sparse => "masks and pruned operands",
            Self::Activations => "activations",
            Self::Scratch => "scratch",
        }
    }
}

/// A row-major matrix in a backend's buffer, or a rectangle of one. Ranges outside the shape panic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor {
    /// Number of the buffer.
    pub buffer: usize,
    /// Elements before the first.
    pub offset: usize,
    /// `[rows, columns]`.
    pub shape: [usize; 2],
    /// Elements from one row to the next.
    pub stride: usize,
    /// Element type.
    pub dtype: DType,
}

impl Tensor {
    /// The first rows.
    #[must_use]
    pub fn first_rows(self, rows: usize) -> Self {
        self.rows(0..rows)
    }

    /// A range of rows.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        assert!(
            rows.start <= rows.end && rows.end <= self.shape[0],
            "rows {rows:?} outside {:?}",
            self.shape
        );
        Self {
            offset: self.offset + rows.start * self.stride,
            shape: [rows.len(), self.shape[1]],
            ..self
        }
    }

    /// A range of columns.
    #[must_use]
    pub fn columns(self, columns: Range<usize>) -> Self {
        assert!(
            columns.start <= columns.end && columns.end <= self.shape[1],
            "columns {columns:?} outside {:?}",
            self.shape
        );
        Self { offset: self.offset + columns.start, shape: [self.shape[0], columns.len()], ..self }
    }

    /// N equal column ranges, left to right.
    ///
    /// # Panics
    /// If N does not divide the columns.
    #[must_use]
    pub fn split<const N: usize>(self) -> [Self; N] {
        assert!(self.shape[1].is_multiple_of(N), "{} columns in {N} parts", self.shape[1]);
        let part = self.shape[1] / N;
        core::array::from_fn(|i| self.columns(i * part..(i + 1) * part))
    }

    /// The first elements of a matrix without gaps, as a matrix of another shape.
    ///
    /// # Panics
    /// If the rows have gaps, or the shape has more elements.
    #[must_use]
    pub fn packed(self, shape: [usize; 2]) -> Self {
        assert!(self.is_dense(), "rows of {:?} are {} apart", self.shape, self.stride);
        let fits = shape[0].saturating_mul(shape[1]) <= self.elements();
        assert!(fits, "{shape:?} has more elements than {:?}", self.shape);
        Self { shape, stride: shape[1], ..self }
    }

    /// Whether there are no gaps between its rows.
    pub(crate) fn is_dense(self) -> bool {
        self.stride == self.shape[1] || self.shape[0] <= 1
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(self) -> usize {
        self.shape[0] * self.shape[1]
    }
}

/// A mask on the device.
#[derive(Hash, Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskId(pub usize);

/// A table of tensors that the optimizer updates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableId(pub usize);

/// A piece of a step that is the same every time, see [`super::Backend::graph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphId {
    /// Its number in the step.
    pub part: usize,
    /// Sequences of its batch and their length, where batches differ.
    pub shape: Option<[usize; 2]>,
}

/// A pruned weight S(W) `[r, q]` in the device's own format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight24(pub usize);

/// A sampled output gradient MVUE(dZ^T), dZ `[p, r]`, in the device's own format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gradient24(pub usize);
