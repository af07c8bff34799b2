//! The error type of this crate.

/// Why an operation rejected its input. Shapes are `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The shape is not a multiple of the 4x4 tile.
    #[error(
        "{operation}: shape [{rows}, {columns}] does not divide into 4x4 tiles: \
         both {rows} and {columns} must be multiples of 4"
    )]
    NotTiled {
        /// Operation that failed.
        operation: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
    },
    /// The contraction dimension is not a multiple of 4.
    #[error(
        "{operation}: {length} elements along the sparse dimension do not divide into groups of 4"
    )]
    NotGrouped {
        /// Operation that failed.
        operation: &'static str,
        /// Elements along the dimension.
        length: usize,
    },
    /// No memory can hold a matrix of this shape.
    #[error("{operation}: no memory can hold a matrix of shape [{rows}, {columns}]")]
    TooLarge {
        /// Operation that failed.
        operation: &'static str,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
    },
    /// Two operands differ in shape.
    #[error("{operation}: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// Operation that failed.
        operation: &'static str,
        /// Shape implied by the other operands.
        expected: [usize; 2],
        /// Shape of the operand.
        found: [usize; 2],
    },
    /// A buffer does not have the length that its shape implies.
    #[error("{operation}: expected {expected} elements, found {found}")]
    Length {
        /// Operation that failed.
        operation: &'static str,
        /// Length implied by the shape.
        expected: usize,
        /// Length of the buffer.
        found: usize,
    },
    /// A mask does not have the structure that the operation needs.
    #[error(
        "{operation}: the mask is not {expected}: \
         tile ({tile_row}, {tile_column}) holds {bits:#06x}"
    )]
    Structure {
        /// Operation that failed.
        operation: &'static str,
        /// Structure needed.
        expected: crate::tile::MaskKind,
        /// Row of the first invalid tile, in tiles.
        tile_row: usize,
        /// Column of the first invalid tile, in tiles.
        tile_column: usize,
        /// Its sixteen bits.
        bits: u16,
    },
    /// A metadata nibble is not one of the six patterns.
    #[error(
        "{operation}: metadata nibble {nibble:#x} of row {row}, group {group} \
         is not one of 4, 8, c, 9, d, e"
    )]
    Metadata {
        /// Operation that failed.
        operation: &'static str,
        /// Row of the group.
        row: usize,
        /// Index of the group in its row.
        group: usize,
        /// The invalid nibble.
        nibble: u8,
    },
    /// The nibble that pads an odd number of groups to whole bytes is not zero.
    #[error("{operation}: the padding nibble of row {row} is {nibble:#x}, not 0")]
    Padding {
        /// Operation that failed.
        operation: &'static str,
        /// Row of the nibble.
        row: usize,
        /// The invalid nibble.
        nibble: u8,
    },
    /// A text is not a fraction.
    #[error("{operation}: expected a fraction, as in 5/6 or 0.55")]
    NotAFraction {
        /// Operation that failed.
        operation: &'static str,
    },
    /// A fraction is not in [0, 1].
    #[error("{operation}: {numerator}/{denominator} is not in [0, 1]")]
    Fraction {
        /// Operation that failed.
        operation: &'static str,
        /// Its numerator.
        numerator: u32,
        /// Its denominator.
        denominator: u32,
    },
}
