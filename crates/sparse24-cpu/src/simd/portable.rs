//! Four lanes in plain Rust, for every target.

use sparse24_core::philox;

use super::{Vector, vector_methods};

/// Needs no instructions, so it proves nothing.
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

/// Every aarch64 has FMA; elsewhere a fused product would be a library call.
#[inline(always)]
#[expect(clippy::disallowed_methods, reason = "products of dense kernels promise no bits of core")]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { a * b + c }
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
    fn splat_u(self, x: u32) -> Self::U {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        each(|i| from[i])
    }
    #[inline(always)]
    fn load_u(self, from: &[u32]) -> Self::U {
        each(|i| from[i])
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32]) {
        to[..LANES].copy_from_slice(&x);
    }
    #[inline(always)]
    fn store_u(self, x: Self::U, to: &mut [u32]) {
        to[..LANES].copy_from_slice(&x);
    }
    #[inline(always)]
    fn any(self, a: Self::M) -> bool {
        a.iter().fold(0, |any, &a| any | a) != 0
    }
    #[inline(always)]
    fn transpose_tiles(self, rows: [Self::F; 4]) -> [Self::F; 4] {
        each(|j| each(|i| rows[i][j]))
    }
    #[inline(always)]
    fn transpose_quads(self, vectors: [Self::F; 4]) -> [Self::F; 4] {
        vectors
    }

    vector_methods! { []
        add(a: F, b: F) -> F = each(|i| a[i] + b[i]);
        sub(a: F, b: F) -> F = each(|i| a[i] - b[i]);
        mul(a: F, b: F) -> F = each(|i| a[i] * b[i]);
        mul_add(a: F, b: F, c: F) -> F = each(|i| mul_add(a[i], b[i], c[i]));
        abs(x: F) -> F = x.map(f32::abs);
        magnitude(x: F, limit: F) -> F =
            each(|i| if x[i].abs() < limit[i] { x[i].abs() } else { limit[i] });
        least(a: F, b: F) -> F = each(|i| if a[i] < b[i] { a[i] } else { b[i] });
        most(a: F, b: F) -> F = each(|i| if a[i] > b[i] { a[i] } else { b[i] });
        above(a: F, b: F) -> M = each(|i| mask(a[i] > b[i]));
        raise(x: F, least: F) -> F = each(|i| x[i].abs().max(least[i]).copysign(x[i]));
        select(which: M, a: F, b: F) -> F =
            each(|i| f32::from_bits(a[i].to_bits() & which[i] | b[i].to_bits() & !which[i]));
        and_u(a: U, b: U) -> U = each(|i| a[i] & b[i]);
        or_u(a: U, b: U) -> U = each(|i| a[i] | b[i]);
        xor_u(a: U, b: U) -> U = each(|i| a[i] ^ b[i]);
        not_u(a: U) -> U = a.map(|a| !a);
        select_u(which: M, a: U, b: U) -> U = each(|i| a[i] & which[i] | b[i] & !which[i]);
        mul_even(a: U, b: U) -> U =
            each(|i| ((u64::from(a[i & !1]) * u64::from(b[i & !1])) >> (32 * (i & 1))) as u32);
        odd_to_even(x: U) -> U = each(|i| x[i | 1]);
        interleave_even(even: U, odd: U) -> U =
            each(|i| if i & 1 == 0 { even[i] } else { odd[i - 1] });
        below(a: F, b: F) -> U = each(|i| a[i].to_bits().wrapping_sub(b[i].to_bits()));
        truth(sign: U) -> M = sign.map(|sign| mask(sign >> 31 == 1));
        uniform(word: U) -> F = word.map(philox::uniform);
        push_sign(bits: U, x: F) -> U = each(|i| bits[i] << 1 | x[i].to_bits() >> 31);
        join_octal(high: U, low: U) -> U = each(|i| high[i] << 3 | low[i]);
        and(a: M, b: M) -> M = each(|i| a[i] & b[i]);
        or(a: M, b: M) -> M = each(|i| a[i] | b[i]);
        not(a: M) -> M = a.map(|a| !a);
    }
}
