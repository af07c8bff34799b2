//! Eight lanes: AVX2 with FMA, BMI2 and F16C.

use core::arch::x86_64::*;

use super::{Kernel, Vector, memory_methods, vector_methods};

/// Proof that this machine has the instructions; only [`Avx2::detect`] creates one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("f16c");
        present.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { run(self, kernel) }
    }
}

#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt,f16c")]
fn run<K: Kernel>(v: Avx2, kernel: K) -> K::Output {
    kernel.run(v)
}

impl Vector for Avx2 {
    const LANES: usize = 8;
    type F = __m256;
    type U = __m256i;
    /// Only the sign bit of a lane counts.
    type M = __m256;

    memory_methods! {
        f32: splat = _mm256_set1_ps, load = _mm256_loadu_ps, store = _mm256_storeu_ps;
        u32: splat_u = _mm256_set1_epi32, load_u = _mm256_loadu_si256,
            store_u = _mm256_storeu_si256;
    }
    #[inline(always)]
    fn any(self, a: Self::M) -> bool {
        // SAFETY: the token proves the features.
        unsafe { _mm256_movemask_ps(a) != 0 }
    }
    #[inline(always)]
    fn transpose_tiles(self, [a, b, c, e]: [Self::F; 4]) -> [Self::F; 4] {
        // SAFETY: the token proves the features.
        unsafe {
            let pair = |low, high| (_mm256_castps_pd(low), _mm256_castps_pd(high));
            let (ab01, ab23) = pair(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (ce01, ce23) = pair(_mm256_unpacklo_ps(c, e), _mm256_unpackhi_ps(c, e));
            [
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab01, ce01)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab01, ce01)),
                _mm256_castpd_ps(_mm256_unpacklo_pd(ab23, ce23)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(ab23, ce23)),
            ]
        }
    }
    #[inline(always)]
    fn transpose_quads(self, [a, b, c, d]: [Self::F; 4]) -> [Self::F; 4] {
        // SAFETY: the token proves the features.
        unsafe {
            [
                _mm256_permute2f128_ps::<0x20>(a, b),
                _mm256_permute2f128_ps::<0x20>(c, d),
                _mm256_permute2f128_ps::<0x31>(a, b),
                _mm256_permute2f128_ps::<0x31>(c, d),
            ]
        }
    }

    vector_methods! { [unsafe]
        add(a: F, b: F) -> F = _mm256_add_ps(a, b);
        sub(a: F, b: F) -> F = _mm256_sub_ps(a, b);
        mul(a: F, b: F) -> F = _mm256_mul_ps(a, b);
        mul_add(a: F, b: F, c: F) -> F = _mm256_fmadd_ps(a, b, c);
        abs(x: F) -> F = _mm256_andnot_ps(_mm256_set1_ps(-0.0), x);
        // As unsigned integers, magnitudes have the order of floats and every NaN is above the
        // limit.
        magnitude(x: F, limit: F) -> F = _mm256_castsi256_ps(_mm256_min_epu32(
            _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), x)),
            _mm256_castps_si256(limit),
        ));
        least(a: F, b: F) -> F = _mm256_castsi256_ps(_mm256_min_epi32(
            _mm256_castps_si256(a),
            _mm256_castps_si256(b),
        ));
        most(a: F, b: F) -> F = _mm256_castsi256_ps(_mm256_max_epi32(
            _mm256_castps_si256(a),
            _mm256_castps_si256(b),
        ));
        above(a: F, b: F) -> M = _mm256_cmp_ps::<_CMP_GT_OQ>(a, b);
        raise(x: F, least: F) -> F = {
            let sign = _mm256_set1_ps(-0.0);
            let magnitude = _mm256_max_ps(_mm256_andnot_ps(sign, x), least);
            _mm256_or_ps(_mm256_and_ps(sign, x), magnitude)
        };
        select(which: M, a: F, b: F) -> F = _mm256_blendv_ps(b, a, which);
        and_u(a: U, b: U) -> U = _mm256_and_si256(a, b);
        or_u(a: U, b: U) -> U = _mm256_or_si256(a, b);
        xor_u(a: U, b: U) -> U = _mm256_xor_si256(a, b);
        not_u(a: U) -> U = _mm256_xor_si256(a, _mm256_set1_epi32(-1));
        select_u(which: M, a: U, b: U) -> U = _mm256_castps_si256(_mm256_blendv_ps(
            _mm256_castsi256_ps(b),
            _mm256_castsi256_ps(a),
            which,
        ));
        mul_even(a: U, b: U) -> U = _mm256_mul_epu32(a, b);
        odd_to_even(x: U) -> U = _mm256_srli_epi64::<32>(x);
        interleave_even(even: U, odd: U) -> U =
            _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd));
        below(a: F, b: F) -> U = _mm256_sub_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
        truth(sign: U) -> M = _mm256_castsi256_ps(sign);
        uniform(word: U) -> F = _mm256_mul_ps(
            _mm256_cvtepi32_ps(_mm256_srli_epi32::<8>(word)),
            _mm256_set1_ps(1.0 / (1 << 24) as f32),
        );
        push_sign(bits: U, x: F) -> U = _mm256_or_si256(
            _mm256_add_epi32(bits, bits),
            _mm256_srli_epi32::<31>(_mm256_castps_si256(x)),
        );
        join_octal(high: U, low: U) -> U = _mm256_or_si256(_mm256_slli_epi32::<3>(high), low);
        and(a: M, b: M) -> M = _mm256_and_ps(a, b);
        or(a: M, b: M) -> M = _mm256_or_ps(a, b);
        not(a: M) -> M = _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
    }
}
