// The product D[m,n] = A[m,k] * B[k,n] by the loop of spmm24_mma.cu with a dense A, for benchmarks
//   mma_peer_transposed  A and B given as rows of k, D as rows of m: bf16, D^T = (A B)^T
//   mma_peer_straight    A given as rows of m, B as rows of n, D as rows of n: f32, overwritten
// in   a, b bf16
// out  d bf16 [n,m], or f32 [m,n]
// pre  whole = rows * across, parts = 1 (a constant instead makes the compiler spill); k a
//      multiple of 64; m and n of 8; rows 16-byte aligned; d aliases nothing
// acc  f32, ascending k
// ref  f64 sums of sampled elements
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(256, 1)
    mma_peer_transposed(const char* a, u64 a_stride, const char* b, u64 b_stride, char* d,
                        u64 d_stride, u32 m, u32 n, u32 k, u32 rows, u32 across, u32 sweep,
                        u32 whole, u32 parts) {
    product_transposed<Mma<Form::Transposed, true, 4, 2, 4, 8, 4>>(
        {a, 2 * a_stride, m, k}, {b, 2 * b_stride, n, k}, nullptr, nullptr, nullptr, nullptr, d,
        d_stride, {m, n, k / BLOCK, rows, across, sweep, whole, parts});
}
extern "C" __global__ void __launch_bounds__(256, 1)
    mma_peer_straight(const char* a, u64 a_stride, const char* b, u64 b_stride, float* d,
                      u64 d_stride, u32 m, u32 n, u32 k, u32 rows, u32 across, u32 sweep,
                      u32 whole, u32 parts) {
    product_straight<Mma<Form::Straight, true, 4, 2, 4, 8, 4>>(
        {a, 2 * a_stride, k, m}, {b, 2 * b_stride, k, n}, nullptr, nullptr, nullptr,
        {d, d_stride, 0}, {m, n, k / BLOCK, rows, across, sweep, whole, parts});
}
