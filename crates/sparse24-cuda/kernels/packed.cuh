// Runs of bf16 in registers as f32: eight by one access of 16 bytes, or one if rows are not so
// aligned.
#pragma once
#include "scalar.cuh"

template <int WIDTH> struct Run {
    float at[WIDTH];
};

__device__ __forceinline__ Run<8> widen(uint4 pairs) {
    return {widen_low(pairs.x), widen_high(pairs.x), widen_low(pairs.y), widen_high(pairs.y),
            widen_low(pairs.z), widen_high(pairs.z), widen_low(pairs.w), widen_high(pairs.w)};
}

__device__ __forceinline__ uint4 narrow(const Run<8>& run) {
    return make_uint4(
        narrow_pair(run.at[0], run.at[1]), narrow_pair(run.at[2], run.at[3]),
        narrow_pair(run.at[4], run.at[5]), narrow_pair(run.at[6], run.at[7]));
}

template <int WIDTH> __device__ __forceinline__ Run<WIDTH> load(const bf16* from) {
    static_assert(WIDTH == 8 || WIDTH == 1, "sixteen bytes or one element");
    if constexpr (WIDTH == 1)
        return {widen(*from)};
    else
        return widen(*reinterpret_cast<const uint4*>(from));
}

template <int WIDTH> __device__ __forceinline__ void store(bf16* to, const Run<WIDTH>& run) {
    if constexpr (WIDTH == 1)
        *to = narrow(run.at[0]);
    else
        *reinterpret_cast<uint4*>(to) = narrow(run);
}
