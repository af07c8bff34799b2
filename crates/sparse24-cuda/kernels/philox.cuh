// Philox4x32-10 (Salmon et al. 2011), as sparse24_core::philox: a random word is a function of its
// address.
#pragma once
#include "scalar.cuh"

// The numbers that change every step, as sparse24_core::op::StepState. They live on the device, so
// that a captured CUDA graph can be replayed with new values.
struct StepState {
    u64 seed;
    u32 step;
    u32 micro_step;
    float learning_rate;
    float bias_correction1;
    float bias_correction2;
    float loss_scale;
};

// One instruction. For `u64(a) * b` the compiler emits more if it knows that lanes share a factor.
__device__ __forceinline__ u64 wide_product(u32 a, u32 b) {
    u64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ uint4 philox(u64 key, u32 call, u32 site, u32 micro_step, u32 step) {
    u32 k0 = u32(key), k1 = u32(key >> 32);
    uint4 c = make_uint4(call, site, micro_step, step);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u64 a = wide_product(0xD2511F53u, c.x), b = wide_product(0xCD9E8D57u, c.z);
        c = make_uint4(u32(b >> 32) ^ c.y ^ k0, u32(b), u32(a >> 32) ^ c.w ^ k1, u32(a));
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// For whole warps: makes the seed known to be the same in every lane, so that the keys of each
// round are computed once per warp.
__device__ __forceinline__ StepState uniform_state(StepState all) {
    u32 low = __shfl_sync(0xffffffffu, u32(all.seed), 0),
        high = __shfl_sync(0xffffffffu, u32(all.seed >> 32), 0);
    all.seed = u64(high) << 32 | low;
    return all;
}

__device__ __forceinline__ uint4 philox(const StepState& state, u32 site, u32 call) {
    return philox(state.seed, call, site, state.micro_step, state.step);
}

// In [0, 1), a multiple of 2^-24.
__device__ __forceinline__ float uniform(u32 word) { return float(word >> 8) * 0x1p-24f; }
