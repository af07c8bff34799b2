//! Inverted dropout, of elements or of whole sequences, from the counter-based random stream.
//!
//! Sources: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting",
//! JMLR 15 (2014); Huang et al., "Deep networks with stochastic depth", ECCV 2016.

use ndarray::ArrayViewMut2;
use rayon::prelude::*;
use sparse24_core::{op::Dropout, philox::Stream};

use crate::{Error, check};

/// x = dropout(x) in place, with the uniforms of `stream`
/// ([`StepState::stream`](sparse24_core::op::StepState::stream) of the rule's site). Elements of
/// the row-major contiguous x are numbered in storage order. The backward pass is the same call on
/// the gradient.
///
/// # Errors
/// [`Error::Layout`] if x is not row-major and contiguous.
pub fn dropout(x: ArrayViewMut2<'_, f32>, rule: &Dropout, stream: Stream) -> Result<(), Error> {
    // A whole number of words.
    const ELEMENTS: usize = 4096;
    let x = check::elements_mut("dropout", "x", x)?;
    x.par_chunks_mut(ELEMENTS).enumerate().for_each(|(i, run)| {
        let mut kept = [0; ELEMENTS / 32];
        let kept = &mut kept[..run.len().div_ceil(32)];
        draw((rule, stream), (i * ELEMENTS) as u64, kept);
        apply(rule, kept, run);
    });
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
        let mut kept = [0];
        draw((rule, stream), s as u64, &mut kept);
        if kept[0] & 1 == 0 {
            sequence.fill(0.0);
        } else {
            let scale = rule.scale();
            sequence.iter_mut().for_each(|x| *x *= scale);
        }
    });
    Ok(())
}

/// Which of consecutive elements are kept: bit i of the words for element `first + i`.
pub(crate) fn draw((rule, stream): (&Dropout, Stream), first: u64, kept: &mut [u32]) {
    let least = rule.least() << 8;
    for (word, first) in kept.iter_mut().zip((first..).step_by(32)) {
        // Eight calls have the 32 elements, or nine if the first one is within a call.
        let mut bits = 0_u64;
        for call in 0..8 + u64::from(first % 4 > 0) {
            for (i, drawn) in stream.words((first / 4 + call) as u32).into_iter().enumerate() {
                bits |= u64::from(drawn >= least) << (4 * call + i as u64);
            }
        }
        *word = (bits >> (first % 4)) as u32;
    }
}

/// Scales the elements that are kept, and zeroes the others.
pub(crate) fn apply(rule: &Dropout, kept: &[u32], run: &mut [f32]) {
    let scale = rule.scale();
    for (run, &word) in run.chunks_mut(32).zip(kept) {
        for (i, x) in run.iter_mut().enumerate() {
            *x = if word >> i & 1 == 1 { *x * scale } else { 0.0 };
        }
    }
}
