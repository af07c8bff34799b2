// The unbiased 2:4 estimators, exact and approximate: sparse24_core::mvue to the bit, for elements that bf16 holds.
// Compile without contraction.
//
// Elements come packed: 0 and 1, then 2 and 3 of a group, the first in the low half. The kept pair leaves packed as well, lower index
// first, rounded to bf16. A call of Philox serves the four groups of sixteen tokens of a feature.
#pragma once
#include "philox.cuh"

struct Group {
    u32 x01, x23;
};

// Two kept bf16, and i0 | i1 << 8.
struct Kept {
    u32 values, indices;
};

constexpr float MVUE_LARGEST = 0x1.fffffep127f;
constexpr u32 MVUE_FIRST_TWO = 0 | 1 << 8;

__device__ __forceinline__ u32 mvue_pick(Group x, u32 indices) {
    // Bytes 2i and 2i+1 of the group, for both i.
    u32 pair;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(pair) : "r"(x.x01), "r"(x.x23), "r"(indices * 0x22 + 0x1010));
    return pair;
}

// copysign(max(|x|, r), x), rounded: x is a bf16, so that the larger may be taken after rounding.
__device__ __forceinline__ Kept mvue_keep(Group x, u32 indices, float r) {
    u32 kept = mvue_pick(x, indices), least = narrow_pair(r, r), values;
#if __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(kept), "r"(least));
#else
    asm("max.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(kept & 0x7fff7fffu), "r"(least));
    values |= kept & 0x80008000u;
#endif
    return {values, indices};
}

// 1 where a >= b, else 0: a number takes part in sums, which run beside comparisons and selections.
__device__ __forceinline__ float at_least(float a, float b) {
    float one_or_zero;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one_or_zero) : "f"(a), "f"(b));
    return one_or_zero;
}

// The groups that mvue_exact leaves to this: not finite or with a sum that overflows, or r below 2^-100. As core writes it down; a set of
// elements is a bit each.
__device__ __forceinline__ Kept mvue_exact_rare(Group x, u32 word) {
    // Made opaque, so that nothing here is computed before it is known to be needed.
    asm("" : "+r"(x.x01), "+r"(x.x23), "+r"(word));
    float a[4] = {fabsf(widen_low(x.x01)), fabsf(widen_high(x.x01)), fabsf(widen_low(x.x23)), fabsf(widen_high(x.x23))};
    float scale = 1.0f;
    if (!((a[0] + a[1]) + (a[2] + a[3]) <= MVUE_LARGEST)) {
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            finite &= a[i] <= MVUE_LARGEST;
            a[i] *= 0.25f;
        }
        if (!finite) return {0x7fc07fc0u, MVUE_FIRST_TWO};
        scale = 4.0f;
    }
    float p01 = a[0] + a[1], p23 = a[2] + a[3];
    float r = fminf((p01 + p23) * 0.5f, fminf(fminf(a[0], a[1]) + p23, fminf(a[2], a[3]) + p01));
    if (r == 0.0f) return mvue_keep(x, p23 > 0.0f ? 2u | 3u << 8 : MVUE_FIRST_TWO, 0.0f);
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
    // The lowest of a set is that of x & -x; the last of a set is its highest bit.
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
    return mvue_keep(x, (__ffs(pair) - 1) | (31 - __clz(pair)) << 8, r * scale);
}

// The exact estimate of a group from one uniform. Core's fall-backs, "else the last" and "the one before the last", come out of these
// comparisons where r is normal:
// - t < r. A nonzero element is drawn or certain, and at least three are nonzero unless two are certain.
// - R is at most min(a0, a1) + p23 and min(a2, a3) + p01. So where the last element is zero, r is at most the sum that ends with the one
//   before it, and t stays below that sum. Only t + r may round up to the sum of all.
// - Where nothing is certain every a is below r, so t + r is at least the sum that ends with the first drawn: the second comes later.
// - Where two are certain the drawn add up to almost nothing: t + r/2 lies above every sum of them, t - r below.
// Fused products are exact: with 0, 1, -1, or 2 where the factor is r/4.
__device__ __forceinline__ Kept mvue_exact(Group x, u32 word) {
    float a0 = fabsf(widen_low(x.x01)), a1 = fabsf(widen_high(x.x01)), a2 = fabsf(widen_low(x.x23)), a3 = fabsf(widen_high(x.x23));
    float p01 = a0 + a1, p23 = a2 + a3, s = p01 + p23;
    // Rounding is monotonic, so the least of two sums is the sum with the least.
    float r = fminf(s * 0.5f, fminf(fminf(a0, a1) + p23, fminf(a2, a3) + p01)), t = uniform(word) * r;
    float certain0 = at_least(a0, r), certain1 = at_least(a1, r), certain2 = at_least(a2, r), certain3 = at_least(a3, r);
    float certain = (certain0 + certain1) + (certain2 + certain3), points = 1.0f - certain;
    float c0 = __fmaf_rn(-certain0, a0, a0), c1 = c0 + __fmaf_rn(-certain1, a1, a1), c2 = c1 + __fmaf_rn(-certain2, a2, a2);
    float first = __fmaf_rn(-points * certain, 0.25f * r, t), second = __fmaf_rn(certain3, MVUE_LARGEST, __fmaf_rn(points, r, t));
    bool low0 = first < __fmaf_rn(certain0, MVUE_LARGEST, c0), low1 = first < __fmaf_rn(certain1, MVUE_LARGEST, c1);
    bool high1 = second < __fmaf_rn(certain2, -MVUE_LARGEST, c1), high2 = second < c2 || a3 == 0.0f;
    u32 low = low0 ? 0u : low1 ? 1u : 2u, high = high1 ? 1u << 8 : high2 ? 2u << 8 : 3u << 8;
    Kept kept = mvue_keep(x, low + high, r);
    // NaN unless s is finite.
    if (__builtin_expect(!(__fmaf_rn(s, 0.0f, r) >= 0x1p-100f), 0)) kept = mvue_exact_rare(x, word);
    return kept;
}

// The approximate estimate from two uniforms.
__device__ __forceinline__ Kept mvue_approximate(Group x, u32 word, u32 second_word) {
    float a[4] = {fabsf(widen_low(x.x01)), fabsf(widen_high(x.x01)), fabsf(widen_low(x.x23)), fabsf(widen_high(x.x23))};
    if (!((a[0] + a[1]) + (a[2] + a[3]) <= MVUE_LARGEST)) {
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            finite &= a[i] <= MVUE_LARGEST;
            a[i] *= 0.25f;
        }
        if (!finite) return {0x7fc07fc0u, MVUE_FIRST_TWO};
    }
    u32 nonzero = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) nonzero |= u32(a[i] > 0.0f) << i;
    if (__popc(nonzero) < 3) {
        // One and its neighbour, or two.
        u32 pair = __popc(nonzero) == 2 ? nonzero : nonzero > 3 ? 12u : 3u;
        return mvue_keep(x, (__ffs(pair) - 1) | (31 - __clz(pair)) << 8, 0.0f);
    }
    float total = (a[0] + a[1]) + (a[2] + a[3]), without[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        without[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i != j) without[j] += a[i];
    }
    // The first nonzero, but the one to skip, with t below the running sum; else the last.
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
    float rest = first == 0 ? without[0] : first == 1 ? without[1] : first == 2 ? without[2] : without[3];
    int second = draw(first, uniform(second_word) * rest);
    u32 low = min(first, second), high = max(first, second), kept = mvue_pick(x, low | high << 8);
    auto value = [&](u32 i, float x) {
        float magnitude = fabsf(x), others = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (j != i) others += a[j] / total * ((i == 0 ? a[0] : i == 1 ? a[1] : i == 2 ? a[2] : a[3]) / without[j]);
        return x / fmaxf((i == 0 ? a[0] : i == 1 ? a[1] : i == 2 ? a[2] : a[3]) / total + others, 0x1p-126f);
    };
    return {narrow_pair(value(low, widen_low(kept)), value(high, widen_high(kept))), low | high << 8};
}

// The nibble i0 | i1 << 2 of group j of a call, six bits higher than it belongs.
__device__ __forceinline__ u32 mvue_nibble(Kept kept, int j) { return kept.indices * (65u << 4 * j) & 0xfu << (4 * j + 6); }

__device__ __forceinline__ u32 mvue_word(uint4 words, int j) { return j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w; }
