//! The sparse x dense product, as a reference: its order of summation is written down, and simple.
//!
//! Deliberately absent: speed beyond plain loops; on a CPU the trainer multiplies masked dense
//! matrices instead.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;
use sparse24_core::{Element, compressed::Compressed24};

use crate::{
    Error,
    compressed::groups,
    shape,
    simd::{Available, Kernel, Vector},
    strips,
};

/// D`[m,n]` = decode(A)`[m,k]` B`[k,n]`.
///
/// Every element is the sum, from +0 in ascending k, of the products of A's k/2 kept values (zeros
/// among them included) with B's elements; products and sums are each rounded to f32, nothing is
/// contracted. D is overwritten.
///
/// # Errors
/// [`Error::Shape`] unless B has k rows and D is `[m, n]`.
pub fn spmm24<T: Element>(
    a: &Compressed24<T>,
    b: ArrayView2<'_, f32>,
    mut d: ArrayViewMut2<'_, f32>,
) -> Result<(), Error> {
    let [m, k] = a.shape();
    shape::check("spmm24", "b", [k, b.ncols()], [b.nrows(), b.ncols()])?;
    shape::check("spmm24", "d", [m, b.ncols()], [d.nrows(), d.ncols()])?;
    let level = Available::best();
    let rows_per_task = strips::rows_per_task(b.ncols() * (k / 2).max(1));
    d.axis_chunks_iter_mut(Axis(0), rows_per_task).into_par_iter().enumerate().for_each(
        |(task, mut d)| {
            for (at, mut d) in d.rows_mut().into_iter().enumerate() {
                let row = task * rows_per_task + at;
                d.fill(0.0);
                for (group, (kept, values)) in groups(a, row).enumerate() {
                    for (i, value) in kept.into_iter().zip(values.map(T::to_f32)) {
                        let b = b.index_axis(Axis(0), 4 * group + i);
                        match (d.as_slice_mut(), b.to_slice()) {
                            (Some(d), Some(b)) => level.run(MultiplyAdd { value, b, d }),
                            _ => multiply_add(value, b, d.iter_mut()),
                        }
                    }
                }
            }
        },
    );
    Ok(())
}

fn multiply_add<'a>(value: f32, b: ArrayView1<'_, f32>, d: impl Iterator<Item = &'a mut f32>) {
    d.zip(b).for_each(|(d, b)| *d += value * b);
}

struct MultiplyAdd<'a> {
    value: f32,
    b: &'a [f32],
    d: &'a mut [f32],
}

impl Kernel for MultiplyAdd<'_> {
    #[inline(always)]
    fn run<V: Vector>(self, _: V) {
        self.d.iter_mut().zip(self.b).for_each(|(d, b)| *d += self.value * b);
    }
}
