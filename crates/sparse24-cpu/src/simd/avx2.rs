//! Eight lanes: AVX2 with BMI2 and F16C.

use core::arch::x86_64::*;

use super::{Kernel, LINE, Line, Vector};

/// Proof that the machine has these instructions; only [`Avx2::detect`] makes one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("f16c");
        present.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) {
        // SAFETY: `self` proves the features.
        unsafe { run(self, kernel) }
    }
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt,f16c")]
fn run<K: Kernel>(v: Avx2, kernel: K) {
    kernel.run(v);
}

const LANES: usize = 8;

/// Evaluates intrinsics of this file's features.
macro_rules! avx2 {
    ($self:ident, $body:expr) => {{
        let Self(()) = $self;
        // SAFETY: the token proves the features, which is all that an intrinsic on values asks for;
        // an intrinsic on memory stands in this file only behind a check that the slice holds a
        // whole vector, and asks for no alignment.
        unsafe { $body }
    }};
}

impl Vector for Avx2 {
    const LANES: usize = LANES;
    type F = __m256;
    type U = __m256i;
    /// The sign bits: nothing reads another.
    type M = __m256;

    #[inline(always)]
    fn stream(self, from: &[u8; LINE], to: &mut Line) {
        let (from, to) = (from.as_ptr().cast::<__m256i>(), (&raw mut *to).cast::<__m256i>());
        for half in 0..2 {
            // SAFETY: the token proves the features. Both have two vectors, and a line is aligned.
            // The order of these stores is [`super::Stores`]' affair, which fences before it gives
            // the lines up.
            unsafe { _mm256_stream_si256(to.add(half), _mm256_loadu_si256(from.add(half))) }
        }
    }
    #[inline(always)]
    fn fence(self) {
        // SAFETY: the instruction is part of every x86-64.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        avx2!(self, _mm256_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        let from = &from[..LANES];
        avx2!(self, _mm256_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32]) {
        let to = &mut to[..LANES];
        avx2!(self, _mm256_storeu_ps(to.as_mut_ptr(), x))
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        avx2!(self, _mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        avx2!(self, _mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        avx2!(self, _mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        avx2!(self, _mm256_andnot_ps(_mm256_set1_ps(-0.0), x))
    }
    #[inline(always)]
    fn magnitude(self, x: Self::F, limit: f32) -> Self::F {
        // As unsigned integers the magnitudes are ordered as floats, and every NaN is above the
        // limit.
        avx2!(self, {
            let a = _mm256_castps_si256(self.abs(x));
            _mm256_castsi256_ps(_mm256_min_epu32(a, _mm256_set1_epi32(limit.to_bits() as i32)))
        })
    }
    #[inline(always)]
    fn least(self, a: Self::F, b: Self::F) -> Self::F {
        avx2!(
            self,
            _mm256_castsi256_ps(_mm256_min_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)))
        )
    }
    #[inline(always)]
    fn most(self, a: Self::F, b: Self::F) -> Self::F {
        avx2!(
            self,
            _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)))
        )
    }
    #[inline(always)]
    fn unordered(self, a: Self::F, b: Self::F) -> Self::M {
        avx2!(self, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b))
    }
    #[inline(always)]
    fn above(self, a: Self::F, b: Self::F) -> Self::M {
        avx2!(self, _mm256_cmp_ps::<_CMP_GT_OQ>(a, b))
    }
    #[inline(always)]
    fn copysign(self, magnitude: Self::F, sign: Self::F) -> Self::F {
        avx2!(self, {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_and_ps(bit, sign), _mm256_andnot_ps(bit, magnitude))
        })
    }
    #[inline(always)]
    fn select(self, which: Self::M, a: Self::F, b: Self::F) -> Self::F {
        avx2!(self, _mm256_blendv_ps(b, a, which))
    }

    #[inline(always)]
    fn splat_u(self, x: u32) -> Self::U {
        avx2!(self, _mm256_set1_epi32(x as i32))
    }
    #[inline(always)]
    fn load_u(self, from: &[u32]) -> Self::U {
        let from = &from[..LANES];
        avx2!(self, _mm256_loadu_si256(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_u(self, x: Self::U, to: &mut [u32]) {
        let to = &mut to[..LANES];
        avx2!(self, _mm256_storeu_si256(to.as_mut_ptr().cast(), x))
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        avx2!(self, _mm256_xor_si256(a, b))
    }
    #[inline(always)]
    fn select_u(self, which: Self::M, a: Self::U, b: Self::U) -> Self::U {
        avx2!(
            self,
            _mm256_castps_si256(_mm256_blendv_ps(
                _mm256_castsi256_ps(b),
                _mm256_castsi256_ps(a),
                which
            ))
        )
    }
    #[inline(always)]
    fn mul_even(self, a: Self::U, b: Self::U) -> Self::U {
        avx2!(self, _mm256_mul_epu32(a, b))
    }
    #[inline(always)]
    fn odd_to_even(self, x: Self::U) -> Self::U {
        avx2!(self, _mm256_srli_epi64::<32>(x))
    }
    #[inline(always)]
    fn interleave_even(self, even: Self::U, odd: Self::U) -> Self::U {
        avx2!(self, _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd)))
    }
    #[inline(always)]
    fn below(self, a: Self::F, b: Self::F) -> Self::U {
        avx2!(self, _mm256_sub_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)))
    }
    #[inline(always)]
    fn and_u(self, a: Self::U, b: Self::U) -> Self::U {
        avx2!(self, _mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or_u(self, a: Self::U, b: Self::U) -> Self::U {
        avx2!(self, _mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn not_u(self, a: Self::U) -> Self::U {
        avx2!(self, _mm256_xor_si256(a, _mm256_set1_epi32(-1)))
    }
    #[inline(always)]
    fn truth(self, sign: Self::U) -> Self::M {
        avx2!(self, _mm256_castsi256_ps(sign))
    }
    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::U {
        avx2!(self, _mm256_castps_si256(x))
    }
    #[inline(always)]
    fn join_brains(self, low: Self::F, high: Self::F) -> Self::U {
        avx2!(self, {
            let (low, high) = (_mm256_castps_si256(low), _mm256_castps_si256(high));
            // Upper halves of `bits + 0x7fff + (bits >> 16 & 1)`.
            let (half, one) = (_mm256_set1_epi32(0x7fff), _mm256_set1_epi32(1));
            let odd = |x| _mm256_and_si256(_mm256_srli_epi32::<16>(x), one);
            let low = _mm256_add_epi32(_mm256_add_epi32(low, half), odd(low));
            let high = _mm256_add_epi32(_mm256_add_epi32(high, half), odd(high));
            _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(low), high)
        })
    }
    #[inline(always)]
    fn test(self, x: Self::U, mask: u32, value: u32) -> Self::M {
        let masked = avx2!(self, _mm256_and_si256(x, self.splat_u(mask)));
        avx2!(self, _mm256_castsi256_ps(_mm256_cmpeq_epi32(masked, self.splat_u(value))))
    }
    #[inline(always)]
    fn uniform(self, word: Self::U) -> Self::F {
        avx2!(
            self,
            _mm256_mul_ps(
                _mm256_cvtepi32_ps(_mm256_srli_epi32::<8>(word)),
                _mm256_set1_ps(1.0 / (1 << 24) as f32)
            )
        )
    }
    #[inline(always)]
    fn push_sign(self, bits: Self::U, x: Self::F) -> Self::U {
        avx2!(
            self,
            _mm256_or_si256(
                _mm256_add_epi32(bits, bits),
                _mm256_srli_epi32::<31>(_mm256_castps_si256(x))
            )
        )
    }
    #[inline(always)]
    fn join_octal(self, high: Self::U, low: Self::U) -> Self::U {
        avx2!(self, _mm256_or_si256(_mm256_slli_epi32::<3>(high), low))
    }
    #[inline(always)]
    fn join_nibble(self, high: Self::U, low: Self::U) -> Self::U {
        avx2!(self, _mm256_or_si256(_mm256_slli_epi32::<4>(high), low))
    }

    #[inline(always)]
    fn and(self, a: Self::M, b: Self::M) -> Self::M {
        avx2!(self, _mm256_and_ps(a, b))
    }
    #[inline(always)]
    fn or(self, a: Self::M, b: Self::M) -> Self::M {
        avx2!(self, _mm256_or_ps(a, b))
    }
    #[inline(always)]
    fn not(self, a: Self::M) -> Self::M {
        avx2!(self, _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1))))
    }
    #[inline(always)]
    fn any(self, a: Self::M) -> bool {
        avx2!(self, _mm256_movemask_ps(a) != 0)
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [Self::U; 16]) {
        avx2!(self, {
            // Within each 128-bit lane squares of four, then the lanes among each other.
            for at in [0, 4] {
                let [a, b, c, d] = [rows[at], rows[at + 1], rows[at + 2], rows[at + 3]];
                let (ab01, ab23) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                let (cd01, cd23) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                (rows[at], rows[at + 1]) =
                    (_mm256_unpacklo_epi64(ab01, cd01), _mm256_unpackhi_epi64(ab01, cd01));
                (rows[at + 2], rows[at + 3]) =
                    (_mm256_unpacklo_epi64(ab23, cd23), _mm256_unpackhi_epi64(ab23, cd23));
            }
            for at in 0..4 {
                let [a, b] = [rows[at], rows[at + 4]];
                (rows[at], rows[at + 4]) = (
                    _mm256_permute2x128_si256::<0x20>(a, b),
                    _mm256_permute2x128_si256::<0x31>(a, b),
                );
            }
        });
    }
    #[inline(always)]
    fn transpose_tiles(self, [a, b, c, e]: [Self::F; 4]) -> [Self::F; 4] {
        avx2!(self, {
            let pair = |low, high| (_mm256_castps_pd(low), _mm256_castps_pd(high));
            let (ab01, ab23) = pair(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (ce01, ce23) = pair(_mm256_unpacklo_ps(c, e), _mm256_unpackhi_ps(c, e));
            [
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab01, ce01)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab01, ce01)),
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab23, ce23)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab23, ce23)),
            ]
        })
    }
    #[inline(always)]
    fn chosen(self, bits: u32) -> Self::M {
        avx2!(self, {
            let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(
                _mm256_and_si256(_mm256_set1_epi32(bits as i32), each),
                each,
            ))
        })
    }
    #[inline(always)]
    fn pack_pairs(self, [low, high]: [Self::F; 2], nibbles: u32) -> Self::F {
        avx2!(self, {
            let each = _mm256_srlv_epi32(
                _mm256_set1_epi32(nibbles as i32),
                _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
            );
            let groups = _mm256_setr_epi32(0, 0, 4, 4, 0, 0, 4, 4);
            let lanes = _mm256_or_si256(_mm256_and_si256(each, _mm256_set1_epi32(3)), groups);
            _mm256_blend_ps::<0xf0>(
                _mm256_permutevar8x32_ps(low, lanes),
                _mm256_permutevar8x32_ps(high, lanes),
            )
        })
    }
}
