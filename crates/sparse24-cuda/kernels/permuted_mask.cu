// permuted_mask: out = the elements of a mask that are among the two largest masked magnitudes of
//      four rows in another order
// in   w f32 [r,q], rows `stride` apart; tiles u16 [r/4,q/4]; order u32 [2,r]: the rows in the
//      order in which groups are formed, then the place of each row in it
// out  u16 [r/4,q/4], overwritten
// pre  q and stride multiples of 4; 16-byte aligned; the second row of order is the inverse of the
//      first; out aliases nothing
// acc  comparisons only; of equal magnitudes the first in a group is larger, and a NaN is infinite
// ref  sparse24_core::permute, bit for bit
#include "pdl.cuh"
#include "scalar.cuh"

// The nibble of a row of a tile.
__device__ __forceinline__ u32 nibble(const u16* tiles, u32 columns, u32 row, u32 column) {
    return tiles[u64(row / 4) * columns + column] >> (4 * (row % 4)) & 0xf;
}

__device__ __forceinline__ float magnitude(float x) {
    return x != x ? __int_as_float(0x7f800000) : fabsf(x);
}

// A thread has a tile. The group of each of its rows has three more rows, anywhere.
extern "C" __global__ void __launch_bounds__(256)
    permuted_mask(const float* w, const u16* tiles, const u32* order, u16* out, u64 stride, u32 r,
                  u32 columns) {
    u64 thread = u64(blockIdx.x) * 256 + threadIdx.x;
    if (thread >= u64(r / 4) * columns) return;
    u32 tile_row = u32(thread / columns), column = u32(thread % columns), bits = 0;
    pdl_wait();
    for (u32 i = 0; i < 4; ++i) {
        u32 row = 4 * tile_row + i, kept = nibble(tiles, columns, row, column),
            place = order[r + row], own = place % 4;
        float m[4][4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            u32 other = order[place - own + k], keeps = nibble(tiles, columns, other, column);
            float4 x = *reinterpret_cast<const float4*>(w + other * stride + 4 * column);
            m[k][0] = keeps & 1 ? magnitude(x.x) : 0.0f;
            m[k][1] = keeps & 2 ? magnitude(x.y) : 0.0f;
            m[k][2] = keeps & 4 ? magnitude(x.z) : 0.0f;
            m[k][3] = keeps & 8 ? magnitude(x.w) : 0.0f;
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            float mine = own == 0 ? m[0][j] : own == 1 ? m[1][j] : own == 2 ? m[2][j] : m[3][j];
            u32 larger = 0;
#pragma unroll
            for (u32 k = 0; k < 4; ++k)
                larger += k != own && (m[k][j] > mine || (m[k][j] == mine && k < own));
            if (larger >= 2) kept &= ~(1u << j);
        }
        bits |= kept << (4 * i);
    }
    out[thread] = u16(bits);
}
