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
    let (mantissa, shifted) = mantissa(x);
    let n = shifted - ROUND;
    // 2^(n-1) is finite for every n up to 128.
    let value = 2.0 * mantissa * power_of_two(shifted, -1);
    let value = if n > 128.0 { f32::INFINITY } else { value };
    if n < LOWEST_EXPONENT { 0.0 } else { value }
}

/// 1 / (1 + e^-x), within 4 units in the last place down to x = -87, and constant below; NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    let x = if x < -SATURATION { -SATURATION } else { x };
    let x = if x > SATURATION { SATURATION } else { x };
    let (mantissa, shifted) = mantissa(-x);
    1.0 / (1.0 + mantissa * power_of_two(shifted, 0))
}

/// Where [`sigmoid`] is 1.6e-38 and, at the other end, 1.
pub(crate) const SATURATION: f32 = 87.0;

/// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// e^x / 2^n in [0.7, 1.42], and n + [`ROUND`].
#[inline(always)]
fn mantissa(x: f32) -> (f32, f32) {
    // ln 2 in two parts; the first has 15 bits, so its product with n is exact.
    const LN2_HIGH: f32 = 22_713.0 / 32_768.0;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // Chebyshev fit of (e^r - 1 - r) / r^2 on |r| <= ln(2)/2: relative error of e^r 2^-26.5.
    let tail = (((0.001_392_618_4 * r + 0.008_363_179) * r + 0.041_666_555) * r + 0.166_665_77) * r + 0.5;
    (1.0 + (r + r * r * tail), shifted)
}

/// 2^(n + offset), for exponents of finite numbers.
#[inline(always)]
fn power_of_two(shifted: f32, offset: i32) -> f32 {
    f32::from_bits((shifted.to_bits() << 23).wrapping_add(((127 + offset) as u32) << 23))
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
    let mut blocks = [&[] as &[[f32; LANES]]; I];
    let mut rests = [&[] as &[f32]; I];
    for ((block, rest), input) in blocks.iter_mut().zip(&mut rests).zip(inputs) {
        (*block, *rest) = input[..length].as_chunks();
    }
    for at in 0..length / LANES {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(std::array::from_fn(|i| blocks[i][at][lane]));
        }
    }
    for (lane, sum) in lanes.iter_mut().take(length % LANES).enumerate() {
        *sum += term(std::array::from_fn(|i| rests[i][lane]));
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
