//! The number of mask bits that changed.

use rayon::prelude::*;
use sparse24_core::Mask;

use crate::{Error, check};

/// |m(a) - m(b)|_1: the number of elements that one mask keeps and the other does not.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree.
pub fn flip_count(a: &Mask, b: &Mask) -> Result<u64, Error> {
    const TASK: usize = 1 << 16;
    check::shape("flip count", "b", a.shape(), b.shape())?;
    let count = |a: &[u16], b: &[u16]| {
        a.iter().zip(b).map(|(a, b)| u64::from((a ^ b).count_ones())).sum::<u64>()
    };
    Ok(match (a.tiles(), b.tiles()) {
        (a, b) if a.len() <= TASK => count(a, b),
        (a, b) => a.par_chunks(TASK).zip(b.par_chunks(TASK)).map(|(a, b)| count(a, b)).sum(),
    })
}
