//! Dropout from the counter-based stream: the backward draws again what the forward drew, so no
//! mask is stored.
//!
//! Source: Srivastava et al., JMLR 15 (2014), in its inverted form.

use ndarray::ArrayViewMut2;
use rayon::prelude::*;
use sparse24_core::philox::{Stream, uniform};

use crate::{Error, shape};

/// Element e of a tensor is kept when its uniform (word e mod 4 of call e / 4 of the stream) is at
/// least `p`, and is then scaled by 1 / (1 - p).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The probability of being dropped, in [0, 1).
    pub p: f32,
    /// Where the uniforms come from: at most 2^34 elements.
    pub stream: Stream,
}

impl Dropout {
    /// Drops from a run of elements, the first of which is number `first` of its tensor.
    pub(crate) fn apply(&self, first: u64, run: &mut [f32]) {
        let scale = 1.0 / (1.0 - self.p);
        let mut call = u64::MAX;
        let mut words = [0; 4];
        for (element, value) in (first..).zip(run) {
            if element / 4 != call {
                call = element / 4;
                words = self.stream.words(call as u32);
            }
            *value =
                if uniform(words[(element % 4) as usize]) >= self.p { *value * scale } else { 0.0 };
        }
    }
}

/// x = dropout(x), in place; x row-major contiguous, elements numbered in that order. The backward
/// is the same call on the gradient.
///
/// # Errors
/// [`Error::Layout`] if x is not row-major contiguous.
pub fn dropout(x: ArrayViewMut2<'_, f32>, dropout: &Dropout) -> Result<(), Error> {
    const ELEMENTS: usize = 4096;
    let x = shape::elements_mut("dropout", "x", x)?;
    x.par_chunks_mut(ELEMENTS)
        .enumerate()
        .for_each(|(i, run)| dropout.apply((i * ELEMENTS) as u64, run));
    Ok(())
}
