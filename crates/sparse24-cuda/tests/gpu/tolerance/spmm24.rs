//! Bounds on a sparse product's difference from the CPU's f32 result, given the same operands.

use ndarray::Array2;

/// Relative error of rounding to bf16: half a unit in the last of 8 significant bits.
const BF16: f32 = 1.0 / 256.0;
/// A generous unit for f32: tensor cores may cut off where the CPU rounds.
const F32: f32 = 1.0 / (1 << 22) as f32;

/// Each element is a sum of k/2 exact products in some order, in f32. Every addition, the bias's
/// among them, is off by at most F32 of a partial sum, and no partial sum is larger than the sum of
/// the absolute values; so are those of the reference. `absolute` is that sum.
pub(crate) fn product(k: usize, absolute: &Array2<f32>) -> Array2<f32> {
    absolute.mapv(|sum| (k + 2) as f32 * F32 * sum)
}

/// The last rounding of a result that is stored in bf16, of which `x` is the exact value: its own,
/// and that of what `bound` moved.
pub(crate) fn rounded(x: f32, bound: f32) -> f32 {
    bound + BF16 * (x.abs() + bound)
}
