// add: out = x + delta
// in   x, delta [elements], bf16 or f32
// out  out [elements], of the same type; may be x
// pre  16-byte aligned; out and delta do not overlap
// acc  f32, rounded once
// ref  conformance suite, norm_forward
#include "pdl.cuh"
#include "packed.cuh"

constexpr u32 THREADS = 256;

template <int WIDTH>
__device__ __forceinline__ void add_at(const bf16* x, const bf16* delta, bf16* out, u64 at) {
    Run<WIDTH> sum = load<WIDTH>(x + at), d = load<WIDTH>(delta + at);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum.at[i] += d.at[i];
    store(out + at, sum);
}

// A thread has eight elements, and the first threads one of those that remain.
extern "C" __global__ void __launch_bounds__(THREADS)
    add(const bf16* x, const bf16* delta, bf16* out, u64 elements) {
    pdl_wait();
    u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, left = 7 * (elements / 8) + thread;
    if (thread < elements / 8)
        add_at<8>(x, delta, out, 8 * thread);
    else if (left < elements)
        add_at<1>(x, delta, out, left);
}

// A thread has four elements, and the first threads one of those that remain.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_f32(const float* x, const float* delta, float* out, u64 elements) {
    pdl_wait();
    u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, left = 3 * (elements / 4) + thread;
    if (thread < elements / 4) {
        float4 sum = reinterpret_cast<const float4*>(x)[thread];
        float4 d = reinterpret_cast<const float4*>(delta)[thread];
        reinterpret_cast<float4*>(out)[thread] =
            make_float4(sum.x + d.x, sum.y + d.y, sum.z + d.z, sum.w + d.w);
    } else if (left < elements) {
        out[left] = x[left] + delta[left];
    }
}
