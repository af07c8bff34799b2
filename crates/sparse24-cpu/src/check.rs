//! Checks of operands, which fail before a result is written.

use ndarray::{ArrayBase, ArrayView, ArrayViewMut, Dimension, Ix1, Ix2, RawData};

use crate::Error;

pub(crate) fn shape(
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

pub(crate) fn matrix<S: RawData>(
    operation: &'static str,
    operand: &'static str,
    x: &ArrayBase<S, Ix2>,
    expected: [usize; 2],
) -> Result<(), Error> {
    shape(operation, operand, expected, x.dim().into())
}

pub(crate) fn vector<S: RawData>(
    operation: &'static str,
    operand: &'static str,
    x: &ArrayBase<S, Ix1>,
    expected: usize,
) -> Result<(), Error> {
    shape(operation, operand, [1, expected], [1, x.len()])
}

pub(crate) fn tiled(operation: &'static str, [rows, columns]: [usize; 2]) -> Result<(), Error> {
    if rows % 4 == 0 && columns % 4 == 0 {
        Ok(())
    } else {
        Err(sparse24_core::Error::NotTiled { operation, rows, columns }.into())
    }
}

/// Every token except `ignore` must be in the vocabulary.
pub(crate) fn tokens(
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

/// The elements of an operand that must be row-major and contiguous.
pub(crate) fn elements<'a, D: Dimension>(
    operation: &'static str,
    operand: &'static str,
    x: ArrayView<'a, f32, D>,
) -> Result<&'a [f32], Error> {
    x.to_slice().ok_or(Error::Layout { operation, operand })
}

/// The elements of an output that must be row-major and contiguous.
pub(crate) fn elements_mut<'a, D: Dimension>(
    operation: &'static str,
    operand: &'static str,
    x: ArrayViewMut<'a, f32, D>,
) -> Result<&'a mut [f32], Error> {
    x.into_slice().ok_or(Error::Layout { operation, operand })
}
