//! Four lanes in plain Rust: what every target has.

use half::bf16;
use sparse24_core::philox;

use super::Vector;
use crate::convert;

/// Needs nothing, proves nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

const LANES: usize = 4;

#[inline(always)]
fn each<R>(f: impl FnMut(usize) -> R) -> [R; LANES] {
    core::array::from_fn(f)
}

#[inline(always)]
fn mask(truth: bool) -> u32 {
    if truth { u32::MAX } else { 0 }
}

impl Vector for Portable {
    const LANES: usize = LANES;
    type F = [f32; LANES];
    type U = [u32; LANES];
    /// All bits or none.
    type M = [u32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        each(|i| from[i])
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32]) {
        to[..LANES].copy_from_slice(&x);
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        x.map(f32::abs)
    }
    #[inline(always)]
    fn magnitude(self, x: Self::F, limit: f32) -> Self::F {
        each(|i| if x[i].abs() < limit { x[i].abs() } else { limit })
    }
    #[inline(always)]
    fn least(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn most(self, a: Self::F, b: Self::F) -> Self::F {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn unordered(self, a: Self::F, b: Self::F) -> Self::M {
        each(|i| mask(a[i].is_nan() | b[i].is_nan()))
    }
    #[inline(always)]
    fn above(self, a: Self::F, b: Self::F) -> Self::M {
        each(|i| mask(a[i] > b[i]))
    }
    #[inline(always)]
    fn copysign(self, magnitude: Self::F, sign: Self::F) -> Self::F {
        each(|i| magnitude[i].copysign(sign[i]))
    }
    #[inline(always)]
    fn select(self, which: Self::M, a: Self::F, b: Self::F) -> Self::F {
        each(|i| f32::from_bits(a[i].to_bits() & which[i] | b[i].to_bits() & !which[i]))
    }

    #[inline(always)]
    fn splat_u(self, x: u32) -> Self::U {
        [x; LANES]
    }
    #[inline(always)]
    fn load_u(self, from: &[u32]) -> Self::U {
        each(|i| from[i])
    }
    #[inline(always)]
    fn store_u(self, x: Self::U, to: &mut [u32]) {
        to[..LANES].copy_from_slice(&x);
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        each(|i| a[i] ^ b[i])
    }
    #[inline(always)]
    fn select_u(self, which: Self::M, a: Self::U, b: Self::U) -> Self::U {
        each(|i| a[i] & which[i] | b[i] & !which[i])
    }
    #[inline(always)]
    fn mul_even(self, a: Self::U, b: Self::U) -> Self::U {
        each(|i| ((u64::from(a[i & !1]) * u64::from(b[i & !1])) >> (32 * (i & 1))) as u32)
    }
    #[inline(always)]
    fn odd_to_even(self, x: Self::U) -> Self::U {
        each(|i| x[i | 1])
    }
    #[inline(always)]
    fn interleave_even(self, even: Self::U, odd: Self::U) -> Self::U {
        each(|i| if i & 1 == 0 { even[i] } else { odd[i - 1] })
    }
    #[inline(always)]
    fn below(self, a: Self::F, b: Self::F) -> Self::U {
        each(|i| a[i].to_bits().wrapping_sub(b[i].to_bits()))
    }
    #[inline(always)]
    fn and_u(self, a: Self::U, b: Self::U) -> Self::U {
        each(|i| a[i] & b[i])
    }
    #[inline(always)]
    fn or_u(self, a: Self::U, b: Self::U) -> Self::U {
        each(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn not_u(self, a: Self::U) -> Self::U {
        a.map(|a| !a)
    }
    #[inline(always)]
    fn truth(self, sign: Self::U) -> Self::M {
        sign.map(|sign| mask(sign >> 31 == 1))
    }
    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::U {
        x.map(f32::to_bits)
    }
    #[inline(always)]
    fn join_brains(self, low: Self::F, high: Self::F) -> Self::U {
        each(|i| convert::narrow_word::<bf16>(low[i]) | convert::narrow_word::<bf16>(high[i]) << 16)
    }
    #[inline(always)]
    fn test(self, x: Self::U, mask: u32, value: u32) -> Self::M {
        each(|i| self::mask(x[i] & mask == value))
    }
    #[inline(always)]
    fn uniform(self, word: Self::U) -> Self::F {
        word.map(philox::uniform)
    }
    #[inline(always)]
    fn push_sign(self, bits: Self::U, x: Self::F) -> Self::U {
        each(|i| bits[i] << 1 | x[i].to_bits() >> 31)
    }
    #[inline(always)]
    fn join_octal(self, high: Self::U, low: Self::U) -> Self::U {
        each(|i| high[i] << 3 | low[i])
    }
    #[inline(always)]
    fn join_nibble(self, high: Self::U, low: Self::U) -> Self::U {
        each(|i| high[i] << 4 | low[i])
    }

    #[inline(always)]
    fn and(self, a: Self::M, b: Self::M) -> Self::M {
        each(|i| a[i] & b[i])
    }
    #[inline(always)]
    fn or(self, a: Self::M, b: Self::M) -> Self::M {
        each(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn not(self, a: Self::M) -> Self::M {
        a.map(|a| !a)
    }
    #[inline(always)]
    fn any(self, a: Self::M) -> bool {
        a.iter().fold(0, |any, &a| any | a) != 0
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [Self::U; 16]) {
        let square: [Self::U; LANES] = each(|i| each(|j| rows[j][i]));
        rows[..LANES].copy_from_slice(&square);
    }
    #[inline(always)]
    fn transpose_tiles(self, rows: [Self::F; 4]) -> [Self::F; 4] {
        each(|j| each(|i| rows[i][j]))
    }
    #[inline(always)]
    fn chosen(self, bits: u32) -> Self::M {
        each(|i| mask(bits >> i & 1 == 1))
    }
    #[inline(always)]
    fn pack_pairs(self, x: [Self::F; 2], nibbles: u32) -> Self::F {
        each(|i| x[i / 2][(nibbles >> (2 * i) & 3) as usize])
    }
}
