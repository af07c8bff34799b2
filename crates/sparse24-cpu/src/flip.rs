//! How many mask bits changed.
//!
//! Deliberately absent: the rate and when to sample it.

use rayon::prelude::*;
use sparse24_core::Mask;

use crate::{Error, shape};

/// |m(a) - m(b)|_1: elements that are kept in one mask and not in the other.
///
/// # Errors
/// [`Error::Shape`] unless the shapes agree.
pub fn flip_count(a: &Mask, b: &Mask) -> Result<u64, Error> {
    const TASK: usize = 1 << 16;
    shape::check("flip count", "b", a.shape(), b.shape())?;
    let count = |a: &[u16], b: &[u16]| {
        a.iter().zip(b).map(|(a, b)| u64::from((a ^ b).count_ones())).sum::<u64>()
    };
    Ok(match (a.tiles(), b.tiles()) {
        (a, b) if a.len() <= TASK => count(a, b),
        (a, b) => a.par_chunks(TASK).zip(b.par_chunks(TASK)).map(|(a, b)| count(a, b)).sum(),
    })
}
