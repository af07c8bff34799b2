//! Sixteen lanes: AVX-512 F, BW, CD, DQ, VL and VBMI2, in addition to AVX2's features.

use core::arch::x86_64::*;

use sparse24_core::search::CODES;

use super::{Kernel, Vector, avx2::Avx2, lane_of_tile, memory_methods, vector_methods};

/// Proof that this machine has the instructions; only [`Avx512::detect`] creates one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let present = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512cd")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi2");
        present.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { run(self, kernel) }
    }
}

#[target_feature(
    enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt,f16c,avx512f,avx512bw,avx512cd,avx512dq,avx512vl",
    enable = "avx512vbmi2"
)]
fn run<K: Kernel>(v: Avx512, kernel: K) -> K::Output {
    kernel.run(v)
}

const LANES: usize = 16;

/// The 16-bit place of each of 32 tiles among the codes of two vectors.
const PLACE_OF_TILE: [u16; 2 * LANES] = {
    let mut places = [0; 2 * LANES];
    let mut tile = 0;
    while tile < 2 * LANES {
        places[tile] = 2 * (tile / LANES * LANES + lane_of_tile(tile % LANES, LANES)) as u16;
        tile += 1;
    }
    places
};

impl Vector for Avx512 {
    const LANES: usize = LANES;
    type F = __m512;
    type U = __m512i;
    type M = __mmask16;

    memory_methods! {
        f32: splat = _mm512_set1_ps, load = _mm512_loadu_ps, store = _mm512_storeu_ps;
        u32: splat_u = _mm512_set1_epi32, load_u = _mm512_loadu_si512,
            store_u = _mm512_storeu_si512;
    }
    #[inline(always)]
    fn any(self, a: Self::M) -> bool {
        a != 0
    }
    #[inline(always)]
    fn transpose_tiles(self, [a, b, c, e]: [Self::F; 4]) -> [Self::F; 4] {
        // SAFETY: the token proves the features.
        unsafe {
            let pair = |low, high| (_mm512_castps_pd(low), _mm512_castps_pd(high));
            let (ab01, ab23) = pair(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let (ce01, ce23) = pair(_mm512_unpacklo_ps(c, e), _mm512_unpackhi_ps(c, e));
            [
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab01, ce01)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab01, ce01)),
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab23, ce23)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab23, ce23)),
            ]
        }
    }
    #[inline(always)]
    fn transpose_quads(self, [a, b, c, d]: [Self::F; 4]) -> [Self::F; 4] {
        // SAFETY: the token proves the features.
        unsafe {
            let (ab01, ab23) =
                (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let (cd01, cd23) =
                (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
            [
                _mm512_shuffle_f32x4::<0x88>(ab01, cd01),
                _mm512_shuffle_f32x4::<0xdd>(ab01, cd01),
                _mm512_shuffle_f32x4::<0x88>(ab23, cd23),
                _mm512_shuffle_f32x4::<0xdd>(ab23, cd23),
            ]
        }
    }
    #[inline(always)]
    fn look_up(self, codes: &[u32], tiles: &mut [u16]) {
        let (tables, _) = CODES.as_chunks::<{ 2 * LANES }>();
        let codes = codes.as_chunks::<LANES>().0.as_chunks::<2>().0;
        for (tiles, [first, second]) in
            tiles.as_chunks_mut::<{ 2 * LANES }>().0.iter_mut().zip(codes)
        {
            // SAFETY: the token proves the features, and each array holds exactly one vector.
            unsafe {
                let table = |at: usize| _mm512_loadu_si512(tables[at].as_ptr().cast());
                let codes = _mm512_permutex2var_epi16(
                    _mm512_loadu_si512(first.as_ptr().cast()),
                    _mm512_loadu_si512(PLACE_OF_TILE.as_ptr().cast()),
                    _mm512_loadu_si512(second.as_ptr().cast()),
                );
                let bits = _mm512_mask_blend_epi16(
                    _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)),
                    _mm512_permutex2var_epi16(table(0), codes, table(1)),
                    _mm512_permutex2var_epi16(table(2), codes, table(3)),
                );
                _mm512_storeu_si512(tiles.as_mut_ptr().cast(), bits);
            }
        }
    }
    #[inline(always)]
    fn sort(self, keys: &[u8; 128], sorted: &mut [u8; 128]) -> [u8; 16] {
        const NUMBERS: [u8; 64] = {
            let mut numbers = [0; 64];
            let mut number = 0;
            while number < 64 {
                numbers[number] = number as u8;
                number += 1;
            }
            numbers
        };
        // A compressed vector is stored whole; what lies beyond its numbers is overwritten later.
        let mut buffer = [0; 128 + 64];
        let (mut ends, mut end) = ([0; 16], 0);
        // SAFETY: the token proves the features. The halves of `keys` and `NUMBERS` are vectors;
        // `end` counts distinct numbers below 128, so a vector fits into the buffer behind it.
        unsafe {
            let numbers = _mm512_loadu_si512(NUMBERS.as_ptr().cast());
            let numbers = [numbers, _mm512_add_epi8(numbers, _mm512_set1_epi8(64))];
            let keys = [0, 64].map(|at| _mm512_loadu_si512(keys.as_ptr().add(at).cast()));
            for (key, place) in ends.iter_mut().enumerate() {
                for (keys, numbers) in keys.into_iter().zip(numbers) {
                    let with = _mm512_cmpeq_epi8_mask(keys, _mm512_set1_epi8(key as i8));
                    let packed = _mm512_maskz_compress_epi8(with, numbers);
                    _mm512_storeu_si512(buffer.as_mut_ptr().add(end).cast(), packed);
                    end += with.count_ones() as usize;
                }
                *place = end as u8;
            }
        }
        sorted.copy_from_slice(&buffer[..128]);
        ends
    }

    vector_methods! { [unsafe]
        add(a: F, b: F) -> F = _mm512_add_ps(a, b);
        sub(a: F, b: F) -> F = _mm512_sub_ps(a, b);
        mul(a: F, b: F) -> F = _mm512_mul_ps(a, b);
        mul_add(a: F, b: F, c: F) -> F = _mm512_fmadd_ps(a, b, c);
        abs(x: F) -> F = _mm512_abs_ps(x);
        // As unsigned integers, magnitudes have the order of floats and every NaN is above the
        // limit.
        magnitude(x: F, limit: F) -> F = _mm512_castsi512_ps(_mm512_min_epu32(
            _mm512_castps_si512(_mm512_abs_ps(x)),
            _mm512_castps_si512(limit),
        ));
        least(a: F, b: F) -> F = _mm512_castsi512_ps(_mm512_min_epi32(
            _mm512_castps_si512(a),
            _mm512_castps_si512(b),
        ));
        most(a: F, b: F) -> F = _mm512_castsi512_ps(_mm512_max_epi32(
            _mm512_castps_si512(a),
            _mm512_castps_si512(b),
        ));
        above(a: F, b: F) -> M = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b);
        // The larger magnitude, with the sign of the first operand.
        raise(x: F, least: F) -> F = _mm512_range_ps::<0b0011>(x, least);
        select(which: M, a: F, b: F) -> F = _mm512_mask_blend_ps(which, b, a);
        and_u(a: U, b: U) -> U = _mm512_and_si512(a, b);
        or_u(a: U, b: U) -> U = _mm512_or_si512(a, b);
        xor_u(a: U, b: U) -> U = _mm512_xor_si512(a, b);
        not_u(a: U) -> U = _mm512_xor_si512(a, _mm512_set1_epi32(-1));
        select_u(which: M, a: U, b: U) -> U = _mm512_mask_blend_epi32(which, b, a);
        mul_even(a: U, b: U) -> U = _mm512_mul_epu32(a, b);
        odd_to_even(x: U) -> U = _mm512_srli_epi64::<32>(x);
        interleave_even(even: U, odd: U) -> U =
            _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64::<32>(odd));
        below(a: F, b: F) -> U = _mm512_sub_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b));
        truth(sign: U) -> M = _mm512_movepi32_mask(sign);
        uniform(word: U) -> F = _mm512_mul_ps(
            _mm512_cvtepi32_ps(_mm512_srli_epi32::<8>(word)),
            _mm512_set1_ps(1.0 / (1 << 24) as f32),
        );
        push_sign(bits: U, x: F) -> U = _mm512_shldi_epi32::<1>(bits, _mm512_castps_si512(x));
        join_octal(high: U, low: U) -> U = _mm512_or_si512(_mm512_slli_epi32::<3>(high), low);
    }
    vector_methods! { []
        and(a: M, b: M) -> M = a & b;
        or(a: M, b: M) -> M = a | b;
        not(a: M) -> M = !a;
    }
}
