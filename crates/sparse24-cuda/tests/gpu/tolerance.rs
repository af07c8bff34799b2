//! Bounds on the difference between the GPU's and the CPU's results, each derived once.
//!
//! u = 2^-24 is the unit roundoff of f32, v = 2^-8 that of bf16: half a unit in the last of 8
//! digits, relative to the value. A sum whose additions are at most `depth` deep lies within `depth
//! u` of the sum of magnitudes of the exact one; two such sums, one on each side, within the sum
//! of both depths. Products of errors are covered by the small integers added to a depth.

pub(crate) mod spmm24;

/// Unit roundoff of f32.
pub(crate) const U: f64 = 1.0 / (1u64 << 24) as f64;
/// Unit roundoff of bf16.
pub(crate) const V: f64 = 1.0 / (1u64 << 8) as f64;
/// Below the normal numbers of both formats, roundings are absolute.
pub(crate) const TINY: f64 = 1.2e-38;

/// Asserts that every element is within its bound of the expected value.
pub(crate) fn assert_within(
    what: &str,
    found: impl IntoIterator<Item = f32>,
    expected: &[f64],
    bound: impl Fn(usize) -> f64,
) {
    let mut count = 0;
    for (at, found) in found.into_iter().enumerate() {
        let (difference, bound) = ((f64::from(found) - expected[at]).abs(), bound(at));
        assert!(
            difference <= bound,
            "{what} at {at}: found {found}, expected {}, {} times the bound {bound}",
            expected[at],
            difference / bound
        );
        count += 1;
    }
    assert_eq!(count, expected.len(), "{what}: elements");
}

/// The relative error of one softmax probability, and with it the absolute one of the logarithm of
/// the sum, of a row whose logits are at most `largest`, both sides together.
///
/// An exponent x log2(e) - shift has an error of u in log2(e), relative to |x|, and a rounding
/// relative to at most 2 * largest; the CPU's likewise; 2^x adds 4 u on the GPU and 2 u on the CPU.
/// The CPU's sum is V/16 + 5 deep. A GPU's thread adds V / (8 threads) vectors, with 3 additions in
/// each and 6 u where the maximum rises; then 5 in a warp, and 16 warps, 6 u for their maxima each.
fn softmax(vocabulary: usize, largest: f64) -> f64 {
    let threads = (vocabulary / 32).next_power_of_two().clamp(32, 512);
    let depth =
        vocabulary.div_ceil(16) + 5 + vocabulary.div_ceil(8 * threads) * (4 + 6) + 5 + 16 + 12;
    (8.0 * largest + 6.0 + 4.0 + depth as f64) * U
}

/// The loss of a row: the logarithm of the sum and its maximum, with a few roundings of either; its
/// products with the target; and the mean logit of smoothing, summed as deep as the exponentials.
pub(crate) fn row_loss(vocabulary: usize, largest: f64, smoothing: f64) -> f64 {
    let error = softmax(vocabulary, largest);
    error * (1.0 + smoothing * largest) + 8.0 * U * (2.0 * largest + (vocabulary as f64).ln())
}

/// One element of scale * (q - t), rounded to bf16 by the GPU only: q's error, four roundings of q
/// and t on each side, and bf16's.
pub(crate) fn dlogit(vocabulary: usize, largest: f64, scale: f64, [q, t]: [f64; 2]) -> f64 {
    let before = scale * (q * softmax(vocabulary, largest) + 8.0 * U * (q + t)) + TINY;
    before + V * (scale * (q - t).abs() + before) + TINY
}

/// A sum of `count` rows and what was there, `magnitude` that of all: one after another on the CPU;
/// on the GPU in spans of 32, and the spans.
pub(crate) fn embedding_gradient(count: usize, magnitude: f64) -> f64 {
    (count + 32 + count.div_ceil(32) + 2) as f64 * U * magnitude
}
