// spmm24_mma: D[m,n] = decode(A)[m,k] * B[k,n], with the sparse mma.sp that every supported GPU has
//   spmm24_mma_transposed_*  B given as rows of k, D as rows of m: bf16, D^T = (A B)^T + bias
//   spmm24_mma_straight_*    B given as rows of n, D as rows of n: f32, overwritten or added to
// in   A: values bf16, FragmentMajor; metadata u32, LaneMajor; m/64 x k/64 blocks. B bf16: [n,k],
//      or [k_rows,n] followed by zeros. bias f32 [m] or null
// out  D bf16 [n,m], or f32 [m,n]; partial f32, one fragment of 64 rows after the other
// pre  m of transposed and n of straight multiples of 4; rows 16-byte aligned, and those of B
//      readable up to a multiple of 16 bytes; D and partial alias nothing
// acc  f32, ascending k, parts in fixed order: bitwise repeatable for one plan, build and device
// ref  sparse24_cpu::spmm24; bound: tests/gpu/spmm24.rs
#include "mma.cuh"

// Rows of warps and columns of warps in a block; a warp has `slabs` of 16 rows and `tiles` of eight
// columns.
#define TRANSPOSED(name, warp_rows, warp_columns, slabs, tiles, stages)                            \
    extern "C" __global__ void __launch_bounds__(32 * warp_rows * warp_columns, 1)                 \
        name(const char* b, u64 b_stride, const char* values, const char* metadata,                \
             const float* bias, float4* partial, char* d, u64 d_stride, u32 k, u32 m, u32 n,       \
             u32 k_blocks, u32 rows, u32 across, u32 sweep, u32 whole, u32 parts) {                \
        product_transposed<                                                                        \
            Mma<Form::Transposed, false, warp_rows, warp_columns, slabs, tiles, stages>>(          \
            {}, {b, 2 * b_stride, n, k}, values, metadata, bias, partial, d, d_stride,             \
            {m, n, k_blocks, rows, across, sweep, whole, parts});                                  \
    }
#define STRAIGHT(name, warp_rows, warp_columns, slabs, tiles, stages)                              \
    extern "C" __global__ void __launch_bounds__(32 * warp_rows * warp_columns, 1)                 \
        name(const char* b, u64 b_stride, const char* values, const char* metadata,                \
             float4* partial, float* d, u64 d_stride, u32 accumulate, u32 k_rows, u32 m, u32 n,    \
             u32 k_blocks, u32 rows, u32 across, u32 sweep, u32 whole, u32 parts) {                \
        product_straight<                                                                          \
            Mma<Form::Straight, false, warp_rows, warp_columns, slabs, tiles, stages>>(            \
            {}, {b, 2 * b_stride, k_rows, n}, values, metadata, partial,                           \
            {d, d_stride, accumulate}, {m, n, k_blocks, rows, across, sweep, whole, parts});       \
    }
// The last ones fit the 99 KB of shared memory that a block has on some GPUs.
TRANSPOSED(spmm24_mma_transposed_320, 4, 2, 5, 8, 4)
TRANSPOSED(spmm24_mma_transposed_256, 4, 2, 4, 8, 4)
TRANSPOSED(spmm24_mma_transposed_128, 2, 4, 4, 4, 3)
STRAIGHT(spmm24_mma_straight_320, 4, 2, 5, 8, 4)
STRAIGHT(spmm24_mma_straight_256, 4, 2, 4, 8, 4)
STRAIGHT(spmm24_mma_straight_128, 2, 4, 4, 4, 3)
