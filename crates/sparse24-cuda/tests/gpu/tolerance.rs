//! How far a result may lie from the CPU's, each bound derived once.
//!
//! u = 2^-24 is the unit roundoff of f32, v = 2^-8 that of bf16: half a unit in the last of 8 digits, relative to
//! the value. A sum whose
//! additions are at most `depth` deep lies within depth * u of the sum of magnitudes of the exact one; two such sums, one on each side,
//! within the sum of both depths. Products of errors are covered by the small integers added to a depth.

/// Unit roundoff of f32.
pub(crate) const U: f64 = 1.0 / (1u64 << 24) as f64;
/// Unit roundoff of bf16.
pub(crate) const V: f64 = 1.0 / (1u64 << 8) as f64;
/// Below the normal numbers of both formats, roundings are absolute.
pub(crate) const TINY: f64 = 1.2e-38;

/// Every element lies within its bound of what is expected.
pub(crate) fn assert_within(what: &str, found: impl IntoIterator<Item = f32>, expected: &[f64], bound: impl Fn(usize) -> f64) {
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

/// A norm in f32 of a table of at most 100 chunks.
///
/// Squares are exact in f64 and all terms are positive, so a sum whose additions are `depth` deep lies within depth * 2^-53 of the exact one,
/// relatively: at most 1024 + 16 deep and one more a block and tensor on the CPU, 33 in a thread, 5 + 5 in a block and as many again
/// in the last one, so 1500 in both. A root halves that. Both are rounded once more in f64, and the result once to f32.
pub(crate) fn grad_norm(expected: f64) -> f64 {
    expected * (2_f64.powi(-24) * 1.001 + 750.0 * 2_f64.powi(-53))
}

/// What rounding to bf16 makes of an f32 that lies within `error` of `value`.
pub(crate) fn stored(value: f64, error: f64) -> f64 {
    error + V * (value.abs() + error) + TINY
}

/// How far A(z) and A'(z), in f32 on both sides, may lie apart, A(z) = z sigmoid(y(z)) with dy = y'(z).
///
/// Each side has y and z y' within 8 u, and of the sigmoid s an exponential within 6 u, one sum, and a reciprocal within 2 u. An error e of 2^-y
/// is one of (1 - s) e in s, so ds = s ((1 - s) (8 u |y| + 6 u) + 3 u), and 2^-120 where the argument is held at its limit. Value z s: |z| ds and two
/// roundings. Slope s + z y' s (1 - s): s and 1 - s are off by ds and the second is rounded, which gives |z y'| (ds + u s + 10 u s (1 - s)),
/// and then ds and a rounding.
pub(crate) fn activation(z: f64, y: f64, dy: f64) -> [f64; 2] {
    let s = 1.0 / (1.0 + (-y).exp());
    let ds = s * ((1.0 - s) * (8.0 * y.abs() + 6.0) + 3.0) * U + 2_f64.powi(-120);
    let slope = s + (z * dy).abs() * s * (1.0 - s);
    let product = (z * dy).abs() * (ds + U * s + 10.0 * U * s * (1.0 - s));
    [2.0 * (z.abs() * ds + 2.0 * U * z.abs() * s), 2.0 * (product + ds + 2.0 * U * slope)]
}

/// A column of p bf16 numbers with this sum of magnitudes, summed in f32: the GPU has `blocks` of at most p/blocks + 64 rows, of which a thread adds
/// every eighth, then 8, every 32nd block and 32; the CPU adds 64 and p/64; and one joins what was there.
pub(crate) fn bias_grad(p: usize, blocks: usize, magnitudes: f64) -> f64 {
    let rows = p.div_ceil(blocks.max(1)) + 64;
    (rows.div_ceil(8) + 8 + blocks.div_ceil(32) + 32 + 64 + p.div_ceil(64) + 2) as f64 * U * magnitudes
}
