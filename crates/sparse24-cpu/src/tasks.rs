//! How the sparse kernels cut a matrix into tasks. The cut depends on shapes alone, never on the
//! number of threads.

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
