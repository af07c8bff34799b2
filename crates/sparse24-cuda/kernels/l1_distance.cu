// l1_distance: sums[block] = a part of sum |a - b|
// in   a, b f32 [length]
// out  sums f64 [blocks], overwritten
// pre  one block of 256 threads for each sum; outputs alias nothing
// acc  f64, differences exact to 2^-53, fixed order: bitwise repeatable
// ref  sparse24_cpu::optimizer::l1_distance, within the bounds of the conformance suite
#include "pdl.cuh"
#include "scalar.cuh"

extern "C" __global__ void __launch_bounds__(256)
    l1_distance(const float* a, const float* b, double* sums, u64 length) {
    __shared__ double parts[256];
    double sum = 0.0;
    pdl_wait();
    for (u64 i = u64(blockIdx.x) * 256 + threadIdx.x; i < length; i += u64(gridDim.x) * 256)
        sum += fabs(double(a[i]) - double(b[i]));
    parts[threadIdx.x] = sum;
    for (u32 width = 128; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}
