// norm_forward: residual = x + delta; y = (residual - mean) * rstd * gamma + beta, a row
// norm_backward: dresidual += rstd * (g - mean(g) - n * mean(g * n)), with n = (residual - mean) * rstd and g = dy * gamma;
//                partial = each block's column sums of dy * n, then of dy
// norm_parameters: dgamma, dbeta = the sums over blocks, in order
// in   x, delta, dy bf16 [rows, 4 quads]; gamma, beta f32 [4 quads]; a null delta or beta is zero
// out  residual, y bf16, overwritten (residual may be x); stats f32 [rows, 2] mean and rstd, overwritten; dresidual bf16 in place;
//      partial f32 [blocks, 8 quads], overwritten; dgamma, dbeta f32 [4 quads], overwritten or accumulated; a null dbeta is not wanted
// pre  quads <= 256 (forward) or 128 (backward) for each of the warps in the kernel's name; activations 8-byte, the others 16-byte aligned
// acc  f32, two passes over the residual as rounded to bf16; fixed order
// ref  sparse24_cpu::norm; bounds: tolerance::{norm_y, norm_dresidual, norm_parameter}
#include "scalar.cuh"

constexpr float EPSILON = 1e-5f;

// Four consecutive elements.
struct Quad { float at[4]; };
__device__ __forceinline__ Quad widen(uint2 x) { return {widen_low(x.x), widen_high(x.x), widen_low(x.y), widen_high(x.y)}; }
__device__ __forceinline__ Quad widen(float4 x) { return {x.x, x.y, x.z, x.w}; }
__device__ __forceinline__ uint2 narrow(Quad x) { return make_uint2(narrow_pair(x.at[0], x.at[1]), narrow_pair(x.at[2], x.at[3])); }
__device__ __forceinline__ float4 whole(Quad x) { return make_float4(x.at[0], x.at[1], x.at[2], x.at[3]); }

// Sums over the WARPS warps of one row, the same bits in each; `slots` are the row's, and free again after the next barrier of its warps.
template <int WARPS, int N> __device__ __forceinline__ void row_sums(float (&sums)[N], float (*slots)[N], u32 row) {
#pragma unroll
    for (int n = 0; n < N; ++n) sums[n] = warp_sum(sums[n]);
    if constexpr (WARPS > 1) {
        u32 warp = threadIdx.x / 32 % WARPS;
        if (threadIdx.x % 32 == 0)
            for (int n = 0; n < N; ++n) slots[warp][n] = sums[n];
        // Barrier 0 is the block's.
        asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "n"(32 * WARPS) : "memory");
#pragma unroll
        for (int n = 0; n < N; ++n) {
            sums[n] = slots[0][n];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) sums[n] += slots[w][n];
        }
    }
}

template <int WARPS>
__device__ __forceinline__ void forward(const uint2* x, const uint2* delta, const float4* __restrict__ gamma, const float4* __restrict__ beta, uint2* residual,
                                        uint2* y, float2* stats, u64 rows, u32 quads) {
    constexpr int THREADS = 32 * WARPS, QUADS = 8;
    __shared__ float slots[2][8][1];
    u32 place = threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
    u64 row = u64(blockIdx.x) * (256 / THREADS) + place, start = row * quads;
    if (row >= rows) return;
    uint2 raw[QUADS], added[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        u32 quad = i * THREADS + lane;
        raw[i] = quad < quads ? x[start + quad] : make_uint2(0, 0);
        added[i] = delta && quad < quads ? delta[start + quad] : make_uint2(0, 0);
    }
    float sum[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        u32 quad = i * THREADS + lane;
        if (delta) {
            Quad a = widen(raw[i]), b = widen(added[i]);
#pragma unroll
            for (int e = 0; e < 4; ++e) a.at[e] += b.at[e];
            raw[i] = narrow(a);
        }
        if (quad < quads && (delta || residual != x)) residual[start + quad] = raw[i];
        Quad a = widen(raw[i]);
        sum[0] += (a.at[0] + a.at[1]) + (a.at[2] + a.at[3]);
    }
    row_sums<WARPS>(sum, &slots[0][place * WARPS], place);
    float mean = sum[0] / float(4 * quads);
    sum[0] = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        if (i * THREADS + lane >= quads) continue;
        Quad a = widen(raw[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[0] += (a.at[e] - mean) * (a.at[e] - mean);
    }
    row_sums<WARPS>(sum, &slots[1][place * WARPS], place);
    float rstd = 1.0f / sqrtf(sum[0] / float(4 * quads) + EPSILON);
    if (lane == 0) stats[row] = make_float2(mean, rstd);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        u32 quad = i * THREADS + lane;
        if (quad >= quads) continue;
        Quad a = widen(raw[i]), scale = widen(gamma[quad]), shift = beta ? widen(beta[quad]) : Quad{};
#pragma unroll
        for (int e = 0; e < 4; ++e) a.at[e] = (a.at[e] - mean) * rstd * scale.at[e] + shift.at[e];
        y[start + quad] = narrow(a);
    }
}

// Rows whose quads a thread has loaded.
template <int QUADS> struct Rows { uint2 dy[QUADS], residual[QUADS], dresidual[QUADS]; float2 stats; };

template <int WARPS>
__device__ __forceinline__ void backward(const uint2* __restrict__ dy, const uint2* __restrict__ residual, const float2* __restrict__ stats,
                                         const float4* __restrict__ gamma, uint2* dresidual, float4* partial, u64 rows, u32 quads) {
    constexpr int THREADS = 32 * WARPS, QUADS = 4, GROUPS = 16 / WARPS;
    __shared__ float slots[2][16][2];
    __shared__ float4 sums[GROUPS > 1 ? 2 : 1][GROUPS > 1 ? QUADS * THREADS : 1];
    u32 group = threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
    Quad scale[QUADS] = {}, dgamma[QUADS] = {}, dbeta[QUADS] = {};
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
        if (i * THREADS + lane < quads) scale[i] = widen(gamma[i * THREADS + lane]);
    auto load = [&](u64 row) {
        Rows<QUADS> to = {};
        if (row >= rows) return to;
        to.stats = stats[row];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            u32 quad = i * THREADS + lane;
            if (quad >= quads) continue;
            u64 at = row * quads + quad;
            to.dy[i] = dy[at], to.residual[i] = residual[at], to.dresidual[i] = dresidual[at];
        }
        return to;
    };
    u64 row = u64(blockIdx.x) * GROUPS + group;
    Rows<QUADS> next = load(row);
    for (u32 turn = 0; row < rows; turn ^= 1) {
        Rows<QUADS> now = next;
        u64 start = row * quads;
        row += u64(gridDim.x) * GROUPS;
        // The next row is under way while this one is worked on.
        next = load(row);
        float mean = now.stats.x, rstd = now.stats.y, means[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            Quad d = widen(now.dy[i]), x = widen(now.residual[i]);
            if (i * THREADS + lane >= quads) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float n = (x.at[e] - mean) * rstd, g = d.at[e] * scale[i].at[e];
                means[0] += g, means[1] += g * n;
                dgamma[i].at[e] += d.at[e] * n, dbeta[i].at[e] += d.at[e];
            }
        }
        row_sums<WARPS>(means, &slots[turn][group * WARPS], group);
        float mean_g = means[0] / float(4 * quads), mean_gn = means[1] / float(4 * quads);
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            u32 quad = i * THREADS + lane;
            if (quad >= quads) continue;
            Quad d = widen(now.dy[i]), x = widen(now.residual[i]), out = widen(now.dresidual[i]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float n = (x.at[e] - mean) * rstd, g = d.at[e] * scale[i].at[e];
                out.at[e] += rstd * (g - mean_g - n * mean_gn);
            }
            dresidual[start + quad] = narrow(out);
        }
    }
    for (u32 turn = 0; turn < GROUPS; ++turn) {
        if (group == turn) {
#pragma unroll
            for (int i = 0; i < QUADS; ++i) {
                u32 quad = i * THREADS + lane;
                if (quad >= quads) continue;
                if (GROUPS > 1 && turn > 0) {
                    Quad a = widen(sums[0][quad]), b = widen(sums[GROUPS > 1][quad]);
#pragma unroll
                    for (int e = 0; e < 4; ++e) dgamma[i].at[e] += a.at[e], dbeta[i].at[e] += b.at[e];
                }
                bool last = turn == GROUPS - 1;
                float4* to = partial + u64(blockIdx.x) * 2 * quads;
                (last ? to : sums[0])[quad] = whole(dgamma[i]);
                (last ? to + quads : sums[GROUPS > 1])[quad] = whole(dbeta[i]);
            }
        }
        if (GROUPS > 1) __syncthreads();
    }
}

#define FORWARD(name, warps)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 4)                                                                                   \
        name(const uint2* x, const uint2* delta, const float4* gamma, const float4* beta, uint2* residual, uint2* y, float2* stats, u64 rows, \
             u32 quads) {                                                                                                                  \
        forward<warps>(x, delta, gamma, beta, residual, y, stats, rows, quads);                                                            \
    }
FORWARD(norm_forward_1, 1)
FORWARD(norm_forward_2, 2)
FORWARD(norm_forward_4, 4)
FORWARD(norm_forward_8, 8)

#define BACKWARD(name, warps)                                                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                                                                      \
        name(const uint2* dy, const uint2* residual, const float2* stats, const float4* gamma, uint2* dresidual, float4* partial, u64 rows, \
             u32 quads) {                                                                                                                  \
        backward<warps>(dy, residual, stats, gamma, dresidual, partial, rows, quads);                                                      \
    }
BACKWARD(norm_backward_1, 1)
BACKWARD(norm_backward_2, 2)
BACKWARD(norm_backward_4, 4)
BACKWARD(norm_backward_8, 8)
BACKWARD(norm_backward_16, 16)

// A block has 32 columns of [dgamma, dbeta]; warp w sums the blocks w, w + 8, ...
extern "C" __global__ void __launch_bounds__(256)
    norm_parameters(const float* __restrict__ partial, float* dgamma, float* dbeta, u32 blocks, u32 columns, u32 accumulate) {
    __shared__ float sums[8][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < 2 * columns)
        for (u32 block = warp; block < blocks; block += 8) sum += partial[u64(block) * 2 * columns + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= 2 * columns) return;
    for (int w = 1; w < 8; ++w) sum += sums[w][lane];
    float* to = column < columns ? dgamma + column : dbeta ? dbeta + (column - columns) : nullptr;
    if (to) *to = accumulate ? *to + sum : sum;
}
