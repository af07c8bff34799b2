//! Inverted dropout.

use sparse24_core::op::Dropout;

use crate::{Device, Error, GROUP, Matrix, kernels};

/// x = dropout(x) in place, x `[p, d]`; elements are numbered row by row and drawn in this step.
/// The dropped elements are core's.
///
/// # Errors
/// Failures of earlier work.
pub fn dropout(device: &mut Device, x: Matrix, dropout: &Dropout) -> Result<(), Error> {
    let ([offset, stride], elements) = (x.place(), x.elements());
    let constants = [
        offset,
        stride,
        x.shape[1] as u32,
        elements as u32,
        dropout.site.word(),
        least(dropout.p),
        (1.0 / (1.0 - dropout.p)).to_bits(),
    ];
    device.run(&kernels::DROPOUT, [x], &constants, elements.div_ceil(4 * GROUP))
}

/// The least `word >> 8` whose uniform, 2^-24 of it, is not below p.
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
