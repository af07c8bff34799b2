// spmm24_mma: D[m,n] = decode(A)[m,k] * B[k,n], with the sparse mma.sp that every supported GPU has
//   spmm24_mma_transposed  B given as rows of k, D as rows of m: bf16, D^T = (A B)^T + bias
//   spmm24_mma_straight    B given as rows of n, D as rows of n: f32, overwritten or added to
// in   A: values bf16, FragmentMajor; metadata u32, LaneMajor; m/64 x k/64 blocks. B bf16: [n,k],
//      or [k_rows,n] followed by zeros. bias f32 [m] or null
// out  D bf16 [n,m], or f32 [m,n]
// pre  m, n and k multiples of 4 (n of transposed: any); rows of A 16-byte, of B and D 8-byte
//      aligned; D aliases nothing
// acc  f32, ascending k: bitwise repeatable for one build and device
// ref  sparse24_cpu::spmm24; bound: tests/gpu/spmm24.rs
#include "scalar.cuh"

constexpr u32 SIDE = 64, THREADS = 128;
// Bytes from row to row of a square in shared memory, so that eight rows start in different banks.
constexpr u32 PITCH = 2 * SIDE + 16;

template <u32 STEP>
__device__ __forceinline__ void mma_sp(float (&d)[4], uint4 a, const u32 (&b)[4], u32 metadata) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, "
        "%3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "{%0, %1, %2, %3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata), "n"(STEP));
}

// Loads the square of B at k0, n0 as rows of k, with zeros out of bounds. A piece is four
// contiguous elements: along k, or along n.
__device__ __forceinline__ void load_transposed(char* square, const char* b, u64 stride, u32 n0,
                                                u32 k0, u32 n, u32 k) {
    for (u32 i = threadIdx.x; i < SIDE * SIDE / 4; i += THREADS) {
        u32 row = i / (SIDE / 4), column = i % (SIDE / 4) * 4;
        uint2 piece = make_uint2(0, 0);
        if (n0 + row < n && k0 + column < k)
            piece = *reinterpret_cast<const uint2*>(b + ((n0 + row) * stride + k0 + column) * 2);
        *reinterpret_cast<uint2*>(square + row * PITCH + column * 2) = piece;
    }
}
__device__ __forceinline__ void load_straight(char* square, const char* b, u64 stride, u32 n0,
                                              u32 k0, u32 n, u32 k_rows) {
    for (u32 i = threadIdx.x; i < SIDE * SIDE / 4; i += THREADS) {
        u32 row = i / (SIDE / 4), column = i % (SIDE / 4) * 4;
        uint2 piece = make_uint2(0, 0);
        if (k0 + row < k_rows && n0 + column < n)
            piece = *reinterpret_cast<const uint2*>(b + ((k0 + row) * stride + n0 + column) * 2);
        u16* to = reinterpret_cast<u16*>(square + column * PITCH + row * 2);
        to[0] = u16(piece.x), to[PITCH / 2] = u16(piece.x >> 16), to[PITCH] = u16(piece.y),
        to[3 * (PITCH / 2)] = u16(piece.y >> 16);
    }
}

// The warp's 16 rows of the block's 64x64 elements of D.
template <typename Load>
__device__ __forceinline__ void multiply(float (&d)[SIDE / 8][4], char* square, const uint4* values,
                                         const u32* metadata, u32 k_blocks, Load load) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 k = 0; k < k_blocks; ++k) {
        __syncthreads();
        load(k * SIDE);
        __syncthreads();
        u64 slab = (u64(blockIdx.y) * k_blocks + k) * 4 + warp;
        u32 e = metadata[slab * 32 + lane];
        for (u32 step = 0; step < 2; ++step) {
            uint4 a = values[(slab * 2 + step) * 32 + lane];
#pragma unroll
            for (u32 j = 0; j < SIDE / 8; ++j) {
                const u32* from =
                    reinterpret_cast<const u32*>(square + (8 * j + lane / 4) * PITCH + step * 64) +
                    lane % 4;
                u32 b[4] = {from[0], from[4], from[8], from[12]};
                if (step == 0)
                    mma_sp<0>(d[j], a, b, e);
                else
                    mma_sp<1>(d[j], a, b, e);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    spmm24_mma_transposed(const char* __restrict__ b, u64 b_stride,
                          const uint4* __restrict__ values, const u32* __restrict__ metadata,
                          const float* __restrict__ bias, char* d, u64 d_stride, u32 m, u32 n,
                          u32 k) {
    __shared__ __align__(16) char square[SIDE * PITCH];
    u32 n0 = blockIdx.x * SIDE, m0 = blockIdx.y * SIDE, lane = threadIdx.x % 32,
        row = threadIdx.x / 32 * 16 + lane / 4;
    float sum[SIDE / 8][4] = {};
    multiply(sum, square, values, metadata, (k + SIDE - 1) / SIDE,
             [&](u32 k0) { load_transposed(square, b, b_stride, n0, k0, n, k); });
    __syncthreads();
    float low = bias && m0 + row < m ? bias[m0 + row] : 0.0f,
          high = bias && m0 + row + 8 < m ? bias[m0 + row + 8] : 0.0f;
#pragma unroll
    for (u32 j = 0; j < SIDE / 8; ++j) {
        u16* to = reinterpret_cast<u16*>(square + (8 * j + 2 * (lane % 4)) * PITCH) + row;
        to[0] = narrow(sum[j][0] + low).bits, to[PITCH / 2] = narrow(sum[j][1] + low).bits;
        to[8] = narrow(sum[j][2] + high).bits, to[PITCH / 2 + 8] = narrow(sum[j][3] + high).bits;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < SIDE * SIDE / 4; i += THREADS) {
        u32 token = i / (SIDE / 4), feature = i % (SIDE / 4) * 4;
        if (n0 + token >= n || m0 + feature >= m) continue;
        *reinterpret_cast<uint2*>(d + ((n0 + token) * d_stride + m0 + feature) * 2) =
            *reinterpret_cast<const uint2*>(square + token * PITCH + feature * 2);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    spmm24_mma_straight(const char* __restrict__ b, u64 b_stride, const uint4* __restrict__ values,
                        const u32* __restrict__ metadata, float* d, u64 d_stride, u32 accumulate,
                        u32 m, u32 n, u32 k, u32 k_rows) {
    __shared__ __align__(16) char square[SIDE * PITCH];
    u32 n0 = blockIdx.x * SIDE, m0 = blockIdx.y * SIDE, lane = threadIdx.x % 32,
        row = threadIdx.x / 32 * 16 + lane / 4;
    float sum[SIDE / 8][4] = {};
    multiply(sum, square, values, metadata, (k + SIDE - 1) / SIDE,
             [&](u32 k0) { load_straight(square, b, b_stride, n0, k0, n, k_rows); });
#pragma unroll
    for (u32 j = 0; j < SIDE / 8; ++j) {
        for (u32 h = 0; h < 2; ++h) {
            u32 r = m0 + row + 8 * h, c = n0 + 8 * j + 2 * (lane % 4);
            if (r >= m || c >= n) continue;
            float2* to = reinterpret_cast<float2*>(d + r * d_stride + c);
            float2 x = make_float2(sum[j][2 * h], sum[j][2 * h + 1]);
            if (accumulate) x = make_float2(to->x + x.x, to->y + x.y);
            *to = x;
        }
    }
}
