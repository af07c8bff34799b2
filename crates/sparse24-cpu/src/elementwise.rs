//! Elementwise kernels over matrices of the same shape, in any layout.
//!
//! Each element is computed on its own, so neither the layout nor the split into tasks changes a
//! bit.

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis};

use crate::simd::vectorized;

/// Elements per task: a few microseconds of the cheapest kernel.
const TASK: usize = 16 * 1024;

/// Calls `kernel` with matching contiguous runs of all matrices, at the widest SIMD level, until
/// every element has been in one run. The shapes must agree.
pub(crate) fn for_each<const I: usize, const O: usize, K>(
    inputs: [ArrayView2<'_, f32>; I],
    outputs: [ArrayViewMut2<'_, f32>; O],
    kernel: K,
) where
    K: Fn([&[f32]; I], [&mut [f32]; O]) + Sync,
{
    let columns_first =
        outputs[0].strides()[0].unsigned_abs() < outputs[0].strides()[1].unsigned_abs();
    if columns_first {
        split(
            inputs.map(ArrayView2::reversed_axes),
            outputs.map(ArrayViewMut2::reversed_axes),
            &kernel,
        );
    } else {
        split(inputs, outputs, &kernel);
    }
}

fn split<const I: usize, const O: usize, K>(
    inputs: [ArrayView2<'_, f32>; I],
    mut outputs: [ArrayViewMut2<'_, f32>; O],
    kernel: &K,
) where
    K: Fn([&[f32]; I], [&mut [f32]; O]) + Sync,
{
    let (rows, columns) = outputs[0].dim();
    if rows * columns <= TASK {
        vectorized(
            #[inline(always)]
            || leaf(&inputs, &mut outputs, kernel),
        );
        return;
    }
    let (axis, middle) = if rows > 1 { (Axis(0), rows / 2) } else { (Axis(1), columns / 2) };
    let (inputs_low, inputs_high) = halves(inputs.map(|x| x.split_at(axis, middle)));
    let (outputs_low, outputs_high) = halves(outputs.map(|x| x.split_at(axis, middle)));
    rayon::join(
        || split(inputs_low, outputs_low, kernel),
        || split(inputs_high, outputs_high, kernel),
    );
}

fn halves<T, const N: usize>(pairs: [(T, T); N]) -> ([T; N], [T; N]) {
    let mut high = [const { None }; N];
    let mut slots = high.iter_mut();
    let low = pairs.map(|(low, other)| {
        *slots.next().expect("one slot a pair") = Some(other);
        low
    });
    (low, high.map(|other| other.expect("every slot was filled")))
}

#[inline(always)]
fn leaf<const I: usize, const O: usize, K>(
    inputs: &[ArrayView2<'_, f32>; I],
    outputs: &mut [ArrayViewMut2<'_, f32>; O],
    kernel: &K,
) where
    K: Fn([&[f32]; I], [&mut [f32]; O]) + Sync,
{
    if inputs.iter().all(|x| x.is_standard_layout())
        && outputs.iter().all(|x| x.is_standard_layout())
    {
        let outputs = outputs.each_mut().map(|x| x.as_slice_mut().expect("standard layout"));
        return kernel(inputs.each_ref().map(|x| x.as_slice().expect("standard layout")), outputs);
    }
    for row in 0..outputs[0].nrows() {
        let inputs = inputs.each_ref().map(|x| x.row(row));
        let mut outputs = outputs.each_mut().map(|x| x.row_mut(row));
        if inputs.iter().all(|x| x.as_slice().is_some())
            && outputs.iter().all(|x| x.is_standard_layout())
        {
            let outputs = outputs.each_mut().map(|x| x.as_slice_mut().expect("standard layout"));
            kernel(inputs.each_ref().map(|x| x.as_slice().expect("standard layout")), outputs);
        } else {
            gathered(inputs, outputs, kernel);
        }
    }
}

/// Runs the kernel on a row with gaps between its elements, by way of copies.
#[cold]
fn gathered<const I: usize, const O: usize, K>(
    inputs: [ArrayView1<'_, f32>; I],
    outputs: [ArrayViewMut1<'_, f32>; O],
    kernel: &K,
) where
    K: Fn([&[f32]; I], [&mut [f32]; O]) + Sync,
{
    let inputs = inputs.map(|x| x.to_vec());
    let mut results = outputs.each_ref().map(|x| x.to_vec());
    kernel(inputs.each_ref().map(|x| &x[..]), results.each_mut().map(|x| &mut x[..]));
    for (mut output, result) in outputs.into_iter().zip(results) {
        output.assign(&ArrayView1::from(&result));
    }
}
