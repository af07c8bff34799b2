// *_backward_compress: dZ = dH * act'(Z) as in activation.cu, and A[r,p] = MVUE(dZ^T), compressed
// as in mvue_compress.cu, with their bits, in one pass
// in   bf16: dH [p,f]; Z [p,f], gated [p,2f]; state: seed, step, micro-step; site
// out  bf16: dZ as Z; values bf16, FragmentMajor; metadata u32, LaneMajor; padding is zeros that
//      keep the first two
// pre  f % 8 == 0, gated f % 64 == 0; all 16-byte aligned; a grid ceil(f/64) wide; outputs alias
//      nothing
// acc  f32, every operation rounded, none contracted
// ref  sparse24_cpu::activation, then sparse24_core::mvue::compress of the rounded dZ
//
// A thread copies, and multiplies, chunks of eight features of the tokens whose place in the tile
// it has: only the finished tile is shared.
#include "activation.cuh"
#include "mvue_tile.cuh"
#include "packed.cuh"
#include "pdl.cuh"

// Copies 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}

template <class A, u32 HALVES>
__device__ __forceinline__ void backward_compress(const bf16* dh, const bf16* z, bf16* dz, u32 p,
                                                  u32 f, uint4* values, u32* metadata,
                                                  const StepState* at, u32 site) {
    // Copies: dH, then the halves of Z, each in the order of threads.
    __shared__ __align__(128) u8 copies[(1 + HALVES) * TILE];
    __shared__ __align__(128) u8 tiles[HALVES * TILE];
    __shared__ __align__(128) u8 turned[8 * TURNED];
    u32 token = first_token(), feature = blockIdx.x * BLOCK + threadIdx.x % 8 * 8,
        blocks = (p + BLOCK - 1) / BLOCK, copied = shared_address(copies) + 16 * threadIdx.x,
        place = shared_address(tiles) + place_of_chunk();
    auto exists = [&](u32 block, u32 k) {
        return feature < f && block * BLOCK + token + 4 * k < p;
    };
    auto row = [&](u32 block, u32 k) { return u64(block) * BLOCK + token + 4 * k; };
    auto load = [&](u32 block) {
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            bool is = exists(block, k);
            copy16(copied + 2048 * k, dh + row(block, k) * f + feature, is);
#pragma unroll
            for (u32 half = 0; half < HALVES; ++half)
                copy16(copied + (1 + half) * TILE + 2048 * k,
                       z + (row(block, k) * HALVES + half) * f + feature, is);
        }
    };
    pdl_wait();
    pdl_launch_dependents();
    StepState state = *at;
    load(blockIdx.y);

    using Each = Compressor<Estimator::Exact>;
    Each first(shared_address(turned), blockIdx.x, p, values, metadata, state, site, site);
    Each second(shared_address(turned), blockIdx.x + f / BLOCK, p, values, metadata, state, site,
                site);
    for (u32 block = blockIdx.y; block < blocks; block += gridDim.y) {
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            Run<8> d = widen(load16(copied + 2048 * k)),
                   a = widen(load16(copied + TILE + 2048 * k)), b;
            if constexpr (HALVES == 2) b = widen(load16(copied + 2 * TILE + 2048 * k));
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                Activated activated = A::at(a.at[i]);
                if constexpr (HALVES == 1) {
                    a.at[i] = d.at[i] * activated.slope;
                } else {
                    a.at[i] = d.at[i] * b.at[i] * activated.slope;
                    b.at[i] = d.at[i] * activated.value;
                }
            }
            uint4 result[2] = {narrow(a), HALVES == 2 ? narrow(b) : uint4{}};
#pragma unroll
            for (u32 half = 0; half < HALVES; ++half) {
                store16(place + half * TILE + 512 * k, result[half]);
                if (exists(block, k))
                    *reinterpret_cast<uint4*>(dz + (row(block, k) * HALVES + half) * f + feature) =
                        result[half];
            }
        }
        if (block + gridDim.y < blocks) load(block + gridDim.y);
        Each::Words words = first.words();
        __syncthreads();
        first.compress(shared_address(tiles), words);
        if constexpr (HALVES == 2) {
            words = second.words();
            __syncwarp();
            second.compress(shared_address(tiles) + TILE, words);
        }
        __syncthreads();
    }
}

#define BACKWARD(name, A, halves, resident)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, resident)                                \
        name(const bf16* dh, const bf16* z, bf16* dz, u32 p, u32 f, uint4* values, u32* metadata,  \
             const StepState* state, u32 site) {                                                   \
        backward_compress<A, halves>(dh, z, dz, p, f, values, metadata, state, site);              \
    }
BACKWARD(gelu_backward_compress, Gelu, 1, 6)
BACKWARD(gelu_erf_backward_compress, GeluErf, 1, 6)
BACKWARD(relu_backward_compress, Relu, 1, 6)
BACKWARD(geglu_backward_compress, Gelu, 2, 4)
BACKWARD(swiglu_backward_compress, Silu, 2, 4)
