// Products on the tensor cores that every supported GPU has: mma.sp of a 2:4 operand, or mma of a
// dense one for comparison.
//
// A block computes tiles of D. Its threads copy A and B to a ring of stages in shared memory, 64
// long along k, while its warps multiply those that arrived. A warp has a part of the tile and
// reads its operands from shared memory just before it needs them: eight columns of B at a time,
// for all its rows of A. Blocks are persistent: the first stages of the next tile are copied while
// the last one is multiplied and stored.
//
// What the loop over stages needs is kept in registers and copied in one batch behind the barrier:
// a few instructions more between the products cost a tenth of the speed.
#pragma once
#include "spmm24.cuh"

// A value that the compiler keeps instead of computing it again where it is needed.
__device__ __forceinline__ u32 kept(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ void copy_async(bool wanted, u32 to, const void* from) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], "
                 "16;}" ::"r"(to), "l"(from), "r"(u32(wanted))
                 : "memory");
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the N latest groups of copies are done.
template <int N> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void store4(u32 shared, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements across a warp.
__device__ __forceinline__ u32 transposed_matrix(u32 x) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    return x;
}

// d[16, 8] += a[16, 32] * b[32, 8], a 2:4 with the metadata of step STEP of 64 along k.
template <u32 STEP>
__device__ __forceinline__ void mma_sparse(float* d, uint4 a, uint4 b, u32 metadata) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, "
        "%3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "{%0, %1, %2, %3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w),
          "r"(metadata), "n"(STEP));
}
// d[16, 8] += a[16, 16] * b[16, 8].
__device__ __forceinline__ void mma_dense(float* d, uint4 a, u32 b, u32 c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, "
                 "%6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b), "r"(c));
}

// A dense operand in memory: rows of k if it is STRAIGHT, or rows of its other dimension.
struct Operand {
    const char* from;
    u64 stride;         // of rows, in bytes
    u32 rows, columns;  // that exist
};

// What a thread copies of a dense operand: pieces of 16 bytes of a rectangle of 64 elements along k
// and WIDTH along the other dimension. One of the two is contiguous, in lines. Pieces that do not
// exist are not copied.
template <bool STRAIGHT, u32 WIDTH, u32 THREADS> struct Pieces {
    static constexpr u32 LINE = STRAIGHT ? WIDTH / 8 : 8, COUNT = 8 * WIDTH / THREADS,
                         LINES = THREADS / LINE;  // from one piece of a thread to the next
    static constexpr int NONE = -(1 << 30);           // stays negative along any k
    const Operand& of;
    u32 line, x, place;
    const char* at[COUNT];
    int lines, left;  // to the end of the operand: in the tile; in the stage

    __device__ __forceinline__ Pieces(const Operand& operand, u32 thread)
        : of(operand), line(thread / LINE), x(thread % LINE * 8),
          // Pieces are permuted within eight, so that neither rows nor columns share banks.
          place(kept((line * LINE + (thread % LINE ^ line % 8)) * 16)) {}

    // Goes to a tile that begins at `first` of its other dimension.
    __device__ __forceinline__ void enter(u32 first, u32 k) {
        static_assert(THREADS % LINE == 0 && LINES % 8 == 0);
        u32 y = (STRAIGHT ? k * BLOCK : first) + line, z = (STRAIGHT ? first : k * BLOCK) + x;
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) at[i] = of.from + (y + i * LINES) * of.stride + 2 * z;
        lines = STRAIGHT && z >= of.columns ? NONE : int(of.rows - y);
        limit(k);
    }
    // No more tiles.
    __device__ __forceinline__ void stop() { lines = left = NONE; }
    __device__ __forceinline__ void limit(u32 k) {
        left = STRAIGHT || k * BLOCK + x < of.columns ? lines : NONE;
    }
    __device__ __forceinline__ void advance(u32 k) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) at[i] += STRAIGHT ? BLOCK * of.stride : 2 * BLOCK;
        if (STRAIGHT) lines -= BLOCK;
        limit(k);
    }
    __device__ __forceinline__ void copy(u32 to) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
            copy_async(int(i * LINES) < left, to + place + i * THREADS * 16, at[i]);
    }
    // Writes zeros from element `tail` along k on.
    __device__ __forceinline__ void end(u32 stage, u32 tail) const {
#pragma unroll
        for (u32 i = 0; i < 4 * COUNT; ++i) {
            u32 k = STRAIGHT ? line + i / 4 * LINES : x + i % 4 * 2;
            if (k >= tail) store4(stage + place + i / 4 * THREADS * 16 + i % 4 * 4, 0);
        }
    }
};

template <Form FORM, bool DENSE, u32 WARP_ROWS, u32 WARP_COLUMNS, u32 SLABS, u32 TILES, u32 STAGES>
struct Mma {
    static constexpr bool STRAIGHT = FORM == Form::Straight;
    static constexpr u32 THREADS = 32 * WARP_ROWS * WARP_COLUMNS;
    static constexpr u32 ROWS = 16 * SLABS * WARP_ROWS, COLUMNS = 8 * TILES * WARP_COLUMNS;
    static constexpr u32 BLOCKS = ROWS / BLOCK;
    // A stage: B, A and the metadata of A.
    static constexpr u32 A = 128 * COLUMNS, M = A + (DENSE ? 128 : 64) * ROWS;
    static constexpr u32 STAGE = M + (DENSE ? 0 : METADATA * BLOCKS), BYTES = STAGES * STAGE;
    // Registers of A for 32 along k.
    static constexpr u32 HALVES = DENSE ? 2 : 1;
    // A stage is multiplied in POSITIONS: eight columns by 32 along k. B is read AHEAD of them. At
    // position SYNC the next stage must have arrived.
    static constexpr u32 POSITIONS = 2 * TILES, AHEAD = 2, RING = 4, SYNC = POSITIONS * 3 / 4;
    // Of the transposed result, tokens that a warp stores at once, and bytes from one to the next:
    // an odd number of 16, so that eight tokens have different banks.
    static constexpr u32 TOKENS = 16, PITCH = 32 * SLABS + 16;
    static_assert(WARP_ROWS * WARP_COLUMNS * TOKENS * PITCH <= STAGE);

    using Sums = float[SLABS][4 * TILES];

    const Work& work;
    const char *values, *metadata;
    u32 thread, ring, units, place_a, place_m;

    // The stage that is copied next.
    Pieces<STRAIGHT, COLUMNS, THREADS> b;
    Pieces<STRAIGHT, ROWS, THREADS> a;  // if it is dense
    u32 index, k, last, into;
    const char *at_values, *at_metadata;
    u32 blocks;  // that exist from the first of the tile

    __device__ __forceinline__ Mma(const Work& work, const Operand& a, const Operand& b,
                                   const char* values, const char* metadata, u32 thread, u32 ring)
        : work(work), values(values), metadata(metadata), thread(thread), ring(ring),
          units(units_of(work)), place_a(kept(A + thread / 128 * VALUES + thread % 128 * 16)),
          place_m(kept(M + thread * 16)), b(b, thread), a(a, thread) {}

    __device__ __forceinline__ u32 after(u32 stage) const {
        return stage + STAGE == ring + BYTES ? ring : stage + STAGE;
    }
    __device__ __forceinline__ void enter(u32 unit_index) {
        index = unit_index;
        if (index >= units || work.k_blocks == 0) {
            k = 0, last = 0xffffffffu, blocks = 0;
            b.stop(), a.stop();
            return;
        }
        Unit unit = unit_of(work, index);
        k = unit.begin, last = unit.end;
        b.enter(unit.column * COLUMNS, k);
        if constexpr (DENSE) {
            a.enter(unit.row * ROWS, k);
        } else {
            u64 first = u64(unit.row * BLOCKS) * work.k_blocks + k;
            at_values = values + (first + u64(thread / 128) * work.k_blocks) * VALUES +
                        thread % 128 * 16;
            at_metadata = metadata + (first + u64(thread / 32) * work.k_blocks) * METADATA +
                          thread % 32 * 16;
            blocks = min((work.m + BLOCK - 1) / BLOCK - unit.row * BLOCKS, BLOCKS);
        }
    }
    // Begins to copy a stage, and goes to the next. Rows beyond the operands keep what was in
    // shared memory: they only affect elements of D that do not exist.
    __device__ __forceinline__ void copy() {
        b.copy(into);
        if constexpr (DENSE) {
            a.copy(into + A);
        } else {
            // Half of a block is 128 pieces.
            constexpr u32 STEP = THREADS / 128;
#pragma unroll
            for (u32 i = 0; i < BLOCKS; i += STEP)
#pragma unroll
                for (u32 half = 0; half < VALUES; half += VALUES / 2)
                    copy_async(thread / 128 + i < blocks, into + place_a + i * VALUES + half,
                               at_values + i * u64(work.k_blocks) * VALUES + half);
            copy_async(thread / 32 < blocks, into + place_m, at_metadata);
        }
        commit_copies();
    }
    __device__ __forceinline__ void advance() {
        into = after(into);
        ++k;
        b.advance(k);
        if constexpr (DENSE)
            a.advance(k);
        else
            at_values += VALUES, at_metadata += METADATA;
        if (k == last) enter(index + gridDim.x);
    }

    // Computes all tiles of this block; `store` takes the sums, memory for it in shared memory that
    // is free until the next barrier, an index, a row and a column.
    template <typename Store> __device__ __forceinline__ void run(Store store) {
        u32 lane = thread % 32, warp = thread / 32, warp_row = warp / WARP_COLUMNS,
            warp_column = warp % WARP_COLUMNS;
        // Where this lane reads, from the beginning of a stage.
        u32 of_b = STRAIGHT ? lane * 2 * COLUMNS + ((warp_column * TILES) ^ (lane % 8)) * 16
                            : (warp_column * TILES * 8 + lane % 8) * 128 +
                                  (lane / 8 ^ lane % 8) * 16;
        u32 of_a = !DENSE     ? warp_row * SLABS * 1024 + lane * 16
                   : STRAIGHT ? (lane / 16 * 8 + lane % 8) * 2 * ROWS +
                                    ((warp_row * SLABS * 2 + lane / 8 % 2) ^ lane % 8) * 16
                              : (warp_row * SLABS * 16 + lane % 16) * 128 +
                                    (lane / 16 ^ lane % 8) * 16;
        u32 of_m = kept(M + warp_row * SLABS * 128 + lane * 4);
        of_a = kept(A + of_a), of_b = kept(of_b);
        uint4 fa[2][SLABS][HALVES], fb[RING];
        u32 fm[SLABS], next[SLABS];
        auto read_b = [&](u32 stage, u32 position) {
            u32 step = position / TILES, tile = position % TILES;
            u32 from = STRAIGHT ? ((stage + of_b) ^ (tile * 16)) + step * 64 * COLUMNS
                                : ((stage + of_b) ^ (step * 64)) + tile * 1024;
            fb[position % RING] = STRAIGHT ? load_matrices_transposed(from) : load_matrices(from);
        };
        auto read_a = [&](u32 stage, u32 step, u32 slab) {
            if constexpr (DENSE) {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    u32 from = STRAIGHT ? ((stage + of_a) ^ (slab % 4 * 32)) + slab / 4 * 128 +
                                              (step * 32 + half * 16) * 2 * ROWS
                                        : ((stage + of_a) ^ (step * 64 + half * 32)) + slab * 2048;
                    fa[step][slab][half] =
                        STRAIGHT ? load_matrices_transposed(from) : load_matrices(from);
                }
            } else {
                fa[step][slab][0] = load16(stage + of_a + slab * 1024 + step * 512);
            }
        };
        auto read_m = [&](u32 stage, u32 slab) {
            if constexpr (!DENSE) next[slab] = load4(stage + of_m + slab * 128);
        };

        enter(blockIdx.x);
        into = ring;
#pragma unroll 1
        for (u32 stage = 0; stage < STAGES - 1; ++stage) copy(), advance();
        u32 at = ring;
        wait_copies<STAGES - 2>();
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) read_b(at, i);
#pragma unroll
        for (u32 i = 0; i < SLABS; ++i) read_a(at, 0, i), read_m(at, i), fm[i] = next[i];
        // Only a sparse A may end within a block.
        u32 tail = DENSE ? 0 : (STRAIGHT ? b.of.rows : b.of.columns) % BLOCK;
#pragma unroll 1
        for (u32 unit_index = blockIdx.x; unit_index < units; unit_index += gridDim.x) {
            Unit unit = unit_of(work, unit_index);
            Sums d = {};
            u32 free = at;
#pragma unroll 1
            for (u32 left = unit.end - unit.begin; left > 0; --left) {
                if (left == 1 && tail > 0 && unit.end == work.k_blocks) {
                    // The last stage along k has elements that do not exist: zeros, lest zeros of A
                    // are multiplied by NaN.
                    __syncthreads();
                    b.end(at, tail);
                    __syncthreads();
#pragma unroll
                    for (u32 i = 0; i < AHEAD; ++i) read_b(at, i);
                }
                u32 following = after(at);
#pragma unroll
                for (u32 position = 0; position < POSITIONS; ++position) {
                    if (position == SYNC) {
                        // The next stage has arrived, and all have read the previous one.
                        wait_copies<STAGES - 3>();
                        __syncthreads();
                        copy();
                    }
                    if (position + AHEAD < POSITIONS)
                        read_b(at, position + AHEAD);
                    else
                        read_b(following, position + AHEAD - POSITIONS);
#pragma unroll
                    for (u32 i = 0; i < SLABS; ++i) {
                        if (i * (TILES - 2) / SLABS + 1 == position) read_a(at, 1, i);
                        if (SYNC + i * (POSITIONS - SYNC - 1) / SLABS == position)
                            read_a(following, 0, i), read_m(following, i);
                    }
                    uint4 y = fb[position % RING];
#pragma unroll
                    for (u32 i = 0; i < SLABS; ++i) {
                        float* sum = d[i] + position % TILES * 4;
                        if constexpr (DENSE) {
                            mma_dense(sum, fa[position / TILES][i][0], y.x, y.y);
                            mma_dense(sum, fa[position / TILES][i][HALVES - 1], y.z, y.w);
                        } else if (position < TILES) {
                            mma_sparse<0>(sum, fa[0][i][0], y, fm[i]);
                        } else {
                            mma_sparse<1>(sum, fa[1][i][0], y, fm[i]);
                        }
                    }
                }
#pragma unroll
                for (u32 i = 0; i < SLABS; ++i) fm[i] = next[i];
                free = at, at = following;
                advance();
            }
            u32 row = unit.row * ROWS + warp_row * SLABS * 16,
                column = unit.column * COLUMNS + warp_column * TILES * 8;
            store(d, free + warp * TOKENS * PITCH, unit_index, row, column);
        }
    }

    // Stores the sums of a part.
    __device__ __forceinline__ void store_part(const Sums& x, float4* partial,
                                               u32 index, u32 row, u32 column) const {
#pragma unroll
        for (u32 i = 0; i < SLABS; ++i) {
            float4* part = part_of(partial, work, index, row % ROWS / 16 + i, BLOCKS, COLUMNS) +
                           column % COLUMNS / 8 * 128;
#pragma unroll
            for (u32 j = 0; j < TILES; ++j)
                part[j * 128] =
                    make_float4(x[i][4 * j], x[i][4 * j + 1], x[i][4 * j + 2], x[i][4 * j + 3]);
        }
    }
    // Stores f32.
    __device__ __forceinline__ void store_rows(const Sums& x, u32 row, u32 column,
                                               const Rows& to) const {
#pragma unroll
        for (u32 i = 0; i < SLABS; ++i)
            store_straight(x[i], row + 16 * i, column, to, work.m, work.n);
    }
    // Stores bf16, transposed, through `shared`.
    __device__ __forceinline__ void store_transposed(const Sums& x, u32 shared,
                                                     u32 row, u32 column, const float* bias,
                                                     char* d, u64 stride) const {
        constexpr u32 PIECES = 2 * SLABS;
        u32 lane = thread % 32, own = row + lane / 4, to = shared + lane / 4 * PITCH + lane % 4 * 4;
        float added[PIECES];
#pragma unroll
        for (u32 i = 0; i < PIECES; ++i)
            added[i] = bias && own + 8 * i < work.m ? bias[own + 8 * i] : 0.0f;
#pragma unroll
        for (u32 first = 0; first < 8 * TILES; first += TOKENS) {
            __syncwarp();
#pragma unroll
            for (u32 j = 0; j < TOKENS / 8; ++j)
#pragma unroll
                for (u32 i = 0; i < PIECES; ++i) {
                    const float* z = &x[i / 2][first / 2 + 4 * j + i % 2 * 2];
                    store4(to + j * 8 * PITCH + i * 16,
                           transposed_matrix(narrow_pair(z[0] + added[i], z[1] + added[i])));
                }
            __syncwarp();
#pragma unroll
            for (u32 i = 0; i < TOKENS * PIECES; i += 32) {
                u32 token = (lane + i) / PIECES, piece = (lane + i) % PIECES,
                    feature = row + 8 * piece;
                uint4 y = load16(shared + token * PITCH + piece * 16);
                token += column + first;
                if (token >= work.n || feature >= work.m) continue;
                char* line = d + token * stride + 2 * feature;
                if (feature + 4 < work.m)
                    *reinterpret_cast<uint4*>(line) = y;
                else
                    *reinterpret_cast<uint2*>(line) = make_uint2(y.x, y.y);
            }
        }
    }
};

template <typename Product>
__device__ __forceinline__ void product_transposed(const Operand& a, const Operand& b,
                                                   const char* values, const char* metadata,
                                                   const float* bias, float4* partial, char* d,
                                                   u64 d_stride, const Work& work) {
    extern __shared__ __align__(128) unsigned char memory[];
    Product product(work, a, b, values, metadata, kept(threadIdx.x), kept(shared_address(memory)));
    product.run([&](const typename Product::Sums& x, u32 shared, u32 index, u32 row, u32 column) {
        // All warps have read the last stage.
        __syncthreads();
        if (index < work.whole)
            product.store_transposed(x, shared, row, column, bias, d, 2 * d_stride);
        else
            product.store_part(x, partial, index, row, column);
    });
}
template <typename Product>
__device__ __forceinline__ void product_straight(const Operand& a, const Operand& b,
                                                 const char* values, const char* metadata,
                                                 float4* partial, const Rows& to,
                                                 const Work& work) {
    extern __shared__ __align__(128) unsigned char memory[];
    Product product(work, a, b, values, metadata, kept(threadIdx.x), kept(shared_address(memory)));
    product.run([&](const typename Product::Sums& x, u32, u32 index, u32 row, u32 column) {
        if (index < work.whole)
            product.store_rows(x, row, column, to);
        else
            product.store_part(x, partial, index, row, column);
    });
}
