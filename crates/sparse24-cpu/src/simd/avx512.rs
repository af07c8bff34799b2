//! Sixteen lanes: AVX-512 F, BW, DQ, VL and VBMI2, beside AVX2, BMI2 and F16C.

use core::arch::x86_64::*;

use sparse24_core::search::CODES;

use super::{Kernel, LINE, Line, Vector, avx2::Avx2, lane_of_tile};

/// Proof that the machine has these instructions; only [`Avx512::detect`] makes one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512 {
    /// 1, which the compiler does not know: see [`Vector::sub_aside`].
    one: f32,
}

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let present = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi2");
        present.then(|| Self { one: core::hint::black_box(1.0) })
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) {
        // SAFETY: `self` proves the features.
        unsafe { run(self, kernel) }
    }
}

#[target_feature(
    enable = "avx2,bmi1,bmi2,lzcnt,popcnt,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2"
)]
fn run<K: Kernel>(v: Avx512, kernel: K) {
    kernel.run(v);
}

const LANES: usize = 16;

/// `vrangeps`: the smaller and the larger magnitude, as a magnitude; a signalling NaN comes out as
/// a NaN.
const ABS_MIN: i32 = 0b1010;
const ABS_MAX: i32 = 0b1011;
/// The larger magnitude with the sign of the first.
const SIGNED_MAX: i32 = 0b0011;

/// `a & b | c`.
const AND_OR: i32 = 0xea;

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

/// Evaluates intrinsics of this file's features.
macro_rules! avx512 {
    ($self:ident, $body:expr) => {{
        let Self { .. } = $self;
        // SAFETY: the token proves the features, which is all that an intrinsic on values asks for;
        // an intrinsic on memory stands in this file only behind a check that the slice holds a
        // whole vector, and asks for no alignment.
        unsafe { $body }
    }};
}

impl Vector for Avx512 {
    const LANES: usize = LANES;
    type F = __m512;
    type U = __m512i;
    type M = __mmask16;

    #[inline(always)]
    fn stream(self, from: &[u8; LINE], to: &mut Line) {
        // SAFETY: the token proves the features. Both are one vector, and a line is aligned. The
        // order of these stores is [`super::Stores`]' affair, which fences before it gives the
        // lines up.
        unsafe {
            _mm512_stream_si512((&raw mut *to).cast(), _mm512_loadu_si512(from.as_ptr().cast()))
        }
    }
    #[inline(always)]
    fn fence(self) {
        // SAFETY: the instruction is part of every x86-64.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        avx512!(self, _mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        let from = &from[..LANES];
        avx512!(self, _mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32]) {
        let to = &mut to[..LANES];
        avx512!(self, _mm512_storeu_ps(to.as_mut_ptr(), x))
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        avx512!(self, _mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        avx512!(self, _mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn sub_aside(self, a: Self::F, b: Self::F) -> Self::F {
        avx512!(self, _mm512_fmsub_ps(a, _mm512_set1_ps(self.one), b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        avx512!(self, _mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        avx512!(self, _mm512_abs_ps(x))
    }
    #[inline(always)]
    fn magnitude(self, x: Self::F, limit: f32) -> Self::F {
        // As unsigned integers the magnitudes are ordered as floats, and every NaN is above the
        // limit.
        avx512!(self, {
            let a = _mm512_castps_si512(self.abs(x));
            _mm512_castsi512_ps(_mm512_min_epu32(a, _mm512_set1_epi32(limit.to_bits() as i32)))
        })
    }
    const QUICK_LEAVES_NAN: bool = true;
    #[inline(always)]
    fn quick_magnitude(self, x: Self::F, limit: f32) -> Self::F {
        avx512!(self, _mm512_range_ps::<ABS_MIN>(x, _mm512_set1_ps(limit)))
    }
    #[inline(always)]
    fn least(self, a: Self::F, b: Self::F) -> Self::F {
        avx512!(
            self,
            _mm512_castsi512_ps(_mm512_min_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
        )
    }
    #[inline(always)]
    fn most(self, a: Self::F, b: Self::F) -> Self::F {
        avx512!(
            self,
            _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
        )
    }
    #[inline(always)]
    fn most_abs(self, a: Self::F, b: Self::F) -> Self::F {
        avx512!(self, _mm512_range_ps::<ABS_MAX>(a, b))
    }
    #[inline(always)]
    fn unordered(self, a: Self::F, b: Self::F) -> Self::M {
        avx512!(self, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, b))
    }
    #[inline(always)]
    fn above(self, a: Self::F, b: Self::F) -> Self::M {
        avx512!(self, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b))
    }
    #[inline(always)]
    fn copysign(self, magnitude: Self::F, sign: Self::F) -> Self::F {
        avx512!(self, {
            let bit = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_and_ps(bit, sign), _mm512_andnot_ps(bit, magnitude))
        })
    }
    #[inline(always)]
    fn select(self, which: Self::M, a: Self::F, b: Self::F) -> Self::F {
        avx512!(self, _mm512_mask_blend_ps(which, b, a))
    }
    #[inline(always)]
    fn at_least_in_magnitude(self, x: Self::F, least: Self::F) -> Self::F {
        avx512!(self, _mm512_range_ps::<SIGNED_MAX>(x, least))
    }

    #[inline(always)]
    fn splat_u(self, x: u32) -> Self::U {
        avx512!(self, _mm512_set1_epi32(x as i32))
    }
    #[inline(always)]
    fn load_u(self, from: &[u32]) -> Self::U {
        let from = &from[..LANES];
        avx512!(self, _mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_u(self, x: Self::U, to: &mut [u32]) {
        let to = &mut to[..LANES];
        avx512!(self, _mm512_storeu_si512(to.as_mut_ptr().cast(), x))
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        avx512!(self, _mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn select_u(self, which: Self::M, a: Self::U, b: Self::U) -> Self::U {
        avx512!(self, _mm512_mask_blend_epi32(which, b, a))
    }
    #[inline(always)]
    fn mul_even(self, a: Self::U, b: Self::U) -> Self::U {
        avx512!(self, _mm512_mul_epu32(a, b))
    }
    #[inline(always)]
    fn odd_to_even(self, x: Self::U) -> Self::U {
        avx512!(self, _mm512_srli_epi64::<32>(x))
    }
    #[inline(always)]
    fn interleave_even(self, even: Self::U, odd: Self::U) -> Self::U {
        avx512!(self, _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64::<32>(odd)))
    }
    #[inline(always)]
    fn below(self, a: Self::F, b: Self::F) -> Self::U {
        avx512!(self, _mm512_sub_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)))
    }
    #[inline(always)]
    fn and_u(self, a: Self::U, b: Self::U) -> Self::U {
        avx512!(self, _mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or_u(self, a: Self::U, b: Self::U) -> Self::U {
        avx512!(self, _mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn not_u(self, a: Self::U) -> Self::U {
        avx512!(self, _mm512_xor_si512(a, _mm512_set1_epi32(-1)))
    }
    #[inline(always)]
    fn truth(self, sign: Self::U) -> Self::M {
        avx512!(self, _mm512_movepi32_mask(sign))
    }
    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::U {
        avx512!(self, _mm512_castps_si512(x))
    }
    #[inline(always)]
    fn join_brains(self, low: Self::F, high: Self::F) -> Self::U {
        avx512!(self, {
            let (low, high) = (_mm512_castps_si512(low), _mm512_castps_si512(high));
            // Upper halves of `bits + 0x7fff + (bits >> 16 & 1)`.
            let (half, one) = (_mm512_set1_epi32(0x7fff), _mm512_set1_epi32(1));
            let odd = |x| _mm512_and_si512(_mm512_srli_epi32::<16>(x), one);
            let low = _mm512_add_epi32(_mm512_add_epi32(low, half), odd(low));
            let high = _mm512_add_epi32(_mm512_add_epi32(high, half), odd(high));
            _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(low), high)
        })
    }
    #[inline(always)]
    fn test(self, x: Self::U, mask: u32, value: u32) -> Self::M {
        let masked = avx512!(self, _mm512_and_si512(x, self.splat_u(mask)));
        avx512!(self, _mm512_cmpeq_epi32_mask(masked, self.splat_u(value)))
    }
    #[inline(always)]
    fn uniform(self, word: Self::U) -> Self::F {
        avx512!(
            self,
            _mm512_mul_ps(
                _mm512_cvtepi32_ps(_mm512_srli_epi32::<8>(word)),
                _mm512_set1_ps(1.0 / (1 << 24) as f32)
            )
        )
    }
    #[inline(always)]
    fn push_sign(self, bits: Self::U, x: Self::F) -> Self::U {
        avx512!(self, _mm512_shldi_epi32::<1>(bits, _mm512_castps_si512(x)))
    }
    #[inline(always)]
    fn join_octal(self, high: Self::U, low: Self::U) -> Self::U {
        avx512!(self, _mm512_or_si512(_mm512_slli_epi32::<3>(high), low))
    }
    #[inline(always)]
    fn join_nibble(self, high: Self::U, low: Self::U) -> Self::U {
        avx512!(self, _mm512_or_si512(_mm512_slli_epi32::<4>(high), low))
    }

    #[inline(always)]
    fn and(self, a: Self::M, b: Self::M) -> Self::M {
        a & b
    }
    #[inline(always)]
    fn or(self, a: Self::M, b: Self::M) -> Self::M {
        a | b
    }
    #[inline(always)]
    fn not(self, a: Self::M) -> Self::M {
        !a
    }
    #[inline(always)]
    fn any(self, a: Self::M) -> bool {
        a != 0
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [Self::U; 16]) {
        avx512!(self, {
            // Within each 128-bit lane squares of four, then the lanes among each other.
            for at in (0..LANES).step_by(4) {
                let [a, b, c, d] = [rows[at], rows[at + 1], rows[at + 2], rows[at + 3]];
                let (ab01, ab23) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                let (cd01, cd23) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                (rows[at], rows[at + 1]) =
                    (_mm512_unpacklo_epi64(ab01, cd01), _mm512_unpackhi_epi64(ab01, cd01));
                (rows[at + 2], rows[at + 3]) =
                    (_mm512_unpacklo_epi64(ab23, cd23), _mm512_unpackhi_epi64(ab23, cd23));
            }
            for at in 0..4 {
                let [a, b, c, d] = [rows[at], rows[at + 4], rows[at + 8], rows[at + 12]];
                let (ab02, ab13) =
                    (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
                let (cd02, cd13) =
                    (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
                (rows[at], rows[at + 8]) = (
                    _mm512_shuffle_i32x4::<0x88>(ab02, cd02),
                    _mm512_shuffle_i32x4::<0xdd>(ab02, cd02),
                );
                (rows[at + 4], rows[at + 12]) = (
                    _mm512_shuffle_i32x4::<0x88>(ab13, cd13),
                    _mm512_shuffle_i32x4::<0xdd>(ab13, cd13),
                );
            }
        });
    }
    #[inline(always)]
    fn transpose_tiles(self, [a, b, c, e]: [Self::F; 4]) -> [Self::F; 4] {
        avx512!(self, {
            let pair = |low, high| (_mm512_castps_pd(low), _mm512_castps_pd(high));
            let (ab01, ab23) = pair(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let (ce01, ce23) = pair(_mm512_unpacklo_ps(c, e), _mm512_unpackhi_ps(c, e));
            [
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab01, ce01)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab01, ce01)),
                _mm512_castpd_ps(_mm512_unpacklo_pd(ab23, ce23)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(ab23, ce23)),
            ]
        })
    }
    #[inline(always)]
    fn look_up(self, codes: &[u32], tiles: &mut [u16]) {
        for (tiles, codes) in tiles.chunks_exact_mut(2 * LANES).zip(codes.chunks_exact(2 * LANES)) {
            avx512!(self, {
                let table =
                    |at: usize| _mm512_loadu_si512(CODES[32 * at..32 * at + 32].as_ptr().cast());
                let places = _mm512_loadu_si512(PLACE_OF_TILE.as_ptr().cast());
                let (first, second) = codes.split_at(LANES);
                let codes = _mm512_permutex2var_epi16(
                    _mm512_loadu_si512(first.as_ptr().cast()),
                    places,
                    _mm512_loadu_si512(second.as_ptr().cast()),
                );
                let below = _mm512_permutex2var_epi16(table(0), codes, table(1));
                let above = _mm512_permutex2var_epi16(table(2), codes, table(3));
                let bits = _mm512_mask_blend_epi16(
                    _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)),
                    below,
                    above,
                );
                _mm512_storeu_si512(tiles.as_mut_ptr().cast(), bits);
            });
        }
    }
    #[inline(always)]
    fn chosen(self, bits: u32) -> Self::M {
        bits as __mmask16
    }
    #[inline(always)]
    fn pack_pairs(self, [low, high]: [Self::F; 2], nibbles: u32) -> Self::F {
        avx512!(self, {
            let places =
                _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let groups =
                _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
            let each = _mm512_srlv_epi32(_mm512_set1_epi32(nibbles as i32), places);
            let lanes = _mm512_ternarylogic_epi32::<AND_OR>(each, _mm512_set1_epi32(3), groups);
            _mm512_permutex2var_ps(low, lanes, high)
        })
    }
}
