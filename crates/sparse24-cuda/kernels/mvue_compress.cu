// mvue_compress_exact, mvue_compress_approximate: A[r,p] = MVUE(dZ^T), compressed
// in   dZ bf16 [p,r], rows `stride` apart; state: seed, step, micro-step; site, and the site of
//      second uniforms
// out  values bf16, FragmentMajor; metadata u32, LaneMajor; padding is zeros that keep the first
//      two
// pre  r % 4 == 0; dZ and its rows 8-byte aligned, outputs 16-byte; a grid ceil(r/64) wide; outputs
//      alias nothing
// acc  f32, every operation rounded, none contracted: core's bits
// ref  sparse24_core::mvue::compress
//
// A thread block makes blocks of 64 features and 64 tokens, one after another. A lane makes two
//      calls:
// the sixteen tokens from 16*(lane%4) on, of two features eight apart. Transposing loads hand it
// those; its nibbles are the metadata word of that lane, and its values go to the four lanes of its
// row.
#include "pdl.cuh"
#include "mvue.cuh"

constexpr u32 BLOCK = 64, THREADS = 128, TILE = BLOCK * BLOCK * 2, RESIDENT = 7;
// Values of one step of a warp, on the way to their lanes: 64 bytes for every four lanes, and 16
// bytes of padding after every second four, so that lanes use different banks.
constexpr u32 TURNED = 8 * 64 + 4 * 16;

// Starts a copy to shared memory.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Copies zeros if `count` is 0, otherwise it is 1.
__device__ __forceinline__ void copy8(u32 to, const void* from, u32 count) {
    asm volatile(
        "{.reg .pred none;\nsetp.eq.u32 none, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 8, "
        "none;}" ::"r"(to),
        "l"(from), "r"(count)
        : "memory");
}

// Forces the value to be computed here.
__device__ __forceinline__ void pin(uint4& x) {
    asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}

enum class Estimator { Exact, Approximate };

template <Estimator ESTIMATOR>
__device__ __forceinline__ void compress(const bf16* dz, u64 stride, u32 p, u32 r, uint4* values,
                                         u32* metadata, const StepState* at, u32 site,
                                         u32 second_site) {
    __shared__ __align__(128) u8 tiles[2 * TILE];
    __shared__ __align__(128) u8 turned[8 * TURNED];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, four = lane / 4, of = lane % 4;

    // A tile has rows of 64 features, 128 bytes each. Chunks of 16 bytes are placed so that the
    // eight rows of one transposing load, tokens 16c + 2i and 16c + 2i+1, use eight different
    // banks. A thread copies a chunk of every fourth token of sixteen, all with the same
    // permutation.
    u32 chunk = threadIdx.x % 8, row = 16 * warp + lane / 8,
        feature = blockIdx.x * BLOCK + 8 * chunk, blocks = (p + BLOCK - 1) / BLOCK;
    const bf16* source = dz + u64(blockIdx.y * BLOCK + row) * stride + feature;
    u32 copied = shared_address(tiles) + row * 128 + ((chunk ^ 2 * warp ^ (row & 1)) << 4);
    bool wide = ((reinterpret_cast<u64>(dz) | stride * sizeof(bf16)) & 15) == 0 &&
                (blockIdx.x + 1) * BLOCK <= r;
    auto load = [&](u32 block, u32 buffer) {
        u32 to = copied + buffer;
        if (wide && block < p / BLOCK) {
#pragma unroll
            for (u32 k = 0; k < 4; ++k) copy16(to + 512 * k, source + 4 * k * stride);
        } else if (block < blocks) {
            u32 left = p - min(p, block * BLOCK + row);
#pragma unroll 1
            for (u32 k = 0; k < 4; ++k) {
                copy8(to + 512 * k, source + 4 * k * stride, (feature < r) & (left > 4 * k));
                copy8(to + 512 * k + 8, source + 4 * k * stride + 4,
                      (feature + 4 < r) & (left > 4 * k));
            }
        }
        source += u64(gridDim.y) * BLOCK * stride;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if (wide && blockIdx.y < p / BLOCK) {
#pragma unroll
        for (u32 k = 0; k < 4; ++k) prefetch(source + 4 * k * stride);
    }
    // `source` is even.
    pdl_wait(copied + u32(reinterpret_cast<u64>(source) & 1));
    pdl_launch_dependents();
    // Loaded first, since it would otherwise queue behind the copies; used while those are in
    // flight.
    StepState state = *at;
    load(blockIdx.y, 0);

    // Row `lane % 8` of matrix `lane / 8` of a transposing load.
    u32 rho = lane % 8, from = shared_address(tiles) +
                               (rho / 2 * 16 + rho % 2 + lane / 8 * 2) * 128 +
                               ((2 * warp ^ rho) << 4);
    // Group g of a lane's call goes to lane 4*four + g of step of/2, as the word of its row in half
    // of%2.
    u32 mine = shared_address(turned) + warp * 2 * TURNED + four * 64 + four / 2 * 16,
        to = mine + of / 2 * TURNED + of % 2 * 8, back = mine + of * 16;
    u32 calls = (p + 15) / 16,
        call = (blockIdx.x * BLOCK + 16 * warp + four) * calls + of + 4 * blockIdx.y;
    u64 place = u64(blockIdx.x) * blocks + blockIdx.y;
    values += place * (BLOCK * BLOCK / 16) + warp * 64 + lane;
    metadata += place * (BLOCK * BLOCK / 32) + threadIdx.x;
    // Keeps these in registers instead of recomputing them for every block.
    asm volatile("" : "+r"(from), "+r"(to), "+r"(back), "+r"(call), "+l"(values), "+l"(metadata));
    state = uniform_state(state);

    u32 buffer = 0;
    for (u32 block = blockIdx.y; block < blocks; block += gridDim.y) {
        // Words for features eight apart, computed before the wait for their elements.
        uint4 words[2] = {philox(state, site, call), philox(state, site, call + 8 * calls)};
        pin(words[0]), pin(words[1]);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (block + gridDim.y < blocks) load(block + gridDim.y, buffer ^ TILE);
        u32 word = 0;
#pragma unroll(ESTIMATOR == Estimator::Approximate ? 1 : 2)
        for (u32 half = 0; half < 2; ++half) {
            u32 at = (from + buffer) ^ half << 4;
            uint4 low = load_matrices_transposed(at), high = load_matrices_transposed(at + 8 * 128);
            u32 x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, kept[4],
                nibbles;
            if constexpr (ESTIMATOR == Estimator::Approximate) {
                uint4 own = half == 0 ? words[0] : words[1];
                nibbles = mvue_approximate(
                    x, own, philox(state, second_site, call + 8 * half * calls), kept);
            } else {
                nibbles = mvue_exact(x, words[half], kept);
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
            uint4 lanes;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(lanes.x), "=r"(lanes.y), "=r"(lanes.z), "=r"(lanes.w)
                         : "r"(back + TURNED * step)
                         : "memory");
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(values + 32 * step),
                         "r"(lanes.x), "r"(lanes.y), "r"(lanes.z), "r"(lanes.w)
                         : "memory");
        }
        values += u64(gridDim.y) * (BLOCK * BLOCK / 16);
        metadata += u64(gridDim.y) * (BLOCK * BLOCK / 32);
        call += 4 * gridDim.y;
        buffer ^= TILE;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mvue_compress_exact(const bf16* dz, u64 stride, u32 p, u32 r, uint4* values, u32* metadata,
                        const StepState* state, u32 site) {
    compress<Estimator::Exact>(dz, stride, p, r, values, metadata, state, site, site);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mvue_compress_approximate(const bf16* dz, u64 stride, u32 p, u32 r, uint4* values,
                              u32* metadata, const StepState* state, u32 site, u32 second_site) {
    compress<Estimator::Approximate>(dz, stride, p, r, values, metadata, state, site, second_site);
}
