//! Bounds on the difference between the GPU's and the CPU's results, each derived once.
//!
//! u = 2^-24 is the unit roundoff of f32, v = 2^-8 that of bf16: half a unit in the last of 8
//! digits, relative to the value. A sum whose additions are at most `depth` deep lies within `depth
//! u` of the sum of magnitudes of the exact one; two such sums, one on each side, within the sum
//! of both depths. Products of errors are covered by the small integers added to a depth.

mod attention;
pub(crate) mod spmm24;

pub(crate) use attention::{AttentionHead, attention, rounded};

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

/// Additions in a row's sum, both sides together: the GPU has 4 in a quad, at most 8 quads, 5 in a
/// warp and 16 warps; the CPU c/16 + 5.
fn row_depth(c: usize) -> f64 {
    (4 + 8 + 5 + 16 + c.div_ceil(16) + 5) as f64
}

/// Mean and rstd of a row x.
///
/// The means lie within m = (depth + 2) u mean|x| of each other. A variance about a mean that is
/// off by m is too large by m^2, and is a sum of squares of differences, three more roundings each;
/// rstd halves a relative error and adds a root, a division and epsilon's sum.
pub(crate) fn norm_stats(x: &[f64]) -> [f64; 2] {
    let c = x.len() as f64;
    let (mean, magnitude) = (x.iter().sum::<f64>() / c, x.iter().map(|x| x.abs()).sum::<f64>() / c);
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c;
    let m = (row_depth(x.len()) + 2.0) * U * magnitude;
    let error = m * m + (row_depth(x.len()) + 6.0) * U * (variance + m * m);
    let rstd = 1.0 / (variance + 1e-5).sqrt();
    [m, rstd * (0.5 * error / (variance + 1e-5) + 6.0 * U)]
}

/// One element of y = (x - mean) * rstd * gamma + beta, rounded to bf16 by the GPU only: the errors
/// of the statistics, four roundings on each side, and bf16's.
pub(crate) fn norm_y(x: f64, [mean, rstd]: [f64; 2], stats: [f64; 2], gamma: f64, y: f64) -> f64 {
    let scaled = ((x - mean) * rstd * gamma).abs();
    let of_stats =
        (stats[0] * rstd + (x - mean).abs() * stats[1] + stats[0] * stats[1]) * gamma.abs();
    let before = of_stats + 8.0 * U * (scaled + y.abs());
    before + V * (y.abs() + before) + TINY
}

/// One element of dx with its g and n, and the means of |g| and |g n| over its row.
///
/// n and g have 3 and 1 roundings, the same inputs on both sides; the means depth + 5 (as products
/// of those); the bracket 3 more; then the sum with what came from above, and bf16's rounding on
/// the GPU.
pub(crate) fn norm_dresidual(
    c: usize,
    rstd: f64,
    [g, n]: [f64; 2],
    [mean_g, mean_gn]: [f64; 2],
    dresidual: f64,
) -> f64 {
    let magnitude = g.abs() + mean_g + n.abs() * mean_gn;
    let before = rstd * (2.0 * (row_depth(c) + 12.0) * U) * magnitude + 4.0 * U * dresidual.abs();
    before + V * (dresidual.abs() + before) + TINY
}

/// A column sum over p rows of terms with 4 roundings on each side, `magnitude` the sum of the
/// terms' magnitudes and what was there.
///
/// The CPU adds 32 rows in order and p/32 blocks. The GPU has at least 32 blocks where it has the
/// rows, and at most 16 groups in each: p/32 rows in order, 16 groups, and then the blocks: 8 in
/// order, and 5 in a warp.
pub(crate) fn norm_parameter(p: usize, magnitude: f64) -> f64 {
    ((2 * p.div_ceil(32) + 32 + 16 + 8 + 5) as f64 + 10.0) * U * magnitude + TINY
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

/// The sum of a token's and a position's row, rounded to bf16 by the GPU only; the sum in f32 is
/// the same on both sides.
pub(crate) fn embedding(sum: f64) -> f64 {
    V * sum.abs() + TINY
}

/// A sum of `count` rows and what was there, `magnitude` that of all: one after another on the CPU;
/// on the GPU in spans of 32, and the spans.
pub(crate) fn embedding_gradient(count: usize, magnitude: f64) -> f64 {
    (count + 32 + count.div_ceil(32) + 2) as f64 * U * magnitude
}

/// An element of a product, whose terms' magnitudes sum to `magnitude`; for an output in bf16 the
/// rounding comes on top.
///
/// Terms are exact in f32. The CPU's sum is at most k deep. A tensor core adds 16 terms and what it
/// holds at once, each cut off at 2^-23 of the largest: 17 * 2 u for each 16 terms, which 3 k u
/// covers from k = 16 on, and 48 u below; a split sum and the bias add a few.
pub(crate) fn product(k: usize, magnitude: f64) -> f64 {
    (4 * k + 48 + 8) as f64 * U * magnitude + TINY
}

/// A value within `before` of the exact one, rounded to bf16.
pub(crate) fn to_bf16(value: f64, before: f64) -> f64 {
    before + V * (value.abs() + before) + TINY
}

/// A norm in f32 of a table of at most 100 chunks.
///
/// Squares are exact in f64 and all terms are positive, so a sum whose additions are `depth` deep
/// lies within depth * 2^-53 of the exact one, relatively: at most 1024 + 16 deep and one more a
/// block and tensor on the CPU, 33 in a thread, 5 + 5 in a block and as many again in the last one,
/// so 1500 in both. A root halves that. Both are rounded once more in f64, and the result once to
/// f32.
pub(crate) fn grad_norm(expected: f64) -> f64 {
    expected * (2_f64.powi(-24) * 1.001 + 750.0 * 2_f64.powi(-53))
}

/// An f32 within `error` of `value`, rounded to bf16.
pub(crate) fn stored(value: f64, error: f64) -> f64 {
    error + V * (value.abs() + error) + TINY
}

/// How far A(z) and A'(z), in f32 on both sides, may lie apart, A(z) = z sigmoid(y(z)) with dy =
/// y'(z).
///
/// Each side has y and z y' within 8 u, and of the sigmoid s an exponential within 6 u, one sum,
/// and a reciprocal within 2 u. An error e of 2^-y is one of (1 - s) e in s, so ds = s ((1 - s) (8
/// u |y| + 6 u) + 3 u), and 2^-120 where the argument is held at its limit. Value z s: |z| ds and
/// two roundings. Slope s + z y' s (1 - s): s and 1 - s are off by ds and the second is rounded,
/// which gives |z y'| (ds + u s + 10 u s (1 - s)), and then ds and a rounding.
pub(crate) fn activation(z: f64, y: f64, dy: f64) -> [f64; 2] {
    let s = 1.0 / (1.0 + (-y).exp());
    let ds = s * ((1.0 - s) * (8.0 * y.abs() + 6.0) + 3.0) * U + 2_f64.powi(-120);
    let slope = s + (z * dy).abs() * s * (1.0 - s);
    let product = (z * dy).abs() * (ds + U * s + 10.0 * U * s * (1.0 - s));
    [2.0 * (z.abs() * ds + 2.0 * U * z.abs() * s), 2.0 * (product + ds + 2.0 * U * slope)]
}

/// A column of p bf16 numbers with this sum of magnitudes, summed in f32: the GPU has `blocks` of
/// at most p/blocks + 64 rows, of which a thread adds every eighth, then 8, every 32nd block and
/// 32; the CPU adds 64 and p/64; and one joins what was there.
pub(crate) fn bias_grad(p: usize, blocks: usize, magnitudes: f64) -> f64 {
    let rows = p.div_ceil(blocks.max(1)) + 64;
    (rows.div_ceil(8) + 8 + blocks.div_ceil(32) + 32 + 64 + p.div_ceil(64) + 2) as f64
        * U
        * magnitudes
}
