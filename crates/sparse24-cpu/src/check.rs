//! The checks that every kernel begins with.

use ndarray::{ArrayBase, ArrayView, ArrayViewMut, Dimension};

use crate::Error;

/// The operand has the shape that the others imply.
pub(crate) fn check(
    operation: &'static str,
    operand: &'static str,
    expected: [usize; 2],
    found: [usize; 2],
) -> Result<(), Error> {
    if expected == found {
        Ok(())
    } else {
        Err(Error::Shape { operation, operand, expected, found })
    }
}

/// 4x4 tiles cover the matrix.
pub(crate) fn check_tiled(
    operation: &'static str,
    [rows, columns]: [usize; 2],
) -> Result<(), Error> {
    if rows % 4 == 0 && columns % 4 == 0 {
        Ok(())
    } else {
        Err(sparse24_core::Error::NotTiled { operation, rows, columns }.into())
    }
}

/// `[rows, columns]` of a matrix.
pub(crate) fn of<S: ndarray::RawData>(x: &ArrayBase<S, ndarray::Ix2>) -> [usize; 2] {
    [x.nrows(), x.ncols()]
}

/// `[1, length]` of a vector.
pub(crate) fn of_vector<S: ndarray::RawData>(x: &ArrayBase<S, ndarray::Ix1>) -> [usize; 2] {
    [1, x.len()]
}

/// Every token but `ignore` is in the vocabulary.
pub(crate) fn check_tokens(
    operation: &'static str,
    tokens: &[u32],
    ignore: Option<u32>,
    vocabulary: usize,
) -> Result<(), Error> {
    match tokens.iter().position(|&token| token as usize >= vocabulary && Some(token) != ignore) {
        None => Ok(()),
        Some(position) => {
            Err(Error::Token { operation, token: tokens[position], position, vocabulary })
        }
    }
}

/// The elements of a row-major contiguous operand.
pub(crate) fn elements<'a, D: Dimension>(
    operation: &'static str,
    operand: &'static str,
    x: ArrayView<'a, f32, D>,
) -> Result<&'a [f32], Error> {
    x.to_slice().ok_or(Error::Layout { operation, operand })
}

/// The elements of a row-major contiguous output.
pub(crate) fn elements_mut<'a, D: Dimension>(
    operation: &'static str,
    operand: &'static str,
    x: ArrayViewMut<'a, f32, D>,
) -> Result<&'a mut [f32], Error> {
    x.into_slice().ok_or(Error::Layout { operation, operand })
}
