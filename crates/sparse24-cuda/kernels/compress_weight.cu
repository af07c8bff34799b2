// compress_weight: forward = S(W) [r,q], dgrad = S(W)^T [q,r], with the same bf16 values
// compress_forward: forward only
// prune_dense: out = S(W) [r,q] in bf16, pruned elements +0, for products that the mask does not
//      make 2:4
// in   w f32 [r,q], rows `stride` apart; tiles u16 [r/4,q/4]; soft 0: kept values stay; soft 1:
//      copysign(max(|w|-t, 0), w) * scale, with t the second-smallest magnitude of the row group
// out  values bf16 FragmentMajor, metadata u32 LaneMajor; all blocks overwritten, padding included,
//      never read
// pre  r, q and stride multiples of 4; 16-byte aligned; every tile transposable (forward only:
//      row-wise); outputs alias nothing
// acc  f32, every operation rounded, then to bf16, ties to even
// ref  sparse24_cpu::prune::compress_weight, bit for bit except for the payloads of NaNs
#include "pdl.cuh"
#include "scalar.cuh"

// A block: 64x64 elements, 16x16 tiles, one per thread.
struct Block {
    // 256 fragments of four words, 16 bytes a lane.
    uint4 values[256];
    // A nibble for each row of a tile; tiles along a row of the output are adjacent.
    u16 nibbles[16][16];
};

// Metadata i0 | i1 << 2 of four groups, a nibble each. A group with another number of kept bits
// still gets some nibble.
__device__ __forceinline__ u32 metadata_nibbles(u32 kept) {
    u32 b0 = kept & 0x1111u, b1 = kept >> 1 & 0x1111u, b2 = kept >> 2 & 0x1111u,
        b3 = kept >> 3 & 0x1111u;
    u32 low0 = b1 & ~b0, low1 = 0x1111u & ~(b0 | b1), high0 = b3 | (0x1111u & ~b2), high1 = b2 | b3;
    return low0 | low1 << 1 | high0 << 2 | high1 << 3;
}

// The two of four bf16 that a metadata nibble selects.
__device__ __forceinline__ u32 kept_pair(u32 first, u32 second, u32 nibble) {
    return __byte_perm(first, second,
                       0x1010u + (nibble & 3) * 0x0022u + (nibble >> 2 & 3) * 0x2200u);
}

// The step towards zero by the second-smallest magnitude. As integers, magnitudes are in total
// order, NaNs last.
__device__ __forceinline__ float4 soft_threshold(float4 w, float scale) {
    float x[4] = {w.x, w.y, w.z, w.w};
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(x[i]) & 0x7fffffffu;
    float t = __uint_as_float(
        min(max(min(a[0], a[1]), min(a[2], a[3])), min(max(a[0], a[1]), max(a[2], a[3]))));
#pragma unroll
    for (int i = 0; i < 4; ++i)
        x[i] = copysignf(fabsf(x[i]) < t ? 0.0f : fabsf(x[i]) - t, x[i]) * scale;
    return make_float4(x[0], x[1], x[2], x[3]);
}

// The place of the word of row 4*tile_row+i, group tile_column among a block's values. Fragments
// are permuted within eights, so that the lanes of a warp write to distinct banks, and whole
// fragments are still contiguous.
__device__ __forceinline__ u32 word_of(u32 tile_row, u32 tile_column, u32 i) {
    u32 lane = 16 * (tile_row % 2) + 4 * i + tile_column % 4;
    u32 fragment = 64 * (tile_row / 4) + 32 * (tile_column / 8) + lane;
    return 4 * (fragment ^ (fragment >> 4 & 5)) + 2 * (tile_column / 4 % 2) + tile_row / 2 % 2;
}

// Stores the four groups of a tile: their values from the pairs (0,1) and (2,3) of each, and their
// nibbles.
__device__ __forceinline__ void put(Block& block, u32 tile_row, u32 tile_column,
                                    const u32 (&first)[4], const u32 (&second)[4], u32 kept) {
    u32 nibbles = metadata_nibbles(kept);
    block.nibbles[tile_row][tile_column] = u16(nibbles);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        reinterpret_cast<u32*>(block.values)[word_of(tile_row, tile_column, i)] =
            kept_pair(first[i], second[i], nibbles >> (4 * i));
    }
}

// The nibbles of one row of four adjacent tiles.
__device__ __forceinline__ u32 row_of(uint2 tiles, u32 row) {
    u32 low = tiles.x >> (4 * row) & 0x000f000fu, high = tiles.y >> (4 * row) & 0x000f000fu;
    low |= low >> 12, high |= high >> 12;
    return (low & 0xff) | (high & 0xff) << 8;
}

// The word of a lane of a warp: rows lane/4 and lane/4+8, sixteen columns.
__device__ __forceinline__ u32 metadata_word(const Block& block, u32 warp, u32 lane) {
    u32 tile_row = 4 * warp + lane / 16, row = lane / 4 % 4, tile_column = 4 * (lane % 4);
    uint2 upper = *reinterpret_cast<const uint2*>(&block.nibbles[tile_row][tile_column]);
    uint2 lower = *reinterpret_cast<const uint2*>(&block.nibbles[tile_row + 2][tile_column]);
    return row_of(upper, row) | row_of(lower, row) << 16;
}

__device__ __forceinline__ uint4 fragment(const Block& block, u32 at) {
    return block.values[at ^ (at >> 4 & 5)];
}

// Computes one matrix, or its transpose too.
template <int MATRICES>
__device__ __forceinline__ void compress(const float* w, const u16* tiles, uint4* values,
                                         u32* metadata, uint4* values_t, u32* metadata_t,
                                         u64 stride, u32 r, u32 q, u32 soft, float scale) {
    __shared__ Block blocks[MATRICES];
    // Lanes take eight tiles of a row, 128 bytes of each matrix row, in every second tile row: this
    // avoids bank conflicts.
    u32 thread = threadIdx.x, warp = thread / 32;
    u32 tile_column = 8 * (warp % 2) + thread % 8,
        tile_row = 8 * (warp / 4) + warp / 2 % 2 + 2 * (thread / 8 % 4);
    u32 row = 64 * blockIdx.y + 4 * tile_row, column = 64 * blockIdx.x + 4 * tile_column;
    pdl_wait();
    u32 kept = 0x3333u, kept_t = 0x3333u, first[4] = {}, second[4] = {};
    if (row < r && column < q) {
        const float* at = w + row * stride + column;
        float4 rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = *reinterpret_cast<const float4*>(at + i * stride);
        kept = tiles[u64(row / 4) * (q / 4) + column / 4];
        kept_t = transposed(kept);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (soft) rows[i] = soft_threshold(rows[i], scale);
            first[i] = narrow_pair(rows[i].x, rows[i].y);
            second[i] = narrow_pair(rows[i].z, rows[i].w);
        }
    }
    put(blocks[0], tile_row, tile_column, first, second, kept);
    if (MATRICES == 2) {
        u32 above[4], below[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 halves = j % 2 ? 0x7632u : 0x5410u;
            const u32(&pair)[4] = j < 2 ? first : second;
            above[j] = __byte_perm(pair[0], pair[1], halves);
            below[j] = __byte_perm(pair[2], pair[3], halves);
        }
        put(blocks[MATRICES - 1], tile_column, tile_row, above, below, kept_t);
    }
    __syncthreads();
    u64 at = u64(blockIdx.y) * gridDim.x + blockIdx.x,
        at_t = u64(blockIdx.x) * gridDim.y + blockIdx.y;
    values[256 * at + thread] = fragment(blocks[0], thread);
    if (thread < 128) metadata[128 * at + thread] = metadata_word(blocks[0], warp, thread % 32);
    if (MATRICES == 2) {
        values_t[256 * at_t + thread] = fragment(blocks[MATRICES - 1], thread);
        if (thread >= 128)
            metadata_t[128 * at_t + thread - 128] =
                metadata_word(blocks[MATRICES - 1], warp - 4, thread % 32);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    compress_weight(const float* w, const u16* tiles, uint4* values, u32* metadata, uint4* values_t,
                    u32* metadata_t, u64 stride, u32 r, u32 q, u32 soft, float scale) {
    compress<2>(w, tiles, values, metadata, values_t, metadata_t, stride, r, q, soft, scale);
}
extern "C" __global__ void __launch_bounds__(256)
    compress_forward(const float* w, const u16* tiles, uint4* values, u32* metadata, u64 stride,
                     u32 r, u32 q, u32 soft, float scale) {
    compress<1>(w, tiles, values, metadata, nullptr, nullptr, stride, r, q, soft, scale);
}

// A thread has four elements of a row.
extern "C" __global__ void __launch_bounds__(256)
    prune_dense(const float* w, const u16* tiles, bf16* out, u64 stride, u32 r, u32 q, u32 soft,
                float scale) {
    u32 columns = q / 4;
    u64 group = u64(blockIdx.x) * 256 + threadIdx.x;
    if (group >= u64(r) * columns) return;
    u32 row = u32(group / columns), column = u32(group % columns);
    pdl_wait();
    float4 x = *reinterpret_cast<const float4*>(w + row * stride + 4 * column);
    u32 kept = tiles[u64(row / 4) * columns + column] >> (4 * (row % 4));
    if (soft) x = soft_threshold(x, scale);
    u32 first = narrow_pair(kept & 1 ? x.x : 0.0f, kept & 2 ? x.y : 0.0f),
        second = narrow_pair(kept & 4 ? x.z : 0.0f, kept & 8 ? x.w : 0.0f);
    reinterpret_cast<uint2*>(out)[group] = make_uint2(first, second);
}
