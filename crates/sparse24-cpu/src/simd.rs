//! Instruction-set levels, and all unsafe code of this crate.
//!
//! Invariant: an [`Available`] exists only for a level that this machine has, so that holding one
//! proves that its instructions may run. Kernels are written once, in safe code over one trait of
//! vectors; an implementation of it is a token whose existence proves that its instructions may
//! run. Every kernel gives the same bits at every level: multiplications and additions are never
//! contracted.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod stores;

use sparse24_core::{Element, search::CODES};

pub use self::stores::copy;
use self::stores::{LINE, Line};
pub(crate) use self::stores::{Stores, before_a_line};
use crate::convert;

/// An instruction-set level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Simd {
    /// What the target always has.
    Portable,
    /// AVX2 with BMI2 and F16C (x86-64-v3 without FMA).
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VBMI2, beside AVX2's.
    Avx512,
}

impl Simd {
    /// All levels, ascending.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The highest level of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Available::best().simd()
    }

    /// The proof that this machine has the level; `None` if it has not.
    #[must_use]
    pub fn available(self) -> Option<Available> {
        match self {
            Self::Portable => Some(Available(Token::Portable(portable::Portable))),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::detect().map(|token| Available(Token::Avx2(token))),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::Avx512::detect().map(|token| Available(Token::Avx512(token))),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => None,
        }
    }
}

impl core::fmt::Display for Simd {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        })
    }
}

/// A level that this machine has.
#[derive(Debug, Clone, Copy)]
pub struct Available(Token);

#[derive(Debug, Clone, Copy)]
enum Token {
    Portable(portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

impl Available {
    /// The highest level of this machine.
    #[must_use]
    pub fn best() -> Self {
        let portable = Self(Token::Portable(portable::Portable));
        Simd::ALL.into_iter().rev().find_map(Simd::available).unwrap_or(portable)
    }

    /// The level.
    #[must_use]
    pub fn simd(self) -> Simd {
        match self.0 {
            Token::Portable(_) => Simd::Portable,
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(_) => Simd::Avx2,
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(_) => Simd::Avx512,
        }
    }

    /// Runs a kernel at this level.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            Token::Portable(token) => kernel.run(token),
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(token) => token.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(token) => token.run(kernel),
        }
    }
}

/// A loop over vectors, compiled for the level at which it runs: `run` and all that it calls must
/// be `#[inline(always)]`.
pub(crate) trait Kernel {
    fn run<V: Vector>(self, v: V);
}

/// The arithmetic of one level: `LANES` numbers at a time. Floats are rounded operation by
/// operation.
///
/// Slices are read and written in their first `LANES` elements and must have as many.
pub(crate) trait Vector: Copy {
    /// 4, 8 or 16.
    const LANES: usize;
    /// f32 lanes.
    type F: Copy;
    /// u32 lanes.
    type U: Copy;
    /// One truth a lane.
    type M: Copy;

    /// Copies a cache line, past the caches where the level can; others may see it after
    /// [`Self::fence`].
    #[inline(always)]
    fn stream(self, from: &[u8; LINE], to: &mut Line) {
        to.0 = *from;
    }
    /// What was streamed comes before what is stored next.
    #[inline(always)]
    fn fence(self) {}

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// a - b like [`Self::sub`], for where additions crowd: it may run as `a * 1 - b`, which is
    /// exact before its one rounding, on the ports that multiply.
    #[inline(always)]
    fn sub_aside(self, a: Self::F, b: Self::F) -> Self::F {
        self.sub(a, b)
    }
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, x: Self::F) -> Self::F;
    /// min(|x|, limit), a NaN counting as the limit, which is not negative.
    fn magnitude(self, x: Self::F, limit: f32) -> Self::F;
    /// Whether [`Self::quick_magnitude`] may leave a NaN as it is.
    const QUICK_LEAVES_NAN: bool = false;
    /// The same, but for NaNs on some levels.
    #[inline(always)]
    fn quick_magnitude(self, x: Self::F, limit: f32) -> Self::F {
        self.magnitude(x, limit)
    }
    /// The smaller; neither is negative (-0 included) or a NaN, so that an implementation may
    /// compare bits.
    fn least(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger, on the same condition.
    fn most(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger magnitude of two numbers, the first not negative.
    #[inline(always)]
    fn most_abs(self, a: Self::F, b: Self::F) -> Self::F {
        self.most(a, self.abs(b))
    }
    /// Either is a NaN.
    fn unordered(self, a: Self::F, b: Self::F) -> Self::M;
    /// a > b.
    fn above(self, a: Self::F, b: Self::F) -> Self::M;
    /// The magnitude of the first with the sign of the second.
    fn copysign(self, magnitude: Self::F, sign: Self::F) -> Self::F;
    fn select(self, which: Self::M, a: Self::F, b: Self::F) -> Self::F;
    /// `copysign(max(|x|, least), x)`; neither is a NaN and `least` is not negative.
    #[inline(always)]
    fn at_least_in_magnitude(self, x: Self::F, least: Self::F) -> Self::F {
        self.copysign(self.most(self.abs(x), least), x)
    }

    fn splat_u(self, x: u32) -> Self::U;
    fn load_u(self, from: &[u32]) -> Self::U;
    fn store_u(self, x: Self::U, to: &mut [u32]);
    fn xor(self, a: Self::U, b: Self::U) -> Self::U;
    fn select_u(self, which: Self::M, a: Self::U, b: Self::U) -> Self::U;
    /// The 64-bit products of the even lanes, each over its lane and the next: the low word is in
    /// the even one.
    fn mul_even(self, a: Self::U, b: Self::U) -> Self::U;
    /// Odd lanes move to the even ones before them; what comes to the odd ones is anything.
    fn odd_to_even(self, x: Self::U) -> Self::U;
    /// The even lanes of both, those of the second in the odd lanes.
    fn interleave_even(self, even: Self::U, odd: Self::U) -> Self::U;
    /// In the sign bit whether a < b, of floats that are neither negative nor NaN; the other bits
    /// are anything.
    fn below(self, a: Self::F, b: Self::F) -> Self::U;
    fn and_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn or_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn not_u(self, a: Self::U) -> Self::U;
    /// What the sign bit says.
    fn truth(self, sign: Self::U) -> Self::M;
    fn bits(self, x: Self::F) -> Self::U;
    /// The nearest bf16 of both, ties to even, the second in the upper halves; a NaN is
    /// [`f32::NAN`].
    fn join_brains(self, low: Self::F, high: Self::F) -> Self::U;
    /// `x & mask == value`.
    fn test(self, x: Self::U, mask: u32, value: u32) -> Self::M;
    /// [`sparse24_core::philox::uniform`].
    fn uniform(self, word: Self::U) -> Self::F;
    /// `bits << 1 | sign of x`.
    fn push_sign(self, bits: Self::U, x: Self::F) -> Self::U;
    /// `8 * high + low`, `low` below 8.
    fn join_octal(self, high: Self::U, low: Self::U) -> Self::U;
    /// `16 * high + low`, `low` below 16.
    fn join_nibble(self, high: Self::U, low: Self::U) -> Self::U;

    fn and(self, a: Self::M, b: Self::M) -> Self::M;
    fn or(self, a: Self::M, b: Self::M) -> Self::M;
    fn not(self, a: Self::M) -> Self::M;
    fn any(self, a: Self::M) -> bool;

    /// Rows and columns of a square of `LANES` by `LANES` words change places; vectors beyond are
    /// left alone.
    fn transpose(self, rows: &mut [Self::U; 16]);
    /// Four rows of `LANES/4` tiles side by side become four columns, a lane a tile row: within
    /// each 4x4 tile, rows and columns change places.
    fn transpose_tiles(self, rows: [Self::F; 4]) -> [Self::F; 4];
    /// [`sparse24_core::search::CODES`] of each code, tiles in order. Codes come in groups of
    /// `LANES`, whose lane [`lane_of_tile`] is a tile; there are as many codes as tiles, a multiple
    /// of 32.
    #[inline(always)]
    fn look_up(self, codes: &[u32], tiles: &mut [u16]) {
        for (tiles, codes) in
            tiles.chunks_exact_mut(Self::LANES).zip(codes.chunks_exact(Self::LANES))
        {
            for (at, tile) in tiles.iter_mut().enumerate() {
                *tile = CODES[codes[lane_of_tile(at, Self::LANES)] as usize & 127];
            }
        }
    }
    /// Lane i's truth is bit i; other bits are not set.
    fn chosen(self, bits: u32) -> Self::M;
    /// Two of every four lanes, those of the first vector before those of the second: each nibble
    /// holds the two indices of a group.
    fn pack_pairs(self, x: [Self::F; 2], nibbles: u32) -> Self::F;
}

/// Elements from words of [`convert::narrow_word`], those of a 16-bit type from both halves, the
/// lower first.
#[inline(always)]
pub(crate) fn deliver_words<T: Element>(words: &[u32], to: &mut [T]) {
    let each = convert::elements_a_word::<T>();
    match elements(words) {
        Some(from) => to.copy_from_slice(&from[..to.len()]),
        None => {
            for (to, &word) in to.chunks_mut(each).zip(words) {
                to.iter_mut().enumerate().for_each(|(at, to)| {
                    *to = convert::deliver(f32::from_bits(
                        word >> (32 / each * at) & (u32::MAX >> (32 - 32 / each)),
                    ))
                });
            }
        }
    }
}

/// The elements that lie in memory as these words do, where they are such.
#[inline(always)]
fn elements<T: Element>(words: &[u32]) -> Option<&[T]> {
    let each = convert::elements_a_word::<T>();
    // SAFETY: f32, bf16 and f16 may hold any bits; two elements of the latter are as long as a
    // word, and none asks for more alignment.
    ((each == 2 || convert::is::<T, f32>()) && cfg!(target_endian = "little"))
        .then(|| unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), each * words.len()) })
}

/// Lane `4*l + i` is tile `i*lanes/4 + l`: how [`Vector::transpose_tiles`] leaves the tiles of four
/// vectors.
pub(crate) const fn lane_of_tile(tile: usize, lanes: usize) -> usize {
    4 * (tile % (lanes / 4)) + tile / (lanes / 4)
}

/// Asks for the cache line `distance` elements beyond the first of a slice, wherever that is:
/// nothing is read or written.
#[inline(always)]
pub(crate) fn prefetch<T>(from: &[T], distance: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64 and has no effect but on caches, for any
    // address.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(distance).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, distance);
}
