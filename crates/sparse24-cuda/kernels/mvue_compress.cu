// mvue_compress_exact, mvue_compress_approximate: A[r,p] = MVUE(dZ^T), compressed
// in   dZ bf16 [p,r], rows `stride` apart; state: seed, step, micro-step; site, and the site of second uniforms
// out  values bf16, FragmentMajor; metadata u32, LaneMajor; missing rows and columns are zeros that keep their first two
// pre  r % 4 == 0; dZ and its rows 8-byte aligned, outputs 16-byte; ceil(r/64) blocks wide and at most ceil(p/64) high; outputs alias nothing
// acc  f32, every operation rounded, none contracted: core's bits
// ref  sparse24_core::mvue::compress
//
// A block of threads makes blocks of 64 features and 64 tokens, one after another. A lane makes two calls: the sixteen tokens from
// 16*(lane%4) on of two features eight apart. Transposing loads hand it those, its nibbles are the metadata word of that lane, and its values
// go to the lanes of its quad.
#include "mvue.cuh"

constexpr u32 BLOCK = 64, THREADS = 128, TILE = BLOCK * BLOCK * 2;

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// Starts a copy to shared memory, of zeros where nothing is `there`.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool there) {
    asm volatile("{.reg .pred none;\nsetp.eq.u32 none, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, none;}"
                 :: "r"(to), "l"(from), "r"(u32(there)) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const void* from, bool there) {
    asm volatile("{.reg .pred none;\nsetp.eq.u32 none, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 8, none;}"
                 :: "r"(to), "l"(from), "r"(u32(there)) : "memory");
}

__device__ __forceinline__ void load_transposed(u32 from, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
}

template <bool APPROXIMATE>
__device__ __forceinline__ void compress(const bf16* dz, u64 stride, u32 p, u32 r, uint4* values, u32* metadata, const StepState* at, u32 site,
                                         u32 second_site) {
    __shared__ __align__(128) u8 tiles[2 * TILE];
    __shared__ __align__(128) u8 turned[BLOCK * BLOCK];
    StepState state = uniform_state(*at);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, of = lane % 4;

    // A tile has rows of 64 tokens, 128 bytes each; their chunks of 16 bytes lie where the eight rows of one transposing load, tokens 16c + 2i
    // and 16c + 2i+1, meet eight different banks.
    u32 chunk = threadIdx.x % 8, row = threadIdx.x / 8, feature = blockIdx.x * BLOCK + 8 * chunk;
    const bf16* source = dz + u64(blockIdx.y * BLOCK + row) * stride + feature;
    u32 copied = shared_address(tiles) + row * 128, swizzled = (chunk ^ (row & 1)) << 4;
    bool wide = ((reinterpret_cast<u64>(dz) | stride * sizeof(bf16) | r * sizeof(bf16)) & 15) == 0;
    auto load = [&](u32 block, u32 buffer) {
        u32 to = copied + buffer, left = p - min(p, block * BLOCK + row);
        const bf16* from = source;
        if (wide) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) copy16(to + 2048 * j + (swizzled ^ 32 * j), from + 16 * j * stride, (feature < r) & (left > 16 * j));
        } else {
#pragma unroll 1
            for (u32 j = 0; j < 4; ++j) {
                copy8(to + 2048 * j + (swizzled ^ 32 * j), from + 16 * j * stride, (feature < r) & (left > 16 * j));
                copy8(to + 2048 * j + (swizzled ^ 32 * j) + 8, from + 16 * j * stride + 4, (feature + 4 < r) & (left > 16 * j));
            }
        }
        source += u64(gridDim.y) * BLOCK * stride;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    // Row `lane % 8` of matrix `lane / 8` of a transposing load.
    u32 rho = lane % 8, from = shared_address(tiles) + (rho / 2 * 16 + rho % 2 + lane / 8 * 2) * 128 + ((2 * warp ^ rho) << 4);
    // Group g of a lane's call goes to lane 4*quad + g of step of/2, as the word of its row in half of%2. The bits of g in a chunk's place are
    // exchanged so that lanes meet different banks.
    u32 mine = shared_address(turned) + warp * 1024 + quad * 64, exchange = quad / 2 % 2 * 2;
    u32 to = mine + of / 2 * 512 + ((of / 2 + exchange) << 4) + of % 2 * 8;
    u32 calls = (p + 15) / 16, first_call = (blockIdx.x * BLOCK + 16 * warp + quad) * calls + of;
    // Kept in registers, not made again for every block.
    asm volatile("" : "+r"(from), "+r"(to), "+r"(first_call), "+r"(copied), "+r"(swizzled));

    u32 blocks = (p + BLOCK - 1) / BLOCK, buffer = 0;
    load(blockIdx.y, 0);
    for (u32 block = blockIdx.y; block < blocks; block += gridDim.y) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (block + gridDim.y < blocks) load(block + gridDim.y, buffer ^ TILE);
        u32 word = 0;
#pragma unroll(APPROXIMATE ? 1 : 2)
        for (u32 half = 0; half < 2; ++half) {
            u32 x[8], kept[4];
            load_transposed((from + buffer) ^ half << 4, x[0], x[1], x[2], x[3]);
            load_transposed(((from + buffer) ^ half << 4) + 8 * 128, x[4], x[5], x[6], x[7]);
            u32 call = first_call + 8 * half * calls + 4 * block;
            uint4 words = philox(state, site, call);
            u32 nibbles = APPROXIMATE ? mvue_approximate(x, words, philox(state, second_site, call), kept) : mvue_exact(x, words, kept);
            word |= nibbles << 16 * half;
#pragma unroll
            for (u32 g = 0; g < 4; ++g) asm volatile("st.shared.u32 [%0], %1;" ::"r"((to ^ g << 4) + 4 * half), "r"(kept[g]) : "memory");
        }
        u64 place = u64(blockIdx.x) * blocks + block;
        metadata[place * (BLOCK * BLOCK / 32) + threadIdx.x] = word;
        __syncwarp();
#pragma unroll
        for (u32 step = 0; step < 2; ++step) {
            uint4 lanes;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(lanes.x), "=r"(lanes.y), "=r"(lanes.z), "=r"(lanes.w)
                         : "r"(mine + step * 512 + ((of ^ (step + exchange)) << 4)) : "memory");
            values[place * (BLOCK * BLOCK / 16) + (warp * 2 + step) * 32 + lane] = lanes;
        }
        buffer ^= TILE;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mvue_compress_exact(const bf16* __restrict__ dz, u64 stride, u32 p, u32 r, uint4* values, u32* metadata, const StepState* state, u32 site) {
    compress<false>(dz, stride, p, r, values, metadata, state, site, site);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mvue_compress_approximate(const bf16* __restrict__ dz, u64 stride, u32 p, u32 r, uint4* values, u32* metadata, const StepState* state,
                              u32 site, u32 second_site) {
    compress<true>(dz, stride, p, r, values, metadata, state, site, second_site);
}
