//! Inverted dropout, of elements or of whole sequences, from the counter-based random stream.
//!
//! Sources: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting",
//! JMLR 15 (2014); Huang et al., "Deep networks with stochastic depth", ECCV 2016.

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

/// Keeps whole sequences of x `[p, d]`, scaled by 1 / (1 - p), or zeroes them, in place: sequence s
/// takes the place of element s in [`dropout`]. The backward pass is the same call on the gradient.
///
/// # Errors
/// [`Error::Layout`] if x is not row-major and contiguous; [`Error::Shape`] unless its rows are
/// whole sequences.
pub fn drop_sequences(
    x: ArrayViewMut2<'_, f32>,
    sequence_length: usize,
    rule: &Dropout,
    stream: Stream,
) -> Result<(), Error> {
    let (rows, d) = x.dim();
    let sequences = rows.checked_div(sequence_length).unwrap_or(0);
    check::shape("drop_sequences", "x", [sequences * sequence_length, d], [rows, d])?;
    let x = check::elements_mut("drop_sequences", "x", x)?;
    x.par_chunks_mut((sequence_length * d).max(1)).enumerate().for_each(|(s, sequence)| {
        let mut factor = [1.0];
        drop_run((rule, stream), s as u64, &mut factor);
        if factor[0] == 0.0 {
            sequence.fill(0.0);
        } else {
            sequence.iter_mut().for_each(|x| *x *= factor[0]);
        }
    });
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
