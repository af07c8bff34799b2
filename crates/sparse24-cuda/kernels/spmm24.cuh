// How sparse products are divided along all three sizes, and how fragments of D are stored.
#pragma once
#include "scalar.cuh"

enum class Form { Transposed, Straight };

// Rows and columns of a block of A, and its bytes of values and metadata.
constexpr u32 BLOCK = 64, VALUES = 4096, METADATA = 512;

struct Work {
    u32 m, n, k_blocks;
    u32 rows, columns;  // of tiles
    u32 sweep;          // rows of tiles that are swept along n together
    u32 whole,
        parts;  // tiles that are computed at once; parts into which each other is divided along k
};

__device__ __forceinline__ u32 units_of(const Work& work) {
    return work.whole + (work.rows * work.columns - work.whole) * work.parts;
}

// What is computed at a time: a tile, or a part of one (split-K).
struct Unit {
    u32 row, column, begin, end;
};

__device__ __forceinline__ Unit unit_of(const Work& work, u32 index) {
    u32 tile = index, begin = 0, end = work.k_blocks;
    if (index >= work.whole) {
        u32 part = (index - work.whole) % work.parts;
        tile = work.whole + (index - work.whole) / work.parts;
        end = work.k_blocks * (part + 1) / work.parts;
        begin = work.k_blocks * part / work.parts;
    }
    u32 sweep = tile / (work.sweep * work.columns), within = tile % (work.sweep * work.columns);
    u32 high = min(work.sweep, work.rows - sweep * work.sweep);
    return {sweep * work.sweep + within % high, within / high, begin, end};
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Rows of bf16.
struct Target {
    char* at;
    u64 stride;
};

// Rows of floats, which are overwritten or added to.
struct Rows {
    float* d;
    u64 stride;
    u32 accumulate;
};

// Stores a fragment of 16 rows and 2 N columns of D that begins at row, column. Neighbouring lanes
// exchange halves, so that each has four columns of one of two products of eight.
template <u32 N>
__device__ __forceinline__ void store_straight(const float (&x)[N], u32 row, u32 column,
                                               const Rows& to, u32 m, u32 n) {
    u32 lane = threadIdx.x % 32, odd = lane & 1;
    row += lane / 4, column += 8 * odd + 4 * (lane % 4 / 2);
#pragma unroll
    for (u32 j = 0; j < N; j += 8) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float give0 = odd ? x[j + 2 * h] : x[j + 4 + 2 * h],
                  give1 = odd ? x[j + 1 + 2 * h] : x[j + 5 + 2 * h];
            float keep0 = odd ? x[j + 4 + 2 * h] : x[j + 2 * h],
                  keep1 = odd ? x[j + 5 + 2 * h] : x[j + 1 + 2 * h];
            float take0 = __shfl_xor_sync(0xffffffffu, give0, 1),
                  take1 = __shfl_xor_sync(0xffffffffu, give1, 1);
            float4 four = odd ? make_float4(take0, take1, keep0, keep1)
                              : make_float4(keep0, keep1, take0, take1);
            if (row + 8 * h >= m || column + 2 * j >= n) continue;
            float4* d =
                reinterpret_cast<float4*>(to.d + (row + 8 * h) * to.stride + column + 2 * j);
            *d = to.accumulate ? add(*d, four) : four;
        }
    }
}

// Where a lane stores a fragment of 16 rows of a part, in steps of eight columns that are 128
// apart; `slab` counts the 16 rows from the beginning of the tile, which has `blocks` of 64.
__device__ __forceinline__ float4* part_of(float4* partial, const Work& work, u32 index, u32 slab,
                                           u32 blocks, u32 columns) {
    u64 block = u64(index - work.whole) * blocks + slab / 4;
    return partial + block * (columns / 8) * 128 + slab % 4 * 32 + threadIdx.x % 32;
}
