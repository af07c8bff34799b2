//! How the sparse kernels cut a matrix into tasks. The cut depends on shapes alone, never on the
//! number of threads.

use ndarray::{ArrayViewMut1, ArrayViewMut2, Axis};
use rayon::prelude::*;

/// Elements per task, so many that starting a task costs little in comparison.
const TASK: usize = 1 << 15;

/// Rows of this width per task, at least one.
pub(crate) fn rows_per_task(width: usize) -> usize {
    TASK.div_ceil(width.max(1))
}

/// Calls `f(i, chunk i)` for all chunks of `length`, on the threads of the current pool. A single
/// chunk stays on the calling thread.
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

/// Calls `f(i, row i)` for all rows, on the threads of the current pool; a row takes as long as
/// `width` elements.
pub(crate) fn for_rows<T: Send + Sync>(
    mut out: ArrayViewMut2<'_, T>,
    width: usize,
    f: impl Fn(usize, ArrayViewMut1<'_, T>) + Sync,
) {
    let rows = rows_per_task(width);
    let tasks = out.axis_chunks_iter_mut(Axis(0), rows).into_par_iter().enumerate();
    tasks.for_each(|(task, mut out)| {
        out.rows_mut().into_iter().enumerate().for_each(|(at, out)| f(task * rows + at, out));
    });
}
