//! Exponentials and sigmoid in f32, and reductions of fixed order, as plain loops that the compiler
//! vectorizes.
//!
//! No operation is fused, so every SIMD level gives the same bits. Everything is inlined into its
//! caller and compiled for the caller's level. Results are never subnormal.

/// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// e^x within 2 units in the last place.
///
/// 0 where the result would be below 2^-125.5, infinity above the largest finite value; NaN stays
/// NaN.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    const LOWEST_EXPONENT: f32 = -125.0;
    // ln 2 in two parts; the first has 15 bits, so its product with n is exact.
    const LN2_HIGH: f32 = 22_713.0 / 32_768.0;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let shifted = x * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    // Chebyshev fit of (e^r - 1 - r) / r^2 on |r| <= ln(2)/2: relative error of e^r 2^-26.5.
    let tail =
        (((0.001_392_618_4 * r + 0.008_363_179) * r + 0.041_666_555) * r + 0.166_665_77) * r + 0.5;
    let mantissa = 2.0 * (1.0 + (r + r * r * tail));
    // 2^(n-1) is finite for every n up to 128.
    let value = mantissa * f32::from_bits((shifted.to_bits() << 23).wrapping_add(126 << 23));
    let value = if n > 128.0 { f32::INFINITY } else { value };
    if n < LOWEST_EXPONENT { 0.0 } else { value }
}

/// 2^x within 2 units in the last place, for x at most 127; 0 below -126. NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn exp2(x: f32) -> f32 {
    if x < -126.0 { 0.0 } else { power(x) }
}

/// 1 / (1 + 2^-x) within 4 units in the last place, for x in [-126, 126]. NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn sigmoid2(x: f32) -> f32 {
    1.0 / (1.0 + power(-x))
}

/// 2^x for x in [-126, 127], and NaN for NaN.
#[inline(always)]
fn power(x: f32) -> f32 {
    let shifted = x + ROUND;
    let r = x - (shifted - ROUND);
    // Chebyshev fit of (2^r - 1) / r on |r| <= 1/2: relative error of 2^r 2^-26.7.
    let slope =
        ((((0.000_154_531_82 * r + 0.001_339_088_7) * r + 0.009_618_082) * r + 0.055_503_57) * r
            + 0.240_226_5)
            * r
            + core::f32::consts::LN_2;
    let mantissa = 1.0 + r * slope;
    // The mantissa is a normal number near 1: adding to its exponent multiplies exactly.
    let value = f32::from_bits(mantissa.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x.is_nan() { x } else { value }
}

/// Running sums of a reduction.
const LANES: usize = 16;

/// The sum of `term` over the elements of a slice, in the order of [`sum2`].
#[inline(always)]
pub(crate) fn sum(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    sum2(x, x, |x, _| term(x))
}

/// The sum of `term` over matching elements of two slices of the same length.
///
/// Element i is added to running sum i mod 16, and the 16 sums are added as a binary tree, so the
/// error is at most (length / 16 + 5) * 2^-24 of the sum of magnitudes.
#[inline(always)]
pub(crate) fn sum2(x: &[f32], y: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += term(x, y);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *lane += term(x, y);
    }
    fold(lanes, |a, b| a + b)
}

/// b if it is greater than a, otherwise a: a NaN in b is skipped.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The largest element, skipping NaN; -infinity if there is none.
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

/// Combines the lanes as a binary tree; N is a power of two.
#[inline(always)]
pub(crate) fn fold<const N: usize>(lanes: [f32; N], combine: impl Fn(f32, f32) -> f32) -> f32 {
    // Without the black box, the compiler shapes the preceding loop after this tree and does not
    // use wide vectors there.
    let mut lanes = core::hint::black_box(lanes);
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
