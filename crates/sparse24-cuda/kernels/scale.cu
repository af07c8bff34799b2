// scale: out = s * x
// scale_grad: ds = the sum of x * dout, or ds += it
// in   x, dout f32 [elements]; s f32 [1]
// out  out f32 [elements], overwritten; ds f32 [1]
// pre  scale: blocks of 256 elements; scale_grad: one block of 1024 threads; outputs alias nothing
// acc  scale: rounded once; scale_grad: f64, products exact, fixed order, rounded once
// ref  sparse24_cpu::scale; scale_grad within the bounds of the conformance suite
#include "pdl.cuh"
#include "scalar.cuh"

extern "C" __global__ void __launch_bounds__(256)
    scale(const float* x, const float* s, float* out, u64 elements) {
    u64 at = u64(blockIdx.x) * 256 + threadIdx.x;
    pdl_wait();
    if (at < elements) out[at] = *s * x[at];
}

extern "C" __global__ void __launch_bounds__(1024)
    scale_grad(const float* x, const float* dout, float* ds, u64 elements, u32 accumulate) {
    __shared__ double parts[1024];
    double sum = 0.0;
    pdl_wait();
    for (u64 at = threadIdx.x; at < elements; at += 1024)
        sum += double(x[at]) * double(dout[at]);
    parts[threadIdx.x] = sum;
    for (u32 width = 512; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
    }
    if (threadIdx.x == 0) *ds = accumulate ? *ds + float(parts[0]) : float(parts[0]);
}
