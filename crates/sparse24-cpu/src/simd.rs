//! Instruction-set levels, and all unsafe code of this crate.
//!
//! A kernel is written once, in safe code. Either it is a plain loop, compiled for the widest level
//! by `vectorized`, or it is a `Kernel`, generic over the operations of one level
//! (`Vector`). Each level is a token that only its detection can create, so holding one proves
//! that its instructions may run. Except in `Vector::mul_add`, multiplications and additions are
//! never fused, so a kernel without it gives the same bits at every level.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod panel;
mod portable;

use std::sync::OnceLock;

pub(crate) use panel::multiply;
use sparse24_core::search::CODES;

/// An instruction-set level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Simd {
    /// Plain Rust, available on every target.
    Portable,
    /// x86-64-v3: AVX2, FMA, BMI2 and F16C.
    Avx2,
    /// AVX-512 F, BW, CD, DQ, VL and VBMI2, in addition to AVX2's.
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

    /// A proof that this machine has the level, or `None` if it does not.
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
    /// The highest level of this machine, detected once per process.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Available> = OnceLock::new();
        *BEST.get_or_init(|| {
            Simd::ALL.into_iter().rev().find_map(Simd::available).expect("every target is portable")
        })
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
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Token::Portable(token) => kernel.run(token),
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(token) => token.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(token) => token.run(kernel),
        }
    }
}

/// Runs `work` compiled for the highest level of this machine. Only code that is inlined into
/// `work` is compiled for that level, so `work` must be `#[inline(always)]`.
pub(crate) fn vectorized<R>(work: impl FnMut() -> R) -> R {
    // A closure called by value goes through a shim that is not inlined; one called by reference
    // does not.
    struct ByReference<F>(F);
    impl<R, F: FnMut() -> R> Kernel for ByReference<F> {
        type Output = R;
        #[inline(always)]
        fn run<V: Vector>(mut self, _: V) -> R {
            (self.0)()
        }
    }
    Available::best().run(ByReference(work))
}

/// A loop over vectors, compiled for the level at which it runs: `run` and everything it calls,
/// closures included, must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<V: Vector>(self, v: V) -> Self::Output;
}

/// The operations of one level on `LANES` numbers at a time. Floating-point operations round one by
/// one. Slices must have at least `LANES` elements; the first `LANES` are read or written.
pub(crate) trait Vector: Copy {
    /// 4, 8 or 16.
    const LANES: usize;
    /// f32 lanes.
    type F: Copy;
    /// u32 lanes.
    type U: Copy;
    /// One boolean per lane.
    type M: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c: rounded once where the level has FMA, otherwise twice.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn abs(self, x: Self::F) -> Self::F;
    /// min(|x|, limit) for limit >= 0, where a NaN counts as the limit.
    fn magnitude(self, x: Self::F, limit: Self::F) -> Self::F;
    /// The smaller of two numbers that are neither negative (-0 included) nor NaN, so that an
    /// implementation may compare bits.
    fn least(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger, under the same condition.
    fn most(self, a: Self::F, b: Self::F) -> Self::F;
    /// a > b.
    fn above(self, a: Self::F, b: Self::F) -> Self::M;
    /// copysign(max(|x|, least), x), for numbers and least >= 0.
    fn raise(self, x: Self::F, least: Self::F) -> Self::F;
    fn select(self, which: Self::M, a: Self::F, b: Self::F) -> Self::F;

    fn splat_u(self, x: u32) -> Self::U;
    fn load_u(self, from: &[u32]) -> Self::U;
    fn store_u(self, x: Self::U, to: &mut [u32]);
    fn and_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn or_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn xor_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn not_u(self, a: Self::U) -> Self::U;
    fn select_u(self, which: Self::M, a: Self::U, b: Self::U) -> Self::U;
    /// The 64-bit products of the even lanes, each across its lane (low word) and the next one.
    fn mul_even(self, a: Self::U, b: Self::U) -> Self::U;
    /// Moves each odd lane to the even lane before it. The odd lanes become arbitrary.
    fn odd_to_even(self, x: Self::U) -> Self::U;
    /// The even lanes of `even`, and those of `odd` moved to the odd lanes.
    fn interleave_even(self, even: Self::U, odd: Self::U) -> Self::U;
    /// The sign bit is set where a < b; the other bits are arbitrary. Neither may be negative (-0
    /// included) or NaN, so that an implementation may compare bits.
    fn below(self, a: Self::F, b: Self::F) -> Self::U;
    /// The sign bits as booleans.
    fn truth(self, sign: Self::U) -> Self::M;
    /// [`sparse24_core::philox::uniform`].
    fn uniform(self, word: Self::U) -> Self::F;
    /// `bits << 1 | sign of x`.
    fn push_sign(self, bits: Self::U, x: Self::F) -> Self::U;
    /// `8 * high + low`, with `low` below 8.
    fn join_octal(self, high: Self::U, low: Self::U) -> Self::U;

    fn and(self, a: Self::M, b: Self::M) -> Self::M;
    fn or(self, a: Self::M, b: Self::M) -> Self::M;
    fn not(self, a: Self::M) -> Self::M;
    fn any(self, a: Self::M) -> bool;

    /// Transposes each 4x4 tile of four rows of `LANES/4` tiles. [`lane_of_tile`] gives the order
    /// of the tiles in the result.
    fn transpose_tiles(self, rows: [Self::F; 4]) -> [Self::F; 4];
    /// The quads (four lanes each) of four vectors, transposed: the first of each vector, then the
    /// second of each, and so on.
    fn transpose_quads(self, vectors: [Self::F; 4]) -> [Self::F; 4];
    /// Replaces codes by the tiles of [`CODES`]. Codes come in groups of `LANES`, in the order of
    /// [`lane_of_tile`]; there is one code per tile, and the number of tiles is a multiple of 32.
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
    /// Sorts 0..128 by keys below 16, ascending where they are the same. Returns the number of keys
    /// up to each.
    #[inline(always)]
    fn sort(self, keys: &[u8; 128], sorted: &mut [u8; 128]) -> [u8; 16] {
        let mut places = [0_u8; 16];
        keys.iter().for_each(|&key| places[usize::from(key % 16)] += 1);
        let mut smaller = 0;
        for place in &mut places {
            (*place, smaller) = (smaller, smaller + *place);
        }
        for (number, &key) in keys.iter().enumerate() {
            let place = &mut places[usize::from(key % 16)];
            sorted[usize::from(*place) % 128] = number as u8;
            *place += 1;
        }
        places
    }
}

/// Defines methods of [`Vector`] that take and return vectors: `name(argument: type) -> type =
/// body;` with the types `F`, `U` and `M`, inside the block `[unsafe]` or `[]`.
macro_rules! vector_methods {
    ($block:tt
        $($name:ident($($argument:ident: $type:ident),+) -> $result:ident = $body:expr;)+) => {
        $(vector_methods!(@ $block $name($($argument: $type),+) -> $result = $body);)+
    };
    (@ [unsafe] $name:ident($($argument:ident: $type:ident),+) -> $result:ident = $body:expr) => {
        #[inline(always)]
        fn $name(self, $($argument: Self::$type),+) -> Self::$result {
            // SAFETY: the token `self` proves that this machine has the level's instructions, which
            // is all that intrinsics without memory operands require.
            unsafe { $body }
        }
    };
    (@ [] $name:ident($($argument:ident: $type:ident),+) -> $result:ident = $body:expr) => {
        #[inline(always)]
        fn $name(self, $($argument: Self::$type),+) -> Self::$result {
            $body
        }
    };
}
use vector_methods;

/// Defines the methods of [`Vector`] that fill, read and write vectors of f32 and u32.
#[cfg(target_arch = "x86_64")]
macro_rules! memory_methods {
    (f32: $($f32:ident = $of_f32:ident),+; u32: $($u32:ident = $of_u32:ident),+;) => {
        memory_methods!(@ F, f32: $($f32 = $of_f32),+);
        memory_methods!(@ U, u32: $($u32 = $of_u32),+);
    };
    (@ $vector:ident, $element:ident:
        $splat:ident = $set:ident, $load:ident = $read:ident, $store:ident = $write:ident) => {
        #[inline(always)]
        fn $splat(self, x: $element) -> Self::$vector {
            // SAFETY: the token `self` proves the features.
            unsafe { $set(x as _) }
        }
        #[inline(always)]
        fn $load(self, from: &[$element]) -> Self::$vector {
            let from = &from[..Self::LANES];
            // SAFETY: the token proves the features, and the slice holds a whole vector.
            unsafe { $read(from.as_ptr().cast()) }
        }
        #[inline(always)]
        fn $store(self, x: Self::$vector, to: &mut [$element]) {
            let to = &mut to[..Self::LANES];
            // SAFETY: the token proves the features, and the slice holds a whole vector.
            unsafe { $write(to.as_mut_ptr().cast(), x) }
        }
    };
}
#[cfg(target_arch = "x86_64")]
use memory_methods;

/// Lane `4*l + i` holds tile `i*lanes/4 + l` after [`Vector::transpose_tiles`].
pub(crate) const fn lane_of_tile(tile: usize, lanes: usize) -> usize {
    4 * (tile % (lanes / 4)) + tile / (lanes / 4)
}

/// Prefetches the cache line that is `distance` elements after the start of a slice, which may be
/// outside it.
#[inline(always)]
pub(crate) fn prefetch<T>(from: &[T], distance: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and for any address it affects nothing but caches.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(distance).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, distance);
}
