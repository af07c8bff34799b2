//! Exponential and sigmoid in f32, and reductions of fixed order, as plain loops that the compiler vectorises.
//!
//! Invariant: no operation is fused, so every SIMD level gives the same bits. Everything here is inlined into the dispatched
//! caller, whose instruction set it takes. Deliberately absent: subnormal results.

use pulp::{Arch, Simd, WithSimd};

/// Runs `work` compiled for the widest instruction set of this machine; only what is inlined into `work` is.
pub(crate) fn vectorised<R>(work: impl FnMut() -> R) -> R {
    // A closure called by value goes through a shim that is not inlined; by reference it does not.
    struct ByReference<F>(F);
    impl<R, F: FnMut() -> R> WithSimd for ByReference<F> {
        type Output = R;
        #[inline(always)]
        fn with_simd<S: Simd>(mut self, _: S) -> R {
            (self.0)()
        }
    }
    Arch::new().dispatch(ByReference(work))
}

/// Results below this exponent are 0: 2^-125.
const LOWEST_EXPONENT: f32 = -125.0;

/// e^x within 2 units in the last place.
///
/// 0 where the result would be below 2^-125.5, infinity above the largest finite value; NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has 15 bits, so its product with n is exact.
    const LN2_HIGH: f32 = 22_713.0 / 32_768.0;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // Chebyshev fit of (e^r - 1 - r) / r^2 on |r| <= ln(2)/2: relative error of e^r 2^-26.5.
    let tail = (((0.001_392_618_4 * r + 0.008_363_179) * r + 0.041_666_555) * r + 0.166_665_77) * r + 0.5;
    let mantissa = 2.0 * (1.0 + (r + r * r * tail));
    // 2^(n-1), finite for every n up to 128.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(126 << 23));
    let value = mantissa * scale;
    let value = if n > 128.0 { f32::INFINITY } else { value };
    if n < LOWEST_EXPONENT { 0.0 } else { value }
}

/// 1 / (1 + e^-x), within 4 units in the last place; 0 below x = -88.4. NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Running sums of one reduction.
pub(crate) const LANES: usize = 32;

/// Sum of `term` over matching elements of slices of one length.
///
/// Element i goes to running sum i mod 32; the 32 sums are added as a binary tree: the error is at most
/// (length / 32 + 6) * 2^-24 of the sum of magnitudes.
#[inline(always)]
pub(crate) fn reduce<const I: usize>(inputs: [&[f32]; I], term: impl Fn([f32; I]) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let length = inputs[0].len();
    let inputs = inputs.map(|x| &x[..length]);
    let whole = length / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        let blocks: [&[f32; LANES]; I] = inputs.map(|x| x[start..start + LANES].try_into().expect("a whole block"));
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(blocks.map(|block| block[lane]));
        }
    }
    for (lane, sum) in lanes.iter_mut().take(length - whole).enumerate() {
        *sum += term(inputs.map(|x| x[whole + lane]));
    }
    fold(lanes, |a, b| a + b)
}

/// The larger; a unless b is greater, so a NaN in b is skipped.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The largest element, -infinity if there is none; NaN is skipped.
#[inline(always)]
pub(crate) fn maximum(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &value) in lanes.iter_mut().zip(block) {
            *lane = larger(*lane, value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value);
    }
    fold(lanes, larger)
}

/// Combines as a binary tree; N is a power of two.
#[inline(always)]
pub(crate) fn fold<const N: usize>(mut lanes: [f32; N], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = N;
    while width > 1 {
        width /= 2;
        let (low, high) = lanes.split_at_mut(width);
        for (a, &b) in low.iter_mut().zip(high.iter()) {
            *a = combine(*a, b);
        }
    }
    lanes[0]
}
