//! How the sparse kernels walk a matrix: tasks of whole rows, strips of four rows as f32, pieces of a strip.
//!
//! Invariant: how the work is cut depends on shapes alone and never changes a result. Deliberately absent: arithmetic.

use ndarray::{ArrayView2, Axis, s};
use rayon::prelude::*;
use sparse24_core::Element;

/// Elements a task should have, so that handing it to a thread costs little beside it.
const TASK: usize = 1 << 15;

/// Columns that are converted at a time.
const PIECE: usize = 256;

/// Rows of this width that make up a task, at least one.
pub(crate) fn rows_per_task(width: usize) -> usize {
    TASK.div_ceil(width.max(1))
}

/// `f(i, chunk i)` for all chunks of `length`, on the threads of the current pool; a single chunk stays on this one.
pub(crate) fn for_chunks<O: Send>(out: &mut [O], length: usize, f: impl Fn(usize, &mut [O]) + Sync) {
    if out.len() <= length {
        f(0, out);
    } else {
        out.par_chunks_mut(length).enumerate().for_each(|(i, chunk)| f(i, chunk));
    }
}

/// The f32 values of four rows: in place where they are stored so, else converted piece by piece. `f` gets the first column of each
/// piece, which is a multiple of 4.
#[inline]
pub(crate) fn strip<T: Element>(rows: ArrayView2<'_, T>, mut f: impl FnMut(usize, [&[f32]; 4])) {
    let row = |i: usize| rows.index_axis_move(Axis(0), i).to_slice();
    let stored: [Option<&[f32]>; 4] = core::array::from_fn(|i| row(i).and_then(T::as_f32s));
    if let [Some(a), Some(b), Some(c), Some(e)] = stored {
        return f(0, [a, b, c, e]);
    }
    let mut piece = [[0.0; PIECE]; 4];
    for first in (0..rows.ncols()).step_by(PIECE) {
        let length = PIECE.min(rows.ncols() - first);
        for (i, piece) in piece.iter_mut().enumerate() {
            widen(rows.slice(s![i, first..first + length]), &mut piece[..length]);
        }
        f(first, core::array::from_fn(|i| &piece[i][..length]));
    }
}

/// The f32 values of elements wherever they lie.
#[inline]
fn widen<T: Element>(from: ndarray::ArrayView1<'_, T>, to: &mut [f32]) {
    match from.to_slice() {
        Some(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32()),
        None => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32()),
    }
}
