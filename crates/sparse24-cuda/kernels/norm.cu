// norm_forward: residual = x + delta; y = (residual - mean) * rstd * gamma + beta, by row,
//      with rstd = 1 / sqrt(variance + epsilon)
// norm_backward: with n = (residual - mean) * rstd and g = dy * gamma, dx (+)= rstd * (g - mean(g)
//      - n * mean(g * n)); partial = each block's column sums of dy * n, then of dy
// norm_parameters: dgamma, dbeta (+)= the sums over blocks, in order
// in   x, delta, dy bf16 [rows, 4 vectors]; gamma, beta f32 [4 vectors]; a null delta or beta is
//      zero
// out  residual, y bf16, overwritten (residual may be x); stats f32 [rows, 2] mean and rstd,
//      overwritten; dx bf16, added to, or overwritten and never read (_overwrite); partial f32
//      [blocks, 8 vectors], overwritten; dgamma, dbeta f32 [4 vectors]; a null dbeta is not written
// pre  vectors <= 256 (forward) or 128 (backward) times the warps in the kernel's name; activations
//      8-byte, the others 16-byte aligned; backward: blocks of as many whole rows as 512 threads
//      hold, and 192 bytes of shared memory per thread
// acc  f32, two passes over the residual as rounded to bf16; fixed order
// ref  sparse24_cpu::norm, within the bounds of the conformance suite
#include "pdl.cuh"
#include "scalar.cuh"

// Four consecutive elements.
struct Vector {
    float at[4];
};
__device__ __forceinline__ Vector widen(uint2 x) {
    return {widen_low(x.x), widen_high(x.x), widen_low(x.y), widen_high(x.y)};
}
__device__ __forceinline__ Vector widen(float4 x) { return {x.x, x.y, x.z, x.w}; }
__device__ __forceinline__ uint2 narrow(Vector x) {
    return make_uint2(narrow_pair(x.at[0], x.at[1]), narrow_pair(x.at[2], x.at[3]));
}

// Sums over the WARPS warps of one row, with the same bits in each. `slots` belong to the row, and
// are free again after the next barrier of its warps.
template <int WARPS, int N>
__device__ __forceinline__ void row_sums(float (&sums)[N], float (*slots)[N], u32 row) {
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
__device__ __forceinline__ void forward(const uint2* x, const uint2* delta, const float4* gamma,
                                        const float4* beta, uint2* residual, uint2* y,
                                        float2* stats, u64 rows, u32 vectors, float epsilon) {
    constexpr int THREADS = 32 * WARPS, VECTORS = 8;
    __shared__ float slots[2][8][1];
    u32 place = threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
    u64 row = u64(blockIdx.x) * (256 / THREADS) + place, start = row * vectors;
    if (row < rows && lane == 0) prefetch(x + start, 8 * vectors);
    if (row < rows && lane == 1 && delta) prefetch(delta + start, 8 * vectors);
    pdl_launch_dependents();
    pdl_wait();
    if (row >= rows) return;
    uint2 raw[VECTORS], added[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        u32 vector = i * THREADS + lane;
        raw[i] = vector < vectors ? x[start + vector] : make_uint2(0, 0);
        added[i] = delta && vector < vectors ? delta[start + vector] : make_uint2(0, 0);
    }
    float sum[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        u32 vector = i * THREADS + lane;
        if (delta) {
            Vector a = widen(raw[i]), b = widen(added[i]);
#pragma unroll
            for (int e = 0; e < 4; ++e) a.at[e] += b.at[e];
            raw[i] = narrow(a);
        }
        if (vector < vectors && (delta || residual != x)) residual[start + vector] = raw[i];
        Vector a = widen(raw[i]);
        sum[0] += (a.at[0] + a.at[1]) + (a.at[2] + a.at[3]);
    }
    row_sums<WARPS>(sum, &slots[0][place * WARPS], place);
    float mean = sum[0] / float(4 * vectors);
    sum[0] = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (i * THREADS + lane >= vectors) continue;
        Vector a = widen(raw[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[0] += (a.at[e] - mean) * (a.at[e] - mean);
    }
    row_sums<WARPS>(sum, &slots[1][place * WARPS], place);
    float rstd = 1.0f / sqrtf(sum[0] / float(4 * vectors) + epsilon);
    if (lane == 0) stats[row] = make_float2(mean, rstd);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        u32 vector = i * THREADS + lane;
        if (vector >= vectors) continue;
        Vector a = widen(raw[i]), scale = widen(gamma[vector]),
               shift = beta ? widen(beta[vector]) : Vector{};
#pragma unroll
        for (int e = 0; e < 4; ++e) a.at[e] = (a.at[e] - mean) * rstd * scale.at[e] + shift.at[e];
        y[start + vector] = narrow(a);
    }
}

// A thread copies what it alone will read, rows ahead, so no barrier is needed.
__device__ __forceinline__ void copy_async(uint2* to, const uint2* from) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(u32(__cvta_generic_to_shared(to))),
        "l"(from)
        : "memory");
}

enum class Dx { Add, Overwrite };

template <int WARPS, Dx DX>
__device__ __forceinline__ void backward(const uint2* dy, const uint2* residual,
                                         const float2* stats, const float4* gamma, uint2* dresidual,
                                         float4* partial, u64 rows, u32 vectors) {
    constexpr int THREADS = 32 * WARPS, VECTORS = 4, TEAMS = 16 / WARPS, BLOCK = TEAMS * THREADS;
    __shared__ float slots[2][16][2];
    // [2][VECTORS][3][BLOCK] for rows; at the end [VECTORS][dgamma, dbeta][2 halves][BLOCK] for
    // sums.
    extern __shared__ float4 shared[];
    uint2* staged = reinterpret_cast<uint2*>(shared) + threadIdx.x;
    u32 team = threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
    // The remaining rows at the end are spread over the blocks.
    u64 row = u64(team) * gridDim.x + blockIdx.x, step = u64(gridDim.x) * TEAMS;
    auto slot = [&](u32 stage, int vector, int operand) {
        return staged + ((stage * VECTORS + vector) * 3 + operand) * BLOCK;
    };
    auto copy = [&](u64 row, u32 stage) {
        if (row < rows) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                u64 at = row * vectors + i * THREADS + lane;
                if (i * THREADS + lane >= vectors) continue;
                copy_async(slot(stage, i, 0), dy + at);
                copy_async(slot(stage, i, 1), residual + at);
                if constexpr (DX == Dx::Add) copy_async(slot(stage, i, 2), dresidual + at);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if constexpr (DX == Dx::Add) {
        if (row < rows && lane < 3)
            prefetch((lane == 0   ? dy
                      : lane == 1 ? residual
                                  : dresidual) +
                         row * vectors,
                     8 * vectors);
    } else {
        if (row < rows && lane < 2)
            prefetch((lane == 0 ? dy : residual) + row * vectors, 8 * vectors);
    }
    pdl_launch_dependents();
    pdl_wait();
    copy(row, 0);
    Vector scale[VECTORS] = {}, dgamma[VECTORS] = {}, dbeta[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        if (i * THREADS + lane < vectors) scale[i] = widen(gamma[i * THREADS + lane]);
    float2 next = row < rows ? stats[row] : make_float2(0.0f, 0.0f);
    for (u32 stage = 0; row < rows; stage ^= 1) {
        u64 start = row * vectors;
        row += step;
        copy(row, stage ^ 1);
        float mean = next.x, rstd = next.y, means[2] = {0.0f, 0.0f};
        if (row < rows) next = stats[row];
        // All but the newest have arrived.
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        // Reads past the row's end too: with a branch, each read would be waited for in turn.
        constexpr int OPERANDS = DX == Dx::Add ? 3 : 2;
        uint2 raw[OPERANDS][VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            for (int operand = 0; operand < OPERANDS; ++operand)
                raw[operand][i] = *slot(stage, i, operand);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (i * THREADS + lane >= vectors) continue;
            Vector d = widen(raw[0][i]), x = widen(raw[1][i]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float n = (x.at[e] - mean) * rstd, g = d.at[e] * scale[i].at[e];
                means[0] += g, means[1] += g * n;
                dgamma[i].at[e] += d.at[e] * n, dbeta[i].at[e] += d.at[e];
            }
        }
        row_sums<WARPS>(means, &slots[stage][team * WARPS], team);
        float mean_g = means[0] / float(4 * vectors), mean_gn = means[1] / float(4 * vectors);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            u32 vector = i * THREADS + lane;
            if (vector >= vectors) continue;
            Vector d = widen(raw[0][i]), x = widen(raw[1][i]), out = {};
            if constexpr (DX == Dx::Add) out = widen(raw[2][i]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float n = (x.at[e] - mean) * rstd, g = d.at[e] * scale[i].at[e];
                float slope = rstd * (g - mean_g - n * mean_gn);
                if constexpr (DX == Dx::Add)
                    out.at[e] += slope;
                else
                    out.at[e] = slope;
            }
            dresidual[start + vector] = narrow(out);
        }
    }
    // Reuses the memory of the thread's rows, which no other thread reads before the barrier.
    constexpr int PARTS = 2 * VECTORS;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const Vector& of = part % 2 == 0 ? dgamma[part / 2] : dbeta[part / 2];
        *reinterpret_cast<float2*>(staged + 2 * part * BLOCK) = make_float2(of.at[0], of.at[1]);
        *reinterpret_cast<float2*>(staged + (2 * part + 1) * BLOCK) =
            make_float2(of.at[2], of.at[3]);
    }
    __syncthreads();
    const float2* sums = reinterpret_cast<const float2*>(shared) + lane;
    for (u32 part = team; part < PARTS; part += TEAMS) {
        u32 vector = part / 2 * THREADS + lane;
        if (vector >= vectors) continue;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int g = 0; g < TEAMS; ++g) {
            float2 low = sums[2 * part * BLOCK + g * THREADS],
                   high = sums[(2 * part + 1) * BLOCK + g * THREADS];
            sum.x += low.x, sum.y += low.y, sum.z += high.x, sum.w += high.y;
        }
        partial[u64(blockIdx.x) * 2 * vectors + part % 2 * vectors + vector] = sum;
    }
}

#define FORWARD(name, warps)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 4)                                           \
        name(const uint2* x, const uint2* delta, const float4* gamma, const float4* beta,          \
             uint2* residual, uint2* y, float2* stats, u64 rows, u32 vectors, float epsilon) {     \
        forward<warps>(x, delta, gamma, beta, residual, y, stats, rows, vectors, epsilon);         \
    }
FORWARD(norm_forward_1, 1)
FORWARD(norm_forward_2, 2)
FORWARD(norm_forward_4, 4)
FORWARD(norm_forward_8, 8)

#define BACKWARD(name, warps, dx)                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                              \
        name(const uint2* dy, const uint2* residual, const float2* stats, const float4* gamma,     \
             uint2* dresidual, float4* partial, u64 rows, u32 vectors) {                           \
        backward<warps, dx>(dy, residual, stats, gamma, dresidual, partial, rows, vectors);        \
    }
BACKWARD(norm_backward_1, 1, Dx::Add)
BACKWARD(norm_backward_2, 2, Dx::Add)
BACKWARD(norm_backward_3, 3, Dx::Add)
BACKWARD(norm_backward_4, 4, Dx::Add)
BACKWARD(norm_backward_8, 8, Dx::Add)
BACKWARD(norm_backward_16, 16, Dx::Add)
BACKWARD(norm_backward_1_overwrite, 1, Dx::Overwrite)
BACKWARD(norm_backward_2_overwrite, 2, Dx::Overwrite)
BACKWARD(norm_backward_3_overwrite, 3, Dx::Overwrite)
BACKWARD(norm_backward_4_overwrite, 4, Dx::Overwrite)
BACKWARD(norm_backward_8_overwrite, 8, Dx::Overwrite)
BACKWARD(norm_backward_16_overwrite, 16, Dx::Overwrite)

// A block has 16 columns of [dgamma, dbeta] and 32 slices of the blocks: slice s sums s, s + 32,
// ...; then a warp sums the slices of a column.
extern "C" __global__ void __launch_bounds__(512)
    norm_parameters(const float* partial, float* dgamma, float* dbeta, u32 blocks, u32 columns,
                    u32 accumulate) {
    constexpr u32 COLUMNS = 16, AHEAD = 8;
    __shared__ float sums[32][COLUMNS + 1];
    u32 slice = threadIdx.x / COLUMNS, column = blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    float sum = 0.0f;
    pdl_launch_dependents();
    pdl_wait();
    for (u32 first = slice; first < blocks; first += 32 * AHEAD) {
        float of[AHEAD];
#pragma unroll
        for (u32 a = 0; a < AHEAD; ++a) {
            u32 block = first + 32 * a;
            of[a] = block < blocks && column < 2 * columns
                        ? partial[u64(block) * 2 * columns + column]
                        : 0.0f;
        }
#pragma unroll
        for (u32 a = 0; a < AHEAD; ++a) sum += of[a];
    }
    sums[slice][threadIdx.x % COLUMNS] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.x % 32][threadIdx.x / 32]);
    column = blockIdx.x * COLUMNS + threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || column >= 2 * columns) return;
    float* to = column < columns ? dgamma + column : dbeta ? dbeta + (column - columns) : nullptr;
    if (to) *to = accumulate ? *to + sum : sum;
}
