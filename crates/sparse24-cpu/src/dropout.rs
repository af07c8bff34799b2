//! Inverted dropout from the counter-based random stream.
//!
//! Source: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting",
//! JMLR 15 (2014).

use ndarray::ArrayViewMut2;
use rayon::prelude::*;
use sparse24_core::{
    op::Dropout,
    philox::{Stream, uniform},
};

use crate::{Error, check};

/// x = dropout(x) in place, with the uniforms of `stream`
/// ([`StepState::stream`](sparse24_core::op::StepState::stream) of the rule's site). Elements of
/// the row-major contiguous x are numbered in storage order. The backward pass is the same call on
/// the gradient.
///
/// # Errors
/// [`Error::Layout`] if x is not row-major and contiguous.
pub fn dropout(x: ArrayViewMut2<'_, f32>, rule: &Dropout, stream: Stream) -> Result<(), Error> {
    const ELEMENTS: usize = 4096;
    let x = check::elements_mut("dropout", "x", x)?;
    x.par_chunks_mut(ELEMENTS)
        .enumerate()
        .for_each(|(i, run)| drop_run((rule, stream), (i * ELEMENTS) as u64, run));
    Ok(())
}

/// Applies dropout to consecutive elements; the first has number `first` in its tensor.
pub(crate) fn drop_run((rule, stream): (&Dropout, Stream), first: u64, run: &mut [f32]) {
    let scale = 1.0 / (1.0 - rule.p);
    let mut call = u64::MAX;
    let mut words = [0; 4];
    for (element, value) in (first..).zip(run) {
        if element / 4 != call {
            call = element / 4;
            words = stream.words(call as u32);
        }
        *value =
            if uniform(words[(element % 4) as usize]) >= rule.p { *value * scale } else { 0.0 };
    }
}
