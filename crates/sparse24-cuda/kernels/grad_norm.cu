// square_sums: sums[chunk] = sum of g^2 over a chunk
// norm_of_sums: the square root of their sum, and the flag unless it is up
// in   table Parameter [tensors]; chunks Chunk [count], one block of square_sums each
// out  sums f64 [count], overwritten; health: grad_norm overwritten, flag raised to the first
//      tensor with a gradient that is not finite
// pre  g 16-byte aligned; norm_of_sums: one block of 1024 threads; outputs alias nothing
// acc  f64, squares exact, fixed order: bitwise repeatable; no finite gradient overflows
// ref  sparse24_cpu::optimizer::squared_norm, within the bounds of the conformance suite
#include "pdl.cuh"
#include "parameters.cuh"

__device__ __forceinline__ double warp_sum(double x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// The sum over a block of whole warps, valid in the first warp.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double warps[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    return threadIdx.x < 32 ? warp_sum(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0.0)
                            : 0.0;
}

__device__ __forceinline__ double square(float g, double sum) {
    return fma(double(g), double(g), sum);
}

extern "C" __global__ void __launch_bounds__(256)
    square_sums(const Parameter* table, const Chunk* chunks, double* sums) {
    pdl_wait();
    Chunk chunk = chunks[blockIdx.x];
    const float* g = table[chunk.tensor].g + u64(chunk.part) * CHUNK;
    u32 length = u32(min(table[chunk.tensor].length - u64(chunk.part) * CHUNK, u64(CHUNK)));
    double sum = 0.0;
#pragma unroll
    for (u32 k = 0; k < CHUNK / 4 / CHUNK_THREADS; ++k) {
        u32 at = 4 * (k * CHUNK_THREADS + threadIdx.x);
        if (at + 4 <= length) {
            float4 x = *reinterpret_cast<const float4*>(g + at);
            sum = square(x.w, square(x.z, square(x.y, square(x.x, sum))));
        }
    }
    u32 rest = length / 4 * 4 + threadIdx.x;
    if (rest < length) sum = square(g[rest], sum);
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(1024)
    norm_of_sums(const Chunk* chunks, const double* sums, Health* health, u32 count) {
    __shared__ u32 first;
    pdl_wait();
    if (threadIdx.x == 0) first = count;
    __syncthreads();
    double sum = 0.0;
    u32 bad = count;
    for (u32 i = threadIdx.x; i < count; i += 1024) {
        double of = sums[i];
        sum += of;
        if (!isfinite(of)) bad = min(bad, i);
    }
    if (bad < count) atomicMin(&first, bad);
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    float norm = float(sqrt(sum));
    health->grad_norm = norm;
    if (health->flag == 0 && !isfinite(norm))
        health->flag = first < count ? chunks[first].tensor + 1 : NORM;
}
