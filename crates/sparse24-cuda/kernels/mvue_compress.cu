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
// A thread block makes blocks of 64 features and 64 tokens, one after another.
#include "mvue_tile.cuh"
#include "pdl.cuh"

constexpr u32 RESIDENT = 7;

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

template <Estimator ESTIMATOR>
__device__ __forceinline__ void compress(const bf16* dz, u64 stride, u32 p, u32 r, uint4* values,
                                         u32* metadata, const StepState* at, u32 site,
                                         u32 second_site) {
    __shared__ __align__(128) u8 tiles[2 * TILE];
    __shared__ __align__(128) u8 turned[8 * TURNED];
    // A thread copies a chunk of every fourth token of sixteen, all with the same permutation.
    u32 row = first_token(), feature = blockIdx.x * BLOCK + threadIdx.x % 8 * 8,
        blocks = (p + BLOCK - 1) / BLOCK;
    const bf16* source = dz + u64(blockIdx.y * BLOCK + row) * stride + feature;
    u32 copied = shared_address(tiles) + place_of_chunk();
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

    Compressor<ESTIMATOR> compressor(shared_address(turned), blockIdx.x, p, values, metadata, state,
                                     site, second_site);
    u32 buffer = 0;
    for (u32 block = blockIdx.y; block < blocks; block += gridDim.y) {
        typename Compressor<ESTIMATOR>::Words words = compressor.words();
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (block + gridDim.y < blocks) load(block + gridDim.y, buffer ^ TILE);
        compressor.compress(shared_address(tiles) + buffer, words);
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
