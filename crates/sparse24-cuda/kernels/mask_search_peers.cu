// Searches that benchmarks compare with mask_search.
// greedy_mask_search_f32: the 2-approximation of Hubara et al. 2021
// pattern_mask_search_f32: of the 90 patterns the first of largest norm, each a sum of eight
//      magnitudes: the paper's product of the tile with all patterns, with scores in registers
// in   w f32 [r,q], row-major
// out  tiles u16 [r/4,q/4], overwritten, never read
// pre  r and q multiples of 4; w 16-byte aligned; a thread has one of `count` tiles, `columns` in a
//      row; tiles alias nothing
// acc  f32, every operation rounded, elements in order
// ref  sparse24_core::search::greedy, bit for bit; a loop over TilePattern::ALL
#include "scalar.cuh"

constexpr u32 THREADS = 128;

// The magnitudes of a tile: at most 2^124, as NaN counts.
struct Tile {
    float m[16];
};

__device__ __forceinline__ Tile load_tile(const float* w, u32 tile, u32 columns) {
    const float4* at = reinterpret_cast<const float4*>(w) + u64(tile / columns) * 4 * columns +
                       tile % columns;
    Tile of;
#pragma unroll
    for (u32 row = 0; row < 4; ++row) {
        float4 four = at[u64(row) * columns];
        float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            of.m[4 * row + i] = fminf(fabsf(w[i]), __uint_as_float(0x7d800000u));
    }
    return of;
}

// Seven were kept, the open cell (i,j) among them: exchanges a kept (k,l) for (i,l) and (k,j).
__device__ __forceinline__ u32 completed(const Tile& tile, u32 bits) {
    u32 i = 0, j = 0;
#pragma unroll
    for (u32 at = 0; at < 4; ++at) {
        if (__popc(bits & 0xfu << 4 * at) < 2) i = at;
        if (__popc(bits & 0x1111u << at) < 2) j = at;
    }
    float most = -1.0f;
    u32 exchange = 0;
#pragma unroll
    for (u32 k = 0; k < 4; ++k)
#pragma unroll
        for (u32 l = 0; l < 4; ++l) {
            float row = 0.0f, column = 0.0f;
#pragma unroll
            for (u32 at = 0; at < 4; ++at) {
                row = at == i ? tile.m[4 * at + l] : row;
                column = at == j ? tile.m[4 * k + at] : column;
            }
            u32 taken = 1u << (4 * k + l), first = 1u << (4 * i + l), second = 1u << (4 * k + j);
            float gain = (row + column) - tile.m[4 * k + l];
            if ((bits & taken) && !(bits & (first | second)) && (gain > most || !exchange)) {
                most = gain;
                exchange = taken ^ first ^ second;
            }
        }
    return bits ^ exchange;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    greedy_mask_search_f32(const float* w, u16* tiles, u32 columns, u32 count) {
    u32 number = blockIdx.x * THREADS + threadIdx.x;
    if (number >= count) return;
    Tile tile = load_tile(w, number, columns);
    u32 bits = 0, open = 0xffff;
    while (open) {
        float most = -1.0f;
        u32 at = 0;
#pragma unroll
        for (u32 i = 0; i < 16; ++i)
            if ((open >> i & 1) && tile.m[i] > most) most = tile.m[i], at = i;
        u32 row = 0xfu << (at & 12), column = 0x1111u << (at & 3);
        bits |= 1u << at;
        open &= ~(1u << at);
        if (__popc(bits & row) == 2) open &= ~row;
        if (__popc(bits & column) == 2) open &= ~column;
    }
    tiles[number] = u16(__popc(bits) == 8 ? bits : completed(tile, bits));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    pattern_mask_search_f32(const float* w, u16* tiles, u32 columns, u32 count) {
    constexpr u16 PATTERNS[90] = {
        0x33cc, 0x35ac, 0x35ca, 0x369c, 0x36c9, 0x396c, 0x39c6, 0x3a5c, 0x3ac5, 0x3c3c, 0x3c5a,
        0x3c69, 0x3c96, 0x3ca5, 0x3cc3, 0x53ac, 0x53ca, 0x55aa, 0x569a, 0x56a9, 0x596a, 0x59a6,
        0x5a3c, 0x5a5a, 0x5a69, 0x5a96, 0x5aa5, 0x5ac3, 0x5c3a, 0x5ca3, 0x639c, 0x63c9, 0x659a,
        0x65a9, 0x6699, 0x693c, 0x695a, 0x6969, 0x6996, 0x69a5, 0x69c3, 0x6a59, 0x6a95, 0x6c39,
        0x6c93, 0x936c, 0x93c6, 0x956a, 0x95a6, 0x963c, 0x965a, 0x9669, 0x9696, 0x96a5, 0x96c3,
        0x9966, 0x9a56, 0x9a65, 0x9c36, 0x9c63, 0xa35c, 0xa3c5, 0xa53c, 0xa55a, 0xa569, 0xa596,
        0xa5a5, 0xa5c3, 0xa659, 0xa695, 0xa956, 0xa965, 0xaa55, 0xac35, 0xac53, 0xc33c, 0xc35a,
        0xc369, 0xc396, 0xc3a5, 0xc3c3, 0xc53a, 0xc5a3, 0xc639, 0xc693, 0xc936, 0xc963, 0xca35,
        0xca53, 0xcc33,
    };
    u32 number = blockIdx.x * THREADS + threadIdx.x;
    if (number >= count) return;
    Tile tile = load_tile(w, number, columns);
    float most = -1.0f;
    u32 best = 0;
#pragma unroll
    for (u32 pattern = 0; pattern < 90; ++pattern) {
        float norm = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 16; ++i)
            if (PATTERNS[pattern] >> i & 1) norm += tile.m[i];
        if (norm > most) most = norm, best = PATTERNS[pattern];
    }
    tiles[number] = u16(best);
}
