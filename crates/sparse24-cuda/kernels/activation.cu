// gelu_*, gelu_erf_*: h = GELU(z), dz = dh * GELU'(z), in the tanh and in the erf form
// tanh_*, relu_*: h = tanh(z), dz = dh * tanh'(z), and likewise max(z, 0)
// geglu_*, swiglu_*: with a, b the halves of z and A = GELU or SiLU, h = A(a) * b and
//      dz = [dh * b * A'(a), dh * A(a)]
// in   bf16: z [p,f], gated [p,2f]; dh [p,f]
// out  bf16: h [p,f]; dz as z
// pre  16-byte aligned; gated: p*f < 2^32, and a thread takes `width` elements: 8 if 8 divides f,
//      otherwise 1; outputs alias nothing
// acc  f32
// ref  sparse24_cpu::activation, within the bounds of the conformance suite
#include "activation.cuh"
#include "pdl.cuh"
#include "packed.cuh"

constexpr u32 THREADS = 256;

template <class A, int WIDTH>
__device__ __forceinline__ void plain_forward_at(const bf16* z, bf16* h, u64 at) {
    Run<WIDTH> run = load<WIDTH>(z + at);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) run.at[i] = A::at(run.at[i]).value;
    store(h + at, run);
}

template <class A, int WIDTH>
__device__ __forceinline__ void plain_backward_at(const bf16* dh, const bf16* z, bf16* dz, u64 at) {
    Run<WIDTH> run = load<WIDTH>(z + at), d = load<WIDTH>(dh + at);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) run.at[i] = d.at[i] * A::at(run.at[i]).slope;
    store(dz + at, run);
}

// A thread has eight elements, and the first threads one of those that remain.
#define PLAIN(forward, backward, A)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        forward(const bf16* z, bf16* h, u64 elements) {                                            \
        pdl_wait();                                                                                \
        u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, left = 7 * (elements / 8) + thread;  \
        if (thread < elements / 8)                                                                 \
            plain_forward_at<A, 8>(z, h, 8 * thread);                                              \
        else if (left < elements)                                                                  \
            plain_forward_at<A, 1>(z, h, left);                                                    \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        backward(const bf16* dh, const bf16* z, bf16* dz, u64 elements) {                          \
        pdl_wait();                                                                                \
        u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, left = 7 * (elements / 8) + thread;  \
        if (thread < elements / 8)                                                                 \
            plain_backward_at<A, 8>(dh, z, dz, 8 * thread);                                        \
        else if (left < elements)                                                                  \
            plain_backward_at<A, 1>(dh, z, dz, left);                                              \
    }
PLAIN(gelu_forward, gelu_backward, Gelu)
PLAIN(gelu_erf_forward, gelu_erf_backward, GeluErf)
PLAIN(tanh_forward, tanh_backward, Tanh)
PLAIN(relu_forward, relu_backward, Relu)

template <class A, int WIDTH>
__device__ __forceinline__ void gated_forward(const bf16* z, bf16* h, u32 runs, u32 f) {
    u32 run = blockIdx.x * THREADS + threadIdx.x, runs_a_row = f / WIDTH;
    if (run >= runs) return;
    const bf16* first = z + u64(run / runs_a_row) * 2 * f + run % runs_a_row * WIDTH;
    pdl_wait();
    Run<WIDTH> a = load<WIDTH>(first), b = load<WIDTH>(first + f);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) a.at[i] = A::at(a.at[i]).value * b.at[i];
    store(h + u64(run) * WIDTH, a);
}

template <class A, int WIDTH>
__device__ __forceinline__ void gated_backward(const bf16* dh, const bf16* z, bf16* dz, u32 runs,
                                               u32 f) {
    u32 run = blockIdx.x * THREADS + threadIdx.x, runs_a_row = f / WIDTH;
    if (run >= runs) return;
    u64 at = u64(run / runs_a_row) * 2 * f + run % runs_a_row * WIDTH;
    pdl_wait();
    Run<WIDTH> d = load<WIDTH>(dh + u64(run) * WIDTH), a = load<WIDTH>(z + at),
               b = load<WIDTH>(z + at + f);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        Activated activated = A::at(a.at[i]);
        a.at[i] = d.at[i] * b.at[i] * activated.slope;
        b.at[i] = d.at[i] * activated.value;
    }
    store(dz + at, a);
    store(dz + at + f, b);
}

#define GATED(forward, backward, A)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        forward(const bf16* z, bf16* h, u32 runs, u32 f, u32 width) {                              \
        width == 8 ? gated_forward<A, 8>(z, h, runs, f) : gated_forward<A, 1>(z, h, runs, f);      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        backward(const bf16* dh, const bf16* z, bf16* dz, u32 runs, u32 f, u32 width) {            \
        width == 8 ? gated_backward<A, 8>(dh, z, dz, runs, f)                                      \
                   : gated_backward<A, 1>(dh, z, dz, runs, f);                                     \
    }
GATED(geglu_forward, geglu_backward, Gelu)
GATED(swiglu_forward, swiglu_backward, Silu)
