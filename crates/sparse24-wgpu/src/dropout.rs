//! Inverted dropout, of elements or of whole sequences.

use sparse24_core::op::Dropout;

use crate::{Device, Error, GROUP, Matrix, error::check_shape, kernels};

/// x = dropout(x) in place, x `[p, d]`; elements are numbered row by row, and draw from the
/// dropout's site in this step. The dropped elements are core's.
///
/// # Errors
/// Failures of earlier work.
pub fn dropout(device: &mut Device, x: Matrix, dropout: &Dropout) -> Result<(), Error> {
    let constants = constants(x, dropout, 1);
    device.run(&kernels::DROPOUT, [x], &constants, x.elements().div_ceil(4 * GROUP))
}

/// x = x / (1 - p) in the sequences that are kept, and 0 in the others, in place: x `[p, d]` in
/// sequences of `length` rows; sequence s uses the draw of element s in [`dropout`].
///
/// # Errors
/// [`Error::Shape`] unless the rows are whole sequences; failures of earlier work.
pub fn drop_sequences(
    device: &mut Device,
    x: Matrix,
    length: usize,
    dropout: &Dropout,
) -> Result<(), Error> {
    let ([p, d], length) = (x.shape, length.max(1));
    check_shape("drop sequences", "x", [p / length * length, d], x)?;
    let constants = constants(x, dropout, length * d);
    device.run(&kernels::DROP_SEQUENCES, [x], &constants, x.elements().div_ceil(GROUP))
}

/// The constants of both kernels; `together` elements share a draw.
fn constants(x: Matrix, dropout: &Dropout, together: usize) -> [u32; 8] {
    let [columns, elements, together] = [x.shape[1], x.elements(), together].map(|n| n as u32);
    let ([offset, stride], site) = (x.place(), dropout.site.word());
    let scale = (1.0 / (1.0 - dropout.p)).to_bits();
    [offset, stride, columns, elements, site, least(dropout.p), scale, together]
}

/// The least `word >> 8` whose uniform number, `(word >> 8) * 2^-24`, is not below p.
pub(crate) fn least(p: f32) -> u32 {
    // The product with a power of two is exact.
    (p * (1 << 24) as f32).ceil() as u32
}

#[cfg(test)]
mod tests {
    use sparse24_core::philox::uniform;

    use super::least;

    #[test]
    fn the_least_kept_word() {
        for p in [0.0, f32::MIN_POSITIVE, 1e-9, 0.1, 0.25, 0.625, 1.0 - f32::EPSILON] {
            let least = least(p);
            assert!(uniform(least << 8) >= p, "{p}");
            assert!(least == 0 || uniform((least - 1) << 8) < p, "{p}");
        }
    }
}
