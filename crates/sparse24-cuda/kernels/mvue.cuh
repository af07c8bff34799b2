// The unbiased 2:4 estimators, exact and approximate, with the bits of sparse24_core::mvue for bf16
// elements. Compile without contraction.
//
// Elements are packed: 0 and 1, then 2 and 3 of a group, the first in the low half. So is the kept
// pair, lower index first, rounded to bf16. A call of Philox serves the four groups of sixteen
// tokens of a feature.
#pragma once
#include "philox.cuh"

struct Group {
    u32 x01, x23;
};

// Two kept bf16; the low half of `selector` has the bytes 2i, 2i+1 of the group for both indices.
struct Kept {
    u32 values, selector;
};

constexpr float MVUE_LARGEST = 0x1.fffffep127f;
constexpr u32 MVUE_NAN = 0x7fc07fc0;

// The selector of two indices is MVUE_SELECTOR + MVUE_INDEX * (i0 + 256 * i1).
constexpr u32 MVUE_SELECTOR = 0x1010, MVUE_INDEX = 0x22;
__device__ __forceinline__ u32 mvue_selector(u32 low, u32 high) {
    return MVUE_SELECTOR + MVUE_INDEX * (low | high << 8);
}

__device__ __forceinline__ u32 mvue_pick(Group x, u32 selector) {
    u32 pair;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(pair) : "r"(x.x01), "r"(x.x23), "r"(selector));
    return pair;
}

// copysign(max(|x|, r), x), rounded. x is a bf16, so the maximum may be taken after rounding.
__device__ __forceinline__ Kept mvue_keep(Group x, u32 selector, float r) {
    u32 kept = mvue_pick(x, selector), least = narrow_pair(r, r), values;
#if __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(kept), "r"(least));
#else
    asm("max.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(kept & 0x7fff7fffu), "r"(least));
    values |= kept & 0x80008000u;
#endif
    return {values, selector};
}

// The nibble i0 | i1 << 2.
__device__ __forceinline__ u32 mvue_nibble(u32 selector) {
    return (selector - MVUE_SELECTOR) * 65 >> 7 & 0xf;
}

// Comparisons as numbers, 1 or 0: adding them is cheaper than selecting.
__device__ __forceinline__ float at_least(float a, float b) {
    float holds;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(holds) : "f"(a), "f"(b));
    return holds;
}
__device__ __forceinline__ float less(float a, float b) {
    float holds;
    asm("set.lt.f32.f32 %0, %1, %2;" : "=f"(holds) : "f"(a), "f"(b));
    return holds;
}
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}

// The exact estimate of any group, as core defines it; sets of elements are bit masks.
__device__ __forceinline__ Kept mvue_exact_any(Group x, u32 word) {
    float a[4] = {fabsf(widen_low(x.x01)), fabsf(widen_high(x.x01)), fabsf(widen_low(x.x23)),
                  fabsf(widen_high(x.x23))};
    float scale = 1.0f;
    if (!((a[0] + a[1]) + (a[2] + a[3]) <= MVUE_LARGEST)) {
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            finite &= a[i] <= MVUE_LARGEST;
            a[i] *= 0.25f;
        }
        if (!finite) return {MVUE_NAN, mvue_selector(0, 1)};
        scale = 4.0f;
    }
    float p01 = a[0] + a[1], p23 = a[2] + a[3];
    float r = fminf((p01 + p23) * 0.5f, fminf(fminf(a[0], a[1]) + p23, fminf(a[2], a[3]) + p01));
    if (r == 0.0f)
        return mvue_keep(x, p23 > 0.0f ? mvue_selector(2, 3) : mvue_selector(0, 1), 0.0f);
    float t = uniform(word) * r, after = t + r, running = 0.0f;
    u32 certain = 0, drawn = 0, above_t = 0, above_after = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (a[i] >= r) {
            certain |= 1 << i;
        } else if (a[i] > 0.0f) {
            running += a[i];
            drawn |= 1 << i;
            above_t |= u32(t < running) << i;
            above_after |= u32(after < running) << i;
        }
    }
    // x & -x is the lowest element of a set; its highest bit is the last.
    u32 pair = certain;
    if (__popc(certain) < 2) {
        u32 last = 1u << (31 - __clz(drawn)), first = above_t != 0 ? above_t & (0 - above_t) : last;
        if (certain == 0) {
            first = min(first, 1u << (31 - __clz(drawn ^ last)));
            u32 later = above_after & ~(2 * first - 1);
            pair = later != 0 ? later & (0 - later) : last;
        }
        pair |= first;
    }
    return mvue_keep(x, mvue_selector(__ffs(pair) - 1, 31 - __clz(pair)), r * scale);
}

// The exact estimate of an ordinary group: its kept pair, with indices 2 - low and 3 - high; r is
// NaN unless the sum is finite.
struct Ordinary {
    u32 values;
    float low, high, r;
};

constexpr float MVUE_LEAST = 0x1p-100f, MVUE_SMALL = 0x1p-20f;
constexpr u32 MVUE_EXTREME = 1 << 12;

// The exact estimate from one uniform, if r is at least MVUE_LEAST, and either the uniform is
// between 2^-20 and 1 - 2^-20, or no element is below MVUE_SMALL of r. In core's definition,
// "otherwise the last" and "the one before the last" then follow from the comparisons:
// - t < r. A nonzero element is drawn or certain, and at least three are nonzero unless two are
//   certain.
// - r is at most min(a0, a1) + p23 and min(a2, a3) + p01. So if the last element is zero, r is at
//   most the sum that ends with the one before it, and so is t. If nothing is certain, t + r is
//   less than the sum of all by more than the rounding error; if the last is nonzero, that does not
//   matter.
// - If nothing is certain, every a is below r, so t + r is at least the sum that ends with the
//   first drawn: the second comes later.
// - If two are certain, the drawn ones add up to less than 2^-21 r: t is above every sum of them,
//   and t - r is below. If no element is that small, two are never certain.
// Certain elements move the sums that their index is compared with out of reach. A comparison that
// holds for an index also holds for the next, so indices are counts. Fused products are exact: one
// factor is 0, 1, -1 or 2, or everything is an integer.
__device__ __forceinline__ Ordinary mvue_exact_ordinary(Group x, u32 word) {
    float a0 = fabsf(widen_low(x.x01)), a1 = fabsf(widen_high(x.x01)), a2 = fabsf(widen_low(x.x23)),
          a3 = fabsf(widen_high(x.x23));
    float p01 = a0 + a1, p23 = a2 + a3, s = p01 + p23;
    // Rounding is monotonic, so the smaller of two sums is the sum with the smaller addend. s - s/2
    // is NaN if s is infinite.
    float r = min_or_nan(__fmaf_rn(s, -0.5f, s), fminf(fminf(a0, a1) + p23, fminf(a2, a3) + p01)),
          t = uniform(word) * r;
    float certain0 = at_least(a0, r), certain1 = at_least(a1, r), certain2 = at_least(a2, r),
          certain3 = at_least(a3, r);
    float certain01 = certain0 + certain1, certain23 = certain2 + certain3;
    float c0 = __fmaf_rn(-certain0, a0, a0), c1 = c0 + __fmaf_rn(-certain1, a1, a1),
          c2 = c1 + __fmaf_rn(-certain2, a2, a2);
    // t + r, t or t - r if none, one or two are certain.
    float second = __fmaf_rn((1.0f - certain01) - certain23, r, t);
    float low = less(t, __fmaf_rn(certain0, MVUE_LARGEST, c0)) +
                less(t, __fmaf_rn(certain01, MVUE_LARGEST, c1));
    float high = less(second, __fmaf_rn(certain23, -MVUE_LARGEST, c1)) +
                 less(second, __fmaf_rn(certain3, -MVUE_LARGEST, c2));
    // Adding 2^23 leaves an integer in the low bits.
    float selector = __fmaf_rn(low, -float(MVUE_INDEX),
                               0x1p23f + float(MVUE_SELECTOR + MVUE_INDEX * (2 + 3 * 256)));
    selector = __fmaf_rn(high, -float(MVUE_INDEX * 256), selector);
    return {mvue_keep(x, __float_as_uint(selector), r).values, low, high, r};
}

// The approximate estimate from two uniforms.
__device__ __forceinline__ Kept mvue_approximate(Group x, u32 word, u32 second_word) {
    float a[4] = {fabsf(widen_low(x.x01)), fabsf(widen_high(x.x01)), fabsf(widen_low(x.x23)),
                  fabsf(widen_high(x.x23))};
    if (!((a[0] + a[1]) + (a[2] + a[3]) <= MVUE_LARGEST)) {
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            finite &= a[i] <= MVUE_LARGEST;
            a[i] *= 0.25f;
        }
        if (!finite) return {MVUE_NAN, mvue_selector(0, 1)};
    }
    u32 nonzero = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) nonzero |= u32(a[i] > 0.0f) << i;
    if (__popc(nonzero) < 3) {
        // One nonzero and its neighbour, or the two nonzeros.
        u32 pair = __popc(nonzero) == 2 ? nonzero : nonzero > 3 ? 12u : 3u;
        return mvue_keep(x, mvue_selector(__ffs(pair) - 1, 31 - __clz(pair)), 0.0f);
    }
    float total = (a[0] + a[1]) + (a[2] + a[3]), without[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        without[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i != j) without[j] += a[i];
    }
    // Draws the first nonzero, except the one to skip, with t below the running sum; otherwise the
    // last.
    auto draw = [&](int skip, float t) {
        float running = 0.0f;
        int last = 0;
        bool found = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i != skip && a[i] > 0.0f && !found) {
                running += a[i];
                last = i;
                found = t < running;
            }
        }
        return last;
    };
    int first = draw(4, uniform(word) * total);
    float rest = first == 0   ? without[0]
                 : first == 1 ? without[1]
                 : first == 2 ? without[2]
                              : without[3];
    int second = draw(first, uniform(second_word) * rest);
    u32 low = min(first, second), high = max(first, second), selector = mvue_selector(low, high),
        kept = mvue_pick(x, selector);
    auto pick = [&](u32 i) { return i == 0 ? a[0] : i == 1 ? a[1] : i == 2 ? a[2] : a[3]; };
    auto value = [&](u32 i, float x) {
        float others = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (j != i) others += a[j] / total * (pick(i) / without[j]);
        return x / fmaxf(pick(i) / total + others, 0x1p-126f);
    };
    return {narrow_pair(value(low, widen_low(kept)), value(high, widen_high(kept))), selector};
}

// Estimates some groups of sixteen tokens of a feature, a bit each in `which`, with one copy of the
// code: groups rotate to the front.
template <class Sample>
__device__ __forceinline__ u32 mvue_in_turn(const u32 (&x)[8], uint4 words, uint4 seconds,
                                            u32 which, u32 (&values)[4], u32 nibbles,
                                            Sample sample) {
    u32 next[8] = {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]};
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
        Kept kept = {values[0], 0};
        if (which >> j & 1) {
            kept = sample(Group{next[0], next[1]}, words.x, seconds.x);
            nibbles = nibbles & ~(0xfu << 4 * j) | mvue_nibble(kept.selector) << 4 * j;
        }
#pragma unroll
        for (int i = 0; i < 6; ++i) next[i] = next[i + 2];
        words = make_uint4(words.y, words.z, words.w, 0);
        seconds = make_uint4(seconds.y, seconds.z, seconds.w, 0);
        values[0] = values[1], values[1] = values[2], values[2] = values[3],
        values[3] = kept.values;
    }
    return nibbles;
}

// The smallest magnitude of a group.
__device__ __forceinline__ float mvue_least(u32 x01, u32 x23) {
    return fminf(fminf(fabsf(widen_low(x01)), fabsf(widen_high(x01))),
                 fminf(fabsf(widen_low(x23)), fabsf(widen_high(x23))));
}

// The exact estimates of sixteen tokens of a feature from the words of their call. Writes the kept
// pairs to `values` and returns the four nibbles.
__device__ __forceinline__ u32 mvue_exact(const u32 (&x)[8], uint4 words, u32 (&values)[4]) {
    u32 draws[4] = {words.x, words.y, words.z, words.w};
    auto extreme = [](u32 word) { return word + MVUE_EXTREME < 2 * MVUE_EXTREME; };
    bool usual = min(min(words.x + MVUE_EXTREME, words.y + MVUE_EXTREME),
                     min(words.z + MVUE_EXTREME, words.w + MVUE_EXTREME)) >= 2 * MVUE_EXTREME;
    bool ordinary = usual;
    // Nibbles are 2 - low + 4 * (3 - high); an integer again.
    float r[4], all = 0x1p23f + float(14 * 0x1111);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        Ordinary made = mvue_exact_ordinary({x[2 * j], x[2 * j + 1]}, draws[j]);
        values[j] = made.values;
        r[j] = made.r;
        ordinary &= made.r >= MVUE_LEAST;
        all = __fmaf_rn(made.low, -float(1 << 4 * j), all);
        all = __fmaf_rn(made.high, -float(4 << 4 * j), all);
    }
    u32 nibbles = __float_as_uint(all) & 0xffff;
    if (ordinary) return nibbles;
    bool done = usual;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        // If at most one element is nonzero, it and its neighbour are kept as they are.
        bool zero = r[j] == 0.0f, later = (x[2 * j + 1] & 0x7fff7fffu) != 0;
        values[j] = zero ? later ? x[2 * j + 1] : x[2 * j] : values[j];
        nibbles = zero ? nibbles & ~(0xfu << 4 * j) | (later ? 0xeu : 0x4u) << 4 * j : nibbles;
        done &= zero || r[j] >= MVUE_LEAST;
    }
    if (done) return nibbles;
    u32 rest = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        bool covered =
            r[j] >= MVUE_LEAST &&
            (!extreme(draws[j]) || mvue_least(x[2 * j], x[2 * j + 1]) >= r[j] * MVUE_SMALL);
        rest |= u32(r[j] != 0.0f && !covered) << j;
    }
    if (rest == 0) return nibbles;
    return mvue_in_turn(x, words, words, rest, values, nibbles,
                        [](Group x, u32 word, u32) { return mvue_exact_any(x, word); });
}

// The same with the approximate estimator, which draws second uniforms in another call.
__device__ __forceinline__ u32 mvue_approximate(const u32 (&x)[8], uint4 words, uint4 seconds,
                                                u32 (&values)[4]) {
    return mvue_in_turn(x, words, seconds, 0xf, values, 0, [](Group x, u32 word, u32 second) {
        return mvue_approximate(x, word, second);
    });
}
