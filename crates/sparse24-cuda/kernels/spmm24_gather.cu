// spmm24_gather: the sums of the parts of split-K tiles
//   spmm24_gather_transposed  D^T = (A B)^T + bias, bf16; *_gelu and *_relu also H = act(D^T), of
//                             the rounded D^T
//   spmm24_gather             D = A B, f32, overwritten or added to
// in   partial f32, one fragment of 64 rows after the other; bias f32 [m] or null
// out  D bf16 [n,m], or f32 [m,n]; H bf16 [n,m]
// pre  m of transposed and n of straight multiples of 4; rows of D and H 8-byte aligned
// acc  f32, ascending parts: bitwise repeatable
// ref  sparse24_cpu::spmm24; bound: tests/gpu/spmm24.rs
#include "activation.cuh"
#include "spmm24.cuh"

// The parts, and where their sum belongs.
struct Sum {
    const float4* from;  // of the first part
    u64 apart;           // from one part to the next
    u32 row, column;     // of the block of 64 rows, and of its first column
};

__device__ __forceinline__ Sum sum_of(const float4* partial, const Work& work, u32 parts,
                                      u32 blocks, u32 columns, u32 index) {
    u32 block = index % blocks, tile = index / blocks, lines = columns / 8 * 128;
    Unit unit = unit_of(work, work.whole + tile);
    return {partial + (u64(tile) * parts * blocks + block) * lines, u64(blocks) * lines,
            (unit.row * blocks + block) * BLOCK, unit.column * columns};
}

// A thread block sums 64 rows and 32 columns.
extern "C" __global__ void __launch_bounds__(128, 8)
    spmm24_gather(const float4* __restrict__ partial, float* d, u64 d_stride, u32 accumulate, u32 m,
                  u32 n, u32 rows, u32 across, u32 sweep, u32 whole, u32 parts, u32 blocks,
                  u32 columns) {
    Sum sum = sum_of(partial, {m, n, 0, rows, across, sweep, whole, 1}, parts, blocks, columns,
                     blockIdx.y);
    if (sum.row >= m) return;
    u32 lane = threadIdx.x % 32, row = sum.row + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 j = 4 * blockIdx.x + i;
        float4 x = make_float4(0, 0, 0, 0);
        for (u32 part = 0; part < parts; ++part)
            x = add(x, sum.from[part * sum.apart + j * 128 + threadIdx.x]);
        u32 column = sum.column + 8 * j + 2 * (lane % 4);
        for (u32 h = 0; h < 2; ++h) {
            if (row + 8 * h >= m || column >= n) continue;
            float2* to = reinterpret_cast<float2*>(d + (row + 8 * h) * d_stride + column);
            float2 out = h ? make_float2(x.z, x.w) : make_float2(x.x, x.y);
            if (accumulate) out = make_float2(to->x + out.x, to->y + out.y);
            *to = out;
        }
    }
}
template <class A>
__device__ __forceinline__ void gather_transposed(const float4* __restrict__ partial,
                                                  const float* __restrict__ bias, Target d,
                                                  Target h, const Work& work, u32 parts, u32 blocks,
                                                  u32 columns) {
    constexpr u32 COLUMNS = 32, PITCH = 2 * BLOCK + 16;
    __shared__ __align__(16) char turned[COLUMNS * PITCH];
    Sum sum = sum_of(partial, work, parts, blocks, columns, blockIdx.y);
    u32 m = work.m, n = work.n;
    if (sum.row >= m) return;
    u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4,
        first = blockIdx.x * COLUMNS;
    float low = bias && sum.row + row < m ? bias[sum.row + row] : 0.0f,
          high = bias && sum.row + row + 8 < m ? bias[sum.row + row + 8] : 0.0f;
#pragma unroll
    for (u32 j = 0; j < COLUMNS / 8; ++j) {
        float4 x = make_float4(0, 0, 0, 0);
        for (u32 part = 0; part < parts; ++part)
            x = add(x, sum.from[part * sum.apart + (first / 8 + j) * 128 + threadIdx.x]);
        u16* to = reinterpret_cast<u16*>(turned + (8 * j + 2 * (lane % 4)) * PITCH) + row;
        to[0] = narrow(x.x + low).bits, to[PITCH / 2] = narrow(x.y + low).bits;
        to[8] = narrow(x.z + high).bits, to[PITCH / 2 + 8] = narrow(x.w + high).bits;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < COLUMNS * BLOCK / 4; i += 128) {
        u32 token = i / (BLOCK / 4), feature = i % (BLOCK / 4) * 4;
        if (sum.column + first + token >= n || sum.row + feature >= m) continue;
        auto to = [&](Target rows) {
            u64 row = sum.column + first + token;
            return reinterpret_cast<uint2*>(rows.at + (row * rows.stride + sum.row + feature) * 2);
        };
        uint2 four = *reinterpret_cast<const uint2*>(turned + token * PITCH + feature * 2);
        *to(d) = four;
        if constexpr (!is_none<A>)
            *to(h) = make_uint2(activated<A>(four.x), activated<A>(four.y));
    }
}

extern "C" __global__ void __launch_bounds__(128)
    spmm24_gather_transposed(const float4* __restrict__ partial, const float* __restrict__ bias,
                             char* d, u64 d_stride, u32 m, u32 n, u32 rows, u32 across, u32 sweep,
                             u32 whole, u32 parts, u32 blocks, u32 columns) {
    gather_transposed<None>(partial, bias, {d, d_stride}, {},
                            {m, n, 0, rows, across, sweep, whole, 1}, parts, blocks, columns);
}

#define ACTIVATED(name, A)                                                                         \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        name(const float4* __restrict__ partial, const float* __restrict__ bias, char* d,          \
             u64 d_stride, char* h, u64 h_stride, u32 m, u32 n, u32 rows, u32 across, u32 sweep,   \
             u32 whole, u32 parts, u32 blocks, u32 columns) {                                      \
        gather_transposed<A>(partial, bias, {d, d_stride}, {h, h_stride},                          \
                             {m, n, 0, rows, across, sweep, whole, 1}, parts, blocks, columns);    \
    }
ACTIVATED(spmm24_gather_transposed_gelu, Gelu)
ACTIVATED(spmm24_gather_transposed_relu, Relu)
