//! Inputs, poisoned outputs, comparison and thread pools for all tests of this binary.

use ndarray::{Array2, ArrayView2, ShapeBuilder};
use sparse24_core::philox::{Philox4x32, uniform};

/// Unit roundoff of f32.
pub(crate) const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Uniform in [-scale, scale), reproducible from `seed`.
pub(crate) fn random(shape: [usize; 2], seed: u64, scale: f32) -> Array2<f32> {
    let mut call = 0;
    Array2::from_shape_simple_fn(shape, || {
        call += 1;
        (2.0 * uniform(Philox4x32::new(seed).block([call, 0, 0, 0])[0]) - 1.0) * scale
    })
}

/// An output full of NaN, which shows what was not written.
pub(crate) fn poison(shape: [usize; 2]) -> Array2<f32> {
    Array2::from_elem(shape, f32::NAN)
}

/// The same values in column-major order.
pub(crate) fn column_major(x: &Array2<f32>) -> Array2<f32> {
    let mut y = Array2::zeros(x.dim().f());
    y.assign(x);
    y
}

/// The bits of a number as two elements, for [`any_threads`].
pub(crate) fn one_number(x: f64) -> Array2<f32> {
    let bits = x.to_bits();
    ndarray::arr2(&[[f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32)]])
}

pub(crate) fn wide(x: &Array2<f32>) -> Array2<f64> {
    x.mapv(f64::from)
}

/// Asserts that every element is within its bound of the expected one.
pub(crate) fn assert_close(
    what: &str,
    found: ArrayView2<'_, f32>,
    expected: &Array2<f64>,
    bound: &Array2<f64>,
) {
    assert_eq!(found.dim(), expected.dim(), "{what}: shape");
    for (at, &value) in found.indexed_iter() {
        let (wanted, bound) = (expected[at], bound[at]);
        let difference = (f64::from(value) - wanted).abs();
        assert!(
            difference <= bound,
            "{what} at {at:?}: found {value}, expected {wanted}, bound {bound}"
        );
    }
}

/// The outputs of `kernel`, after asserting that they have the same bits on 1, 2 and 7 threads.
pub(crate) fn any_threads<const N: usize>(
    kernel: impl Fn() -> [Array2<f32>; N] + Sync + Send,
) -> [Array2<f32>; N] {
    let run = |threads| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .expect("threads")
            .install(&kernel)
    };
    let first = run(1);
    for threads in [2, 7] {
        for (output, (one, many)) in first.iter().zip(&run(threads)).enumerate() {
            assert_eq!(one.dim(), many.dim());
            let differs =
                one.indexed_iter().zip(many).find(|((_, a), b)| a.to_bits() != b.to_bits());
            assert!(differs.is_none(), "output {output} differs on {threads} threads: {differs:?}");
        }
    }
    first
}
