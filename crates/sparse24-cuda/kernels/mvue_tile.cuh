// MVUE of tiles of 64 tokens and 64 features in shared memory, compressed into blocks, by 128
// threads. Compile without contraction.
//
// A lane makes two calls: the sixteen tokens from 16*(lane%4) on, of two features eight apart.
// Transposing loads hand it those; its nibbles are the metadata word of that lane, and its values
// go to the four lanes of its row.
#pragma once
#include "mvue.cuh"

constexpr u32 BLOCK = 64, THREADS = 128, TILE = BLOCK * BLOCK * 2;
// Values of one step of a warp, on the way to their lanes: 64 bytes for every four lanes, and 16
// bytes of padding after every second four, so that lanes use different banks.
constexpr u32 TURNED = 8 * 64 + 4 * 16;

// A tile has rows of 64 features, 128 bytes each. Chunks of 16 bytes are placed so that the eight
// rows of one transposing load, tokens 16c + 2i and 16c + 2i+1, use eight different banks. A thread
// has chunk threadIdx.x%8 of this token and of the three that are 4, 8 and 12 later; they are 512
// bytes apart.
__device__ __forceinline__ u32 first_token() {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 8;
}
__device__ __forceinline__ u32 place_of_chunk() {
    u32 token = first_token();
    return token * 128 + ((threadIdx.x % 8 ^ 2 * (threadIdx.x / 32) ^ (token & 1)) << 4);
}

// Forces the value to be computed here.
__device__ __forceinline__ void pin(uint4& x) {
    asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}

enum class Estimator { Exact, Approximate };

// Compresses the blocks blockIdx.y, blockIdx.y + gridDim.y, ... of a block row.
template <Estimator ESTIMATOR> struct Compressor {
    u32 from, to, back, call, calls;
    uint4* values;
    u32* metadata;
    StepState state;
    u32 site, second_site;

    __device__ __forceinline__ Compressor(u32 turned, u32 block_row, u32 p, uint4* all_values,
                                          u32* all_metadata, const StepState& at, u32 site,
                                          u32 second_site)
        : site(site), second_site(second_site) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, four = lane / 4, of = lane % 4,
            blocks = (p + BLOCK - 1) / BLOCK;
        // Row `lane % 8` of matrix `lane / 8` of a transposing load.
        u32 rho = lane % 8;
        from = (rho / 2 * 16 + rho % 2 + lane / 8 * 2) * 128 + ((2 * warp ^ rho) << 4);
        // Group g of a lane's call goes to lane 4*four + g of step of/2, as the word of its row in
        // half of%2.
        u32 mine = turned + warp * 2 * TURNED + four * 64 + four / 2 * 16;
        to = mine + of / 2 * TURNED + of % 2 * 8, back = mine + of * 16;
        calls = (p + 15) / 16;
        call = (block_row * BLOCK + 16 * warp + four) * calls + of + 4 * blockIdx.y;
        u64 place = u64(block_row) * blocks + blockIdx.y;
        values = all_values + place * (BLOCK * BLOCK / 16) + warp * 64 + lane;
        metadata = all_metadata + place * (BLOCK * BLOCK / 32) + threadIdx.x;
        // Keeps these in registers instead of recomputing them for every block.
        asm volatile(""
                     : "+r"(from), "+r"(to), "+r"(back), "+r"(call), "+l"(values), "+l"(metadata));
        state = uniform_state(at);
    }

    // Random words for the next block, for features eight apart. Computed before the wait for their
    // elements.
    struct Words {
        uint4 of[2];
    };
    __device__ __forceinline__ Words words() const {
        Words words = {philox(state, site, call), philox(state, site, call + 8 * calls)};
        pin(words.of[0]), pin(words.of[1]);
        return words;
    }

    // Compresses a tile, which all threads have written.
    __device__ __forceinline__ void compress(u32 tile, const Words& words) {
        u32 word = 0;
#pragma unroll(ESTIMATOR == Estimator::Approximate ? 1 : 2)
        for (u32 half = 0; half < 2; ++half) {
            u32 at = (from + tile) ^ half << 4;
            uint4 low = load_matrices_transposed(at), high = load_matrices_transposed(at + 8 * 128);
            u32 x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, kept[4],
                nibbles;
            if constexpr (ESTIMATOR == Estimator::Approximate) {
                uint4 own = half == 0 ? words.of[0] : words.of[1];
                nibbles = mvue_approximate(
                    x, own, philox(state, second_site, call + 8 * half * calls), kept);
            } else {
                nibbles = mvue_exact(x, words.of[half], kept);
            }
            word |= nibbles << 16 * half;
#pragma unroll
            for (u32 g = 0; g < 4; ++g)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 16 * g + 4 * half), "r"(kept[g])
                             : "memory");
        }
        asm volatile("st.global.u32 [%0], %1;" ::"l"(metadata), "r"(word) : "memory");
        __syncwarp();
#pragma unroll
        for (u32 step = 0; step < 2; ++step) {
            uint4 lanes = load16(back + TURNED * step);
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(values + 32 * step),
                         "r"(lanes.x), "r"(lanes.y), "r"(lanes.z), "r"(lanes.w)
                         : "memory");
        }
        values += u64(gridDim.y) * (BLOCK * BLOCK / 16);
        metadata += u64(gridDim.y) * (BLOCK * BLOCK / 32);
        call += 4 * gridDim.y;
    }
};
