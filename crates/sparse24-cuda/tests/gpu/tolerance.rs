//! How far a result may lie from the CPU's, each bound derived once.

/// A norm in f32 of a table of at most 100 chunks.
///
/// Squares are exact in f64 and all terms are positive, so a sum whose additions are `depth` deep lies within depth * 2^-53 of the exact one,
/// relatively: at most 1024 + 16 deep and one more a block and tensor on the CPU, 33 in a thread, 5 + 5 in a block and as many again
/// in the last one, so 1500 in both. A root halves that. Both are rounded once more in f64, and the result once to f32.
pub(crate) fn grad_norm(expected: f64) -> f64 {
    expected * (2_f64.powi(-24) * 1.001 + 750.0 * 2_f64.powi(-53))
}
