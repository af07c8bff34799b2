//! How the sparse kernels walk a matrix: tasks of whole rows, strips of four rows as f32, pieces of
//! a strip.
//!
//! Invariant: how the work is cut depends on shapes alone and never changes a result. Deliberately
//! absent: arithmetic.

use ndarray::{ArrayView2, Axis};
use rayon::prelude::*;
use sparse24_core::Element;

use crate::convert;

/// Elements a task should have, so that handing it to a thread costs little beside it.
const TASK: usize = 1 << 15;

/// Columns that are converted at a time.
pub(crate) const PIECE: usize = 1024;

/// Rows of this width that make up a task, at least one.
pub(crate) fn rows_per_task(width: usize) -> usize {
    TASK.div_ceil(width.max(1))
}

/// `f(i, chunk i)` for all chunks of `length`, on the threads of the current pool; a single chunk
/// stays on this one.
pub(crate) fn for_chunks<O: Send>(
    out: &mut [O],
    length: usize,
    f: impl Fn(usize, &mut [O]) + Sync,
) {
    if out.len() <= length {
        f(0, out);
    } else {
        out.par_chunks_mut(length).enumerate().for_each(|(i, chunk)| f(i, chunk));
    }
}

/// Four rows of at most [`PIECE`] columns, as f32.
#[inline(always)]
pub(crate) fn widen<T: Element>(rows: ArrayView2<'_, T>, to: &mut [[f32; PIECE]; 4]) {
    for (i, to) in to.iter_mut().enumerate() {
        let row = rows.index_axis(Axis(0), i);
        match row.to_slice() {
            Some(row) => to.iter_mut().zip(row).for_each(|(to, &from)| *to = convert::widen(from)),
            None => to.iter_mut().zip(row).for_each(|(to, &from)| *to = convert::widen(from)),
        }
    }
}
