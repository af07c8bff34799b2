//! From values and metadata back to a dense matrix.
//!
//! Deliberately absent: compression, which comes with its source ([`crate::prune`],
//! [`crate::mvue`]).

use ndarray::{ArrayViewMut2, Axis};
use rayon::prelude::*;
use sparse24_core::{Element, compressed::Compressed24};

use crate::{Error, shape, strips};

/// out = decode(a), `[m, k]`; pruned elements are +0, kept ones are unchanged to the bit.
///
/// # Errors
/// [`Error::Shape`] unless `out` is `[m, k]`.
pub fn decompress<T: Element>(
    a: &Compressed24<T>,
    mut out: ArrayViewMut2<'_, T>,
) -> Result<(), Error> {
    shape::check("decompress", "out", a.shape(), [out.nrows(), out.ncols()])?;
    let rows_per_task = strips::rows_per_task(out.ncols());
    out.axis_chunks_iter_mut(Axis(0), rows_per_task).into_par_iter().enumerate().for_each(
        |(task, mut out)| {
            for (at, mut out) in out.rows_mut().into_iter().enumerate() {
                let row = task * rows_per_task + at;
                let dense = groups(a, row).map(|(kept, values)| {
                    let mut dense = [T::default(); 4];
                    kept.into_iter().zip(values).for_each(|(i, value)| dense[i] = value);
                    dense
                });
                match out.as_slice_mut() {
                    Some(out) => out
                        .chunks_exact_mut(4)
                        .zip(dense)
                        .for_each(|(out, dense)| out.copy_from_slice(&dense)),
                    None => {
                        out.iter_mut().zip(dense.flatten()).for_each(|(out, dense)| *out = dense)
                    }
                }
            }
        },
    );
    Ok(())
}

/// The kept elements of a row, group by group: their places in the group and their values.
pub(crate) fn groups<T: Element>(
    a: &Compressed24<T>,
    row: usize,
) -> impl Iterator<Item = ([usize; 2], [T; 2])> + '_ {
    let (stride, half) = (a.metadata_stride(), a.values().ncols());
    let metadata = &a.metadata()[row * stride..][..stride];
    let values = &a.values().to_slice().expect("values are row-major")[row * half..][..half];
    values.chunks_exact(2).enumerate().map(move |(group, values)| {
        let nibble = metadata[group / 2] >> (4 * (group % 2));
        ([usize::from(nibble & 3), usize::from(nibble >> 2 & 3)], [values[0], values[1]])
    })
}
