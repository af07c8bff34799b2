// GEGLU of a transposed Z, as products that write transposes leave it, for benchmarks:
// transposed_geglu_forward: threads in the order of memory
// strided_geglu_forward: threads in the order of the rows of H, `p` elements apart
// in   z bf16 [2f,p]: the halves a, b of Z, transposed
// out  h bf16 [f,p], overwritten, never read: GELU(a) * b
// pre  16-byte aligned; f*p < 2^32; transposed: f*p a multiple of 8; h aliases nothing
// acc  f32
// ref  sparse24_cpu::activation, within two roundings to bf16
#include "activation.cuh"
#include "packed.cuh"

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    transposed_geglu_forward(const bf16* z, bf16* h, u32 p, u32 f) {
    u64 at = (u64(blockIdx.x) * THREADS + threadIdx.x) * 8, elements = u64(p) * f;
    if (at >= elements) return;
    Run<8> a = load<8>(z + at), b = load<8>(z + elements + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) a.at[i] = Gelu::at(a.at[i]).value * b.at[i];
    store(h + at, a);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    strided_geglu_forward(const bf16* z, bf16* h, u32 p, u32 f) {
    u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, elements = u64(p) * f;
    if (thread >= elements) return;
    u64 at = thread % f * p + thread / f;
    h[at] = narrow(Gelu::at(widen(z[at])).value * widen(z[elements + at]));
}
