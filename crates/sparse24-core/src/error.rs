//! The one error type of this crate: what was wanted and what was given.

/// Why an operation refused its input. Shapes are `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// 4x4 tiles must cover the matrix.
    #[error(
        "{operation}: shape [{rows}, {columns}] is not made of 4x4 tiles: both {rows} and {columns} must be multiples of 4"
    )]
    NotTiled {
        /// The operation that refused.
        operation: &'static str,
        /// Rows given.
        rows: usize,
        /// Columns given.
        columns: usize,
    },
    /// Groups of four must cover the contraction dimension.
    #[error(
        "{operation}: {length} elements along the sparse dimension are not made of groups of 4"
    )]
    NotGrouped {
        /// The operation that refused.
        operation: &'static str,
        /// Elements given.
        length: usize,
    },
    /// Two operands must agree in shape.
    #[error("{operation}: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// The operation that refused.
        operation: &'static str,
        /// The shape that the other operands imply.
        expected: [usize; 2],
        /// The shape given.
        found: [usize; 2],
    },
    /// A buffer has not the length that its shape implies.
    #[error("{operation}: expected {expected} elements, found {found}")]
    Length {
        /// The operation that refused.
        operation: &'static str,
        /// The length that the shape implies.
        expected: usize,
        /// The length given.
        found: usize,
    },
    /// A mask lacks the structure that the operation needs.
    #[error(
        "{operation}: the mask is not {expected}: tile ({tile_row}, {tile_column}) holds {bits:#06x}"
    )]
    Structure {
        /// The operation that refused.
        operation: &'static str,
        /// The structure wanted.
        expected: crate::mask::MaskKind,
        /// Row of the first offending tile, in tiles.
        tile_row: usize,
        /// Column of the first offending tile, in tiles.
        tile_column: usize,
        /// Its sixteen bits.
        bits: u16,
    },
    /// A metadata nibble is none of the six patterns.
    #[error(
        "{operation}: metadata nibble {nibble:#x} of row {row}, group {group} is none of 4, 8, c, 9, d, e"
    )]
    Metadata {
        /// The operation that refused.
        operation: &'static str,
        /// Row of the group.
        row: usize,
        /// Index of the group in its row.
        group: usize,
        /// The nibble found.
        nibble: u8,
    },
    /// The nibble that pads an odd number of groups to whole bytes must be zero.
    #[error("{operation}: the padding nibble of row {row} is {nibble:#x}, not 0")]
    Padding {
        /// The operation that refused.
        operation: &'static str,
        /// Row whose last byte holds one group.
        row: usize,
        /// The nibble found.
        nibble: u8,
    },
    /// A fraction must be a proper one.
    #[error("{operation}: {numerator}/{denominator} is not in [0, 1]")]
    Fraction {
        /// The operation that refused.
        operation: &'static str,
        /// Numerator given.
        numerator: u32,
        /// Denominator given.
        denominator: u32,
    },
}
