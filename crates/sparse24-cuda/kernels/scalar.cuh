// Scalars: bf16 as bits, and exact arithmetic that the compiler may not contract.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// bf16 in memory; arithmetic is in f32.
struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
// The two halves of a word, lower first.
__device__ __forceinline__ float widen_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float widen_high(u32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

// Two f32 to bf16, to nearest, ties to even: the first in the low half. NaN stays NaN.
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ bf16 narrow(float x) { return bf16{u16(narrow_pair(x, 0.0f))}; }

// 2^x with relative error 2^-22; 0 below 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// For instructions that take addresses in shared memory.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ uint4 load16(u32 shared) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(shared)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store16(u32 shared, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ u32 load4(u32 shared) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
    return x;
}
// Four 8x8 matrices of bf16: lane l gives the address of row l%8 of matrix l/8, and has two
// elements of row l/4 of each, or, if they are transposed, of column l/4.
__device__ __forceinline__ uint4 load_matrices(u32 shared) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(shared)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_matrices_transposed(u32 shared) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(shared)
                 : "memory");
    return x;
}

// Sums over the lanes of a warp, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
__device__ __forceinline__ u32 warp_sum(u32 x) { return __reduce_add_sync(0xffffffffu, x); }

// The tile of a mask, transposed: bit 4*row+column moves to 4*column+row.
__device__ __forceinline__ u32 transposed(u32 bits) {
    u32 swap = (bits ^ bits >> 3) & 0x0a0au;
    bits ^= swap ^ swap << 3;
    swap = (bits ^ bits >> 6) & 0x00ccu;
    return bits ^ swap ^ swap << 6;
}
