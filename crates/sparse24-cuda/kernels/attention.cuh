// Slabs of attention's operands in shared memory, and the two products that read them. A block is
// one warpgroup: 64 rows of what it owns, 16 per warp, against 64 rows at a time of what it
// streams. A warp's part of a sum over 64 columns is float[8][4]: element [n][c] of lane l is row
// l/4 + 8*(c/2), column 8*n + 2*(l%4) + c%2, for wgmma and mma.sync alike.
#pragma once
#include "philox.cuh"

// Rows of every slab; columns of a panel (128 bytes per row); threads of a block; slabs of one
// matrix that are in use or being copied.
constexpr int ROWS = 64, PANEL = 64, THREADS = 128, STAGES = 2;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f,
                INFINITE = __builtin_bit_cast(float, 0x7f800000);

// PORTABLE compiles the code of other GPUs, to check it on Hopper.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(PORTABLE)
#define WARPGROUP_PRODUCTS
#endif
// Blocks per multiprocessor, with wgmma and without.
#ifdef WARPGROUP_PRODUCTS
#define TOGETHER(WGMMA, MMA) __launch_bounds__(THREADS, WGMMA)
#else
#define TOGETHER(WGMMA, MMA) __launch_bounds__(THREADS, MMA)
#endif

// [ROWS, WIDTH] of bf16 in shared memory, panel by panel; chunk c (16 bytes) of row r lies at c ^
// r%8: the 128-byte swizzle of wgmma, which also avoids bank conflicts of ldmatrix. `base` is a
// multiple of 1024.
template <int WIDTH> struct Slab {
    static constexpr u32 BYTES = ROWS * WIDTH * 2, PANEL_BYTES = ROWS * 128;
    u32 base;

    __device__ __forceinline__ u32 at(int row, int chunk) const {
        return base + (chunk / 8) * PANEL_BYTES + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
    }
    __device__ __forceinline__ Slab after(int slabs) const { return {base + slabs * BYTES}; }
};

// A thread's share of copying a matrix to shared memory, slab by slab. Elements out of bounds
// become 0.
template <int WIDTH> struct Fetch {
    static constexpr int CHUNKS = WIDTH / 8, STRIDE = THREADS / CHUNKS;
    // The thread's first chunk of the next slab, and the rows from there on; `matrix` is a valid
    // address for chunks out of bounds.
    const bf16 *matrix, *from;
    u32 stride, at;
    int rows;

    __device__ __forceinline__ Fetch(const bf16* matrix, u32 stride, int of_rows, int width)
        : matrix(matrix), stride(stride) {
        int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        from = matrix + u64(row) * stride + chunk * 8;
        at = Slab<WIDTH>{0}.at(row, chunk);
        rows = chunk * 8 < width ? of_rows - row : 0;
    }
    // Starts copying the next slab.
    __device__ __forceinline__ void next(const Slab<WIDTH>& slab) {
        if (rows > ROWS - STRIDE) {
#pragma unroll
            for (int i = 0; i < ROWS / STRIDE; ++i) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(slab.base + at +
                                                                               i * STRIDE * 128),
                             "l"(from + i * STRIDE * stride)
                             : "memory");
            }
        } else {
#pragma unroll
            for (int i = 0; i < ROWS / STRIDE; ++i) {
                bool inside = i * STRIDE < rows;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                                 slab.base + at + i * STRIDE * 128),
                             "l"(inside ? from + i * STRIDE * stride : matrix), "r"(inside ? 16 : 0)
                             : "memory");
            }
        }
        skip(1);
    }
    __device__ __forceinline__ void skip(int slabs) {
        from += u64(slabs * ROWS) * stride;
        rows -= slabs * ROWS;
    }
};

__device__ __forceinline__ void fetches_end_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last LEFT groups have arrived and are visible to the block.
template <int LEFT> __device__ __forceinline__ void fetches_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#ifdef WARPGROUP_PRODUCTS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
}

// The low word of wgmma's descriptor of a slab; the high word selects the 128-byte swizzle, with
// 1024 bytes between groups of eight rows. Addresses in units of 16 bytes can be added.
__device__ __forceinline__ u32 descriptor(u32 address) { return 1 << 16 | address >> 4; }

// The left operand of a product in shared memory: the 16 rows of a warp, from `first` on, in steps
// of 16 columns. (wgmma could also take it from registers, but ptxas 13.0 reuses those of a
// loop-invariant operand within the loop.)
template <int WIDTH> struct Left {
    Slab<WIDTH> slab;
    int first;

#ifdef WARPGROUP_PRODUCTS
    __device__ __forceinline__ u32 step(int k) const {
        return descriptor(slab.base) + (k / 4 * slab.PANEL_BYTES + k % 4 * 32) / 16;
    }
#else
    __device__ __forceinline__ uint4 step(int k) const {
        return load_matrices(slab.at(first + threadIdx.x % 16, 2 * k + threadIdx.x % 32 / 16));
    }
#endif
};
// The left operand of a product in registers: the rounded sums of another product.
struct Rounded {
    uint4 steps[ROWS / 16];

    __device__ __forceinline__ void round(const float (&x)[8][4]) {
#pragma unroll
        for (int k = 0; k < ROWS / 16; ++k) {
            const float(&low)[4] = x[2 * k], (&high)[4] = x[2 * k + 1];
            steps[k] = make_uint4(narrow_pair(low[0], low[1]), narrow_pair(low[2], low[3]),
                                  narrow_pair(high[0], high[1]), narrow_pair(high[2], high[3]));
        }
    }
};

#ifdef WARPGROUP_PRODUCTS
// Sums that a product reads or writes must not be touched between its start and the wait for it.
// This makes the compiler respect that.
template <int N> __device__ __forceinline__ void pin(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
        asm volatile(""
                     : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]),
                       "+f"(sums[n][3])::"memory");
}
// One step of 16. KIND 0: rows of the slab are columns of the product; 1: the product sums over
// rows of the slab.
#define WGMMA_64(DECLARED, OPERANDS)                                                               \
    "{\n.reg .pred p;\n.reg .b64 b;\n" DECLARED                                                    \
    "setp.ne.b32 p, %32, 0;\nmov.b64 b, {%33, 0x40000040};\n"                                      \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "                                        \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " OPERANDS   \
    ";\n}\n"
#define EIGHT(I)                                                                                   \
    "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]),    \
        "+f"(d[I + 6]), "+f"(d[I + 7])
template <int KIND>
__device__ __forceinline__ void wgmma(float* d, uint4 a, u32 slab, int accumulate) {
    asm volatile(WGMMA_64("", "{%34, %35, %36, %37}, b, p, 1, 1, %38")
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
                 : "r"(accumulate), "r"(slab), "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "n"(KIND));
}
template <int KIND>
__device__ __forceinline__ void wgmma(float* d, u32 a, u32 slab, int accumulate) {
    asm volatile(WGMMA_64(".reg .b64 a;\nmov.b64 a, {%34, 0x40000040};\n", "a, b, p, 1, 1, 0, %35")
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
                 : "r"(accumulate), "r"(slab), "r"(a), "n"(KIND));
}
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_end_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
#else
template <int N> __device__ __forceinline__ void pin(float (&)[N][4]) {}
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_end_group() {}
template <int LEFT> __device__ __forceinline__ void products_wait() {}
__device__ __forceinline__ void mma(float (&d)[4], uint4 a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#endif

// sums [16, ROWS] = left [16, WIDTH] slab^T.
template <int WIDTH>
__device__ __forceinline__ void product_with_transpose(float (&sums)[8][4], const Left<WIDTH>& left,
                                                       const Slab<WIDTH>& slab) {
#ifdef WARPGROUP_PRODUCTS
    products_begin();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k) {
        wgmma<0>(sums[0], left.step(k),
                 descriptor(slab.base) + (k / 4 * slab.PANEL_BYTES + k % 4 * 32) / 16, k > 0);
    }
    products_end_group();
#else
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k) {
        uint4 a = left.step(k);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            uint4 b =
                load_matrices(slab.at(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            mma(sums[2 * n], a, b.x, b.y);
            mma(sums[2 * n + 1], a, b.z, b.w);
        }
    }
#endif
}

// sums [16, WIDTH] += left [16, ROWS] slab.
template <int WIDTH>
__device__ __forceinline__ void product(float (&sums)[WIDTH / 8][4], const Rounded& left,
                                        const Slab<WIDTH>& slab) {
#ifdef WARPGROUP_PRODUCTS
    pin(sums);
    products_begin();
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) {
#pragma unroll
        for (int panel = 0; panel < WIDTH / PANEL; ++panel) {
            wgmma<1>(sums[8 * panel], left.steps[k],
                     descriptor(slab.base) + (panel * slab.PANEL_BYTES + k * 2048) / 16, 1);
        }
    }
    products_end_group();
#else
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) {
        uint4 a = left.steps[k];
#pragma unroll
        for (int n = 0; n < WIDTH / 16; ++n) {
            uint4 b = load_matrices_transposed(slab.at(16 * k + lane % 16, 2 * n + lane / 16));
            mma(sums[2 * n], a, b.x, b.y);
            mma(sums[2 * n + 1], a, b.z, b.w);
        }
    }
#endif
}

// Writes factor[c/2] * sums, rounded, to `rows` rows of `width` columns, through the warp's own 16
// rows of a slab, from `first` on.
template <int WIDTH>
__device__ __forceinline__ void store(const Slab<WIDTH>& slab, int first,
                                      const float (&sums)[WIDTH / 8][4], const float (&factor)[2],
                                      bf16* to, u32 stride, int rows, int width) {
    int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 pair = narrow_pair(sums[n][2 * h] * factor[h], sums[n][2 * h + 1] * factor[h]);
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(slab.at(first + lane / 4 + 8 * h, n) +
                                                         lane % 4 * 4),
                         "r"(pair)
                         : "memory");
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i) {
        int row = (i * 32 + lane) / (WIDTH / 8), chunk = lane % (WIDTH / 8);
        uint4 eight;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                     : "r"(slab.at(first + row, chunk))
                     : "memory");
        if (first + row < rows && chunk * 8 < width)
            *reinterpret_cast<uint4*>(to + u64(first + row) * stride + chunk * 8) = eight;
    }
    __syncwarp();
}

// The arguments that all kernels share: sizes, the mask, and the stream of dropout. Query i of
// sequence b sees keys 0 ..= i + diagonal, of the first lengths[b] keys if there are lengths.
struct Attention {
    u32 heads;
    int queries, keys, width, diagonal;
    float scale;
    const StepState* state;
    u32 site;
    float dropped;
    u32* kept;
    const u32* lengths;
};

// The same as parameters of a kernel, and made of them.
#define SHARED_PARAMETERS                                                                          \
    u32 heads, u32 of_queries, u32 of_keys, u32 width, u32 diagonal, float scale,                  \
        const StepState *state, u32 site, float dropped, u32 *kept, const u32 *lengths
#define SHARED                                                                                     \
    {heads, int(of_queries), int(of_keys), int(width), int(diagonal), scale, state,                \
     site,  dropped,         kept,         lengths}

// Keys of a sequence that its queries may see: all, or its first ones.
struct AllKeys {
    static constexpr bool LIMITED = false;
    static __device__ __forceinline__ int of(const Attention& of, u64) { return of.keys; }
};
struct FirstKeys {
    static constexpr bool LIMITED = true;
    static __device__ __forceinline__ int of(const Attention& of, u64 sequence) {
        return int(min(of.lengths[sequence], u32(of.keys)));
    }
};

// How many of the first `keys` keys a query sees.
__device__ __forceinline__ int visible_keys(const Attention& of, int query, int keys) {
    return min(max(query + 1 + of.diagonal, 0), keys);
}

// The sequence, head and piece that a block works on. Blocks that run at the same time share at
// most MOST heads, whose operands stay in the L2; within those, pieces are in order, so that the
// last ones are the shortest.
struct Place {
    static constexpr int MOST = 32;
    int task, piece;
    __device__ __forceinline__ explicit Place(int pieces) {
        int tasks = gridDim.x / pieces, turns = (tasks + MOST - 1) / MOST,
            together = (tasks + turns - 1) / turns;
        int first = int(blockIdx.x) / (together * pieces) * together,
            inside = int(blockIdx.x) - first * pieces;
        together = min(together, tasks - first);
        task = first + inside % together;
        piece = inside / together;
    }
};

// Which probabilities of a thread are kept: bit 4*n + c for element [n][c], of a tile of ROWS
// queries by ROWS keys. The forward pass draws them and leaves a word of each of its threads in
// `kept` u32 [batch*heads, tiles of queries, tiles of keys, THREADS]; the backward pass reads them.
struct KeepAll {
    struct Words {};
    __device__ __forceinline__ explicit KeepAll(const Attention&, int) {}
    __device__ __forceinline__ float scale() const { return 1.0f; }
    __device__ __forceinline__ u32 draw(int, int) const { return ~0u; }
    __device__ __forceinline__ u32 rows_are_queries(int, int) const { return ~0u; }
    __device__ __forceinline__ Words load(int, int) const { return {}; }
    __device__ __forceinline__ static u32 rows_are_keys(Words) { return ~0u; }
    __device__ __forceinline__ static float apply(u32, int, float x) { return x; }
};
struct Dropout {
    struct Words {
        u32 of[8];
    };
    const Attention& of;
    StepState state;
    // The least word whose uniform is at least `dropped`: both have 24 bits.
    u32 threshold;
    // The first element of the task, as sparse24_cpu numbers them.
    u64 first;
    int key_tiles;
    // The task's words.
    u32* kept;

    __device__ __forceinline__ Dropout(const Attention& of, int task)
        : of(of),
          state(*of.state),
          threshold(u32(ceilf(of.dropped * 0x1p24f)) << 8),
          first(u64(task) * of.queries * of.keys),
          key_tiles((of.keys + ROWS - 1) / ROWS),
          kept(of.kept + u64(task) * ((of.queries + ROWS - 1) / ROWS) * key_tiles * THREADS) {}
    __device__ __forceinline__ float scale() const { return 1.0f / (1.0f - of.dropped); }
    __device__ __forceinline__ u32* tile(int query_tile, int key_tile) const {
        return kept + (u64(query_tile) * key_tiles + key_tile) * THREADS;
    }
    // For four consecutive elements, bit 0 for the first.
    __device__ __forceinline__ u32 call(u32 number) const {
        uint4 words = philox(state, of.site, number);
        return u32(words.x >= threshold) | u32(words.y >= threshold) << 1 |
               u32(words.z >= threshold) << 2 | u32(words.w >= threshold) << 3;
    }
    __device__ __forceinline__ u32 four(u64 element) const {
        u32 bits = call(u32(element / 4)), past = element % 4;
        if (past != 0) bits = (bits | call(u32(element / 4) + 1) << 4) >> past & 15;
        return bits;
    }
    // A lane draws four keys for one of the two rows, its neighbour for the other, and they
    // exchange.
    __device__ __forceinline__ u32 draw(int query_tile, int key_tile) const {
        u32 lane = threadIdx.x % 32, mine = 0;
        int query = query_tile * ROWS + threadIdx.x / 32 * 16 + lane / 4 + lane % 2 * 8;
        u64 element = first + u64(query) * of.keys + key_tile * ROWS + lane % 4 / 2 * 4;
#pragma unroll 2
        for (int n = 0; n < 8; ++n) mine |= four(element + 8 * n) << 4 * n;
        u32 other = __shfl_xor_sync(0xffffffffu, mine, 1), shift = lane % 2 * 2;
        u32 upper = lane % 2 ? other : mine, lower = lane % 2 ? mine : other;
        u32 word = (upper >> shift & 0x33333333) | (lower >> shift & 0x33333333) << 2;
        tile(query_tile, key_tile)[threadIdx.x] = word;
        return word;
    }
    __device__ __forceinline__ u32 rows_are_queries(int query_tile, int key_tile) const {
        return tile(query_tile, key_tile)[threadIdx.x];
    }
    // A thread whose rows are keys finds its elements in the words of eight threads whose rows are
    // queries: word 2*a + b has queries 16*a + 2*(l%4) + b and 8 more.
    __device__ __forceinline__ Words load(int query_tile, int key_tile) const {
        const u32* words = tile(query_tile, key_tile) + threadIdx.x % 4 * 8 + threadIdx.x % 32 / 8;
        Words loaded;
#pragma unroll
        for (int i = 0; i < 8; ++i) loaded.of[i] = words[i / 2 * 32 + i % 2 * 4];
        return loaded;
    }
    __device__ __forceinline__ static u32 rows_are_keys(const Words& words) {
        // After the shift, bit 2 is 8 queries after bit 0, bit 4 is 8 keys after it, bit 6 both.
        u32 shift = threadIdx.x / 32 * 8 + threadIdx.x / 4 % 2, bits = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 found = words.of[i] >> shift;
            bits |= ((found & 0x41) | (found & 4) << 2 | (found & 16) >> 2) << (i / 2 * 8 + i % 2);
        }
        return bits;
    }
    __device__ __forceinline__ static float apply(u32 bits, int i, float x) {
        return bits >> i & 1 ? x : 0.0f;
    }
};
