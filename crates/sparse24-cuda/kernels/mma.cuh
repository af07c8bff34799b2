// Products on the tensor cores that every supported GPU has: mma.sp of a 2:4 operand, or mma of a
// dense one for comparison.
//
// A block of eight warps computes a tile of 256 rows and COLUMNS columns of D. Threads copy A and B
// to a ring of stages in shared memory, 64 long along k, while warps multiply those that arrived.
// A warp has a part of the tile and reads its operands from shared memory to registers just before
// they are needed: eight columns of B at a time, for all its rows of A. Blocks are persistent: the
// first stages of the next tile are copied while the last one is multiplied and stored.
#pragma once
#include "spmm24.cuh"

__device__ __forceinline__ void copy_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_half_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the N latest groups of copies are done.
template <int N> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8x8 matrices of bf16: lane l gives the address of row l%8 of matrix l/8, and has two
// elements of row l/4 of each, or, if they are transposed, of column l/4.
template <bool TRANSPOSED> __device__ __forceinline__ uint4 load_matrices(u32 from) {
    uint4 x;
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(from)
                     : "memory");
    return x;
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

// An operand in memory: rows of k, or rows of its other dimension.
struct Operand {
    const char* from;
    u64 stride;       // of rows, in bytes
    u32 rows, columns;  // that exist; the others count as zeros
};

template <Form FORM, bool DENSE, u32 WARP_ROWS, u32 WARP_COLUMNS, u32 SLABS, u32 TILES, u32 STAGES>
struct Mma {
    static constexpr bool STRAIGHT = FORM == Form::Straight;
    static constexpr u32 WARPS = WARP_ROWS * WARP_COLUMNS, THREADS = 32 * WARPS;
    static constexpr u32 ROWS = 16 * SLABS * WARP_ROWS, COLUMNS = 8 * TILES * WARP_COLUMNS;
    static constexpr u32 BLOCKS = ROWS / BLOCK;
    // A stage: B, A and the metadata of A.
    static constexpr u32 B_BYTES = 128 * COLUMNS, A_BYTES = (DENSE ? 128 : 64) * ROWS;
    static constexpr u32 A = B_BYTES, M = A + A_BYTES;
    static constexpr u32 STAGE = M + (DENSE ? 0 : METADATA * BLOCKS), BYTES = STAGES * STAGE;
    // Registers of A for 32 along k.
    static constexpr u32 HALVES = DENSE ? 2 : 1;
    // A stage is multiplied in POSITIONS: eight columns by 32 along k. B is read AHEAD of them.
    static constexpr u32 POSITIONS = 2 * TILES, AHEAD = 2, RING = 4, LAST = POSITIONS - AHEAD;

    const Work& work;
    Operand a, b;           // a: only if it is dense
    const char *values, *metadata;
    u32 wide;               // whether rows are 16-byte aligned
    u32 ring, units;

    // The stage that is copied next.
    u32 index, k, end;
    u32 row, column;  // of its tile, in elements
    u32 into;
    bool quick, careful;  // whether it lies within the operands; whether it does not
    // What this thread copies of it first, if it is quick.
    const char *at_a, *at_b, *at_m;

    __device__ __forceinline__ u32 after(u32 stage) const {
        return stage + STAGE == ring + BYTES ? ring : stage + STAGE;
    }

    // A piece of 16 bytes is at `part` of a line. An operand has 64 elements along k and WIDTH
    // along its other dimension, and one of them is contiguous.
    template <u32 WIDTH> struct Pieces {
        static constexpr u32 LINE = STRAIGHT ? WIDTH / 8 : 8, COUNT = 8 * WIDTH / THREADS,
                             LINES = THREADS / LINE;  // from one piece of a thread to the next
        static_assert(THREADS % LINE == 0 && LINES % 8 == 0);
        // Pieces are permuted within eight, so that neither rows nor columns of them share banks.
        static __device__ __forceinline__ u32 place(u32 to, u32 i) {
            u32 line = threadIdx.x / LINE, part = threadIdx.x % LINE;
            return to + (line * LINE + (part ^ line % 8) + i * THREADS) * 16;
        }
    };
    // The thread's first piece of an operand that begins at `first` of its other dimension.
    template <u32 WIDTH>
    __device__ __forceinline__ const char* first_piece(const Operand& of, u32 first) const {
        u32 line = threadIdx.x / Pieces<WIDTH>::LINE, part = threadIdx.x % Pieces<WIDTH>::LINE;
        u32 y = (STRAIGHT ? k * BLOCK : first) + line,
            x = (STRAIGHT ? first : k * BLOCK) + 8 * part;
        return of.from + y * of.stride + 2 * x;
    }
    // The same, with zeros out of bounds.
    template <u32 WIDTH>
    __device__ __forceinline__ void copy_carefully(u32 to, const Operand& of, u32 first) const {
        u32 line = threadIdx.x / Pieces<WIDTH>::LINE, part = threadIdx.x % Pieces<WIDTH>::LINE;
        u32 y = (STRAIGHT ? k * BLOCK : first) + line,
            x = (STRAIGHT ? first : k * BLOCK) + 8 * part;
#pragma unroll 1
        for (u32 i = 0; i < Pieces<WIDTH>::COUNT; ++i, y += Pieces<WIDTH>::LINES) {
            u32 bytes = y < of.rows && x < of.columns ? 2 * min(of.columns - x, 8u) : 0;
            const char* from = of.from + (bytes ? y * of.stride + 2 * x : 0);
            u32 place = Pieces<WIDTH>::place(to, i);
            if (wide) {
                copy_async(place, from, bytes);
            } else {
                copy_half_async(place, from, min(bytes, 8u));
                copy_half_async(place + 8, from + (bytes > 8 ? 8 : 0), bytes > 8 ? 8 : 0);
            }
        }
    }
    // In a tile that extends beyond the matrix, the last block replaces those that do not exist;
    // their rows are not stored.
    __device__ __forceinline__ u64 block_at(u32 i) const {
        u32 block_rows = (work.m + BLOCK - 1) / BLOCK;
        return u64(min(row / BLOCK + i, block_rows - 1)) * work.k_blocks + k;
    }
    __device__ __forceinline__ void copy_carefully() const {
        copy_carefully<COLUMNS>(into, b, column);
        if constexpr (DENSE) {
            copy_carefully<ROWS>(into + A, a, row);
        } else {
#pragma unroll 1
            for (u32 piece = threadIdx.x; piece < A_BYTES / 16; piece += THREADS)
                copy_async(into + A + piece * 16,
                           values + block_at(piece / 256) * VALUES + piece % 256 * 16, 16);
            if (threadIdx.x < BLOCKS * 32)
                copy_async(into + M + threadIdx.x * 16,
                           metadata + block_at(threadIdx.x / 32) * METADATA + threadIdx.x % 32 * 16,
                           16);
        }
    }

    __device__ __forceinline__ void enter(u32 unit_index) {
        index = unit_index;
        quick = careful = false;
        if (index >= units) return;
        Unit unit = unit_of(work, index);
        row = unit.row * ROWS, column = unit.column * COLUMNS, k = unit.begin, end = unit.end;
        at_b = first_piece<COLUMNS>(b, column);
        if constexpr (DENSE) {
            at_a = first_piece<ROWS>(a, row);
        } else {
            at_a = values + block_at(threadIdx.x / 256) * VALUES + threadIdx.x % 256 * 16;
            at_m = metadata + block_at(threadIdx.x / 32) * METADATA + threadIdx.x % 32 * 16;
        }
        choose();
    }
    __device__ __forceinline__ void choose() {
        u32 b_columns = STRAIGHT ? b.columns : b.rows, k_rows = STRAIGHT ? b.rows : b.columns;
        quick = wide && row + (DENSE ? ROWS : ROWS - BLOCK + 1) <= work.m &&
                column + COLUMNS <= b_columns && (k + 1) * BLOCK <= k_rows;
        careful = !quick;
    }

    static constexpr u32 OF_B = Pieces<COLUMNS>::COUNT, OF_A = A_BYTES / 16 / THREADS;
    static constexpr u32 COPIES = OF_B + OF_A + (DENSE ? 0 : 1);

    // One of COPIES copies that fill a stage.
    __device__ __forceinline__ void copy(u32 i) const {
        if (i == 0 && careful) copy_carefully();
        if (!quick) return;
        if (i < OF_B) {
            copy_async(Pieces<COLUMNS>::place(into, i),
                       at_b + i * Pieces<COLUMNS>::LINES * b.stride, 16);
        } else if constexpr (DENSE) {
            copy_async(Pieces<ROWS>::place(into + A, i - OF_B),
                       at_a + (i - OF_B) * Pieces<ROWS>::LINES * a.stride, 16);
        } else if (i < OF_B + OF_A) {
            u32 piece = (i - OF_B) * THREADS;
            copy_async(into + A + (threadIdx.x + piece) * 16,
                       at_a + u64(piece / 256) * work.k_blocks * VALUES + piece % 256 * 16, 16);
        } else if (threadIdx.x < BLOCKS * 32) {
            copy_async(into + M + threadIdx.x * 16, at_m, 16);
        }
    }
    __device__ __forceinline__ void copied() {
        commit_copies();
        into = after(into);
        if (index >= units) return;
        if (++k == end) {
            enter(index + gridDim.x);
            return;
        }
        at_b += STRAIGHT ? BLOCK * b.stride : 2 * BLOCK;
        if (DENSE)
            at_a += STRAIGHT ? BLOCK * a.stride : 2 * BLOCK;
        else
            at_a += VALUES, at_m += METADATA;
        choose();
    }

    static constexpr u32 SLABS_OF_WARP = SLABS;
    // Stores the sums of a part.
    __device__ __forceinline__ void store_part(const float (&x)[SLABS][4 * TILES], float4* partial,
                                               u32 index, u32 at_row, u32 at_column) const {
#pragma unroll
        for (u32 i = 0; i < SLABS; ++i) {
            float4* part =
                part_of(partial, work, index, at_row % ROWS / 16 + i, COLUMNS) +
                at_column % COLUMNS / 8 * 128;
#pragma unroll
            for (u32 j = 0; j < TILES; ++j)
                part[j * 128] = make_float4(x[i][4 * j], x[i][4 * j + 1], x[i][4 * j + 2],
                                            x[i][4 * j + 3]);
        }
    }

    // Computes all tiles of this block; `store` takes the sums, an index and a unit.
    template <typename Store> __device__ __forceinline__ void run(Store store) {
        u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp / WARP_COLUMNS,
            warp_column = warp % WARP_COLUMNS;
        // Where this lane reads, from the beginning of a stage.
        u32 of_b = STRAIGHT ? lane * 2 * COLUMNS + ((warp_column * TILES) ^ (lane % 8)) * 16
                            : (warp_column * TILES * 8 + lane % 8) * 128 +
                                  (lane / 8 ^ lane % 8) * 16;
        u32 of_a;
        if (DENSE)
            of_a = A + (STRAIGHT ? (lane / 16 * 8 + lane % 8) * 2 * ROWS +
                                       ((warp_row * SLABS * 2 + lane / 8 % 2) ^ lane % 8) * 16
                                 : (warp_row * SLABS * 16 + lane % 16) * 128 +
                                       (lane / 16 ^ lane % 8) * 16);
        else
            of_a = A + warp_row * SLABS * 1024 + lane * 16;
        u32 of_m = M + warp_row * SLABS * 128 + lane * 4;
        uint4 fa[2][SLABS][HALVES], fb[RING];
        u32 fm[SLABS], next[SLABS];
        auto read_b = [&](u32 stage, u32 position) {
            u32 step = position / TILES, tile = position % TILES;
            u32 from = STRAIGHT ? ((stage + of_b) ^ (tile * 16)) + step * 64 * COLUMNS
                                : ((stage + of_b) ^ (step * 64)) + tile * 1024;
            fb[position % RING] = load_matrices<STRAIGHT>(from);
        };
        auto read_a = [&](u32 stage, u32 step, u32 slab) {
            if constexpr (DENSE) {
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    u32 from = STRAIGHT ? ((stage + of_a) ^ (slab % 4 * 32)) + slab / 4 * 128 +
                                              (step * 32 + half * 16) * 2 * ROWS
                                        : ((stage + of_a) ^ (step * 64 + half * 32)) + slab * 2048;
                    fa[step][slab][half] = load_matrices<STRAIGHT>(from);
                }
            } else {
                fa[step][slab][0] = load16(stage + of_a + slab * 1024 + step * 512);
            }
        };
        auto read_m = [&](u32 stage, u32 slab) {
            if constexpr (!DENSE) next[slab] = load4(stage + of_m + slab * 128);
        };

        enter(work.k_blocks == 0 ? units : blockIdx.x);
        into = ring;
#pragma unroll 1
        for (u32 stage = 0; stage < STAGES - 1; ++stage) {
#pragma unroll
            for (u32 i = 0; i < COPIES; ++i) copy(i);
            copied();
        }
        u32 at = ring;
        wait_copies<STAGES - 2>();
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) read_b(at, i);
#pragma unroll
        for (u32 i = 0; i < SLABS; ++i) read_a(at, 0, i), read_m(at, i), fm[i] = next[i];
#pragma unroll 1
        for (u32 unit_index = blockIdx.x; unit_index < units; unit_index += gridDim.x) {
            Unit unit = unit_of(work, unit_index);
            float d[SLABS][4 * TILES] = {};
#pragma unroll 1
            for (u32 left = unit.end - unit.begin; left > 0; --left) {
                u32 following = after(at);
#pragma unroll
                for (u32 position = 0; position < POSITIONS; ++position) {
                    // The stage before this one is free: all have read it.
#pragma unroll
                    for (u32 i = 0; i < COPIES; ++i)
                        if (i * LAST / COPIES == position) copy(i);
                    if (position == LAST) {
                        copied();
                        wait_copies<STAGES - 2>();
                        __syncthreads();
                    }
                    if (position < LAST)
                        read_b(at, position + AHEAD);
                    else
                        read_b(following, position + AHEAD - POSITIONS);
#pragma unroll
                    for (u32 i = 0; i < SLABS; ++i) {
                        if (i * (TILES - 2) / SLABS + 1 == position) read_a(at, 1, i);
                        if (LAST + i * AHEAD / SLABS == position)
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
                at = following;
            }
            store(d, unit_index, unit.row * ROWS + warp_row * SLABS * 16,
                  unit.column * COLUMNS + warp_column * TILES * 8);
        }
    }
};

// Stores bf16, transposed: 16 SLABS rows and 2 N columns of D that begin at row, column. A lane has
// eight features of every fourth token. Unless rows are wide, they are only aligned for four.
template <u32 SLABS, u32 N>
__device__ __forceinline__ void store_transposed(const float (&x)[SLABS][N], u32 row, u32 column,
                                                 const float* bias, char* d, u64 stride, u32 m,
                                                 u32 n, bool wide) {
    u32 lane = threadIdx.x % 32, own = row + lane / 4;
    float added[2 * SLABS];
#pragma unroll
    for (u32 i = 0; i < 2 * SLABS; ++i)
        added[i] = bias && own + 8 * i < m ? bias[own + 8 * i] : 0.0f;
#pragma unroll
    for (u32 j = 0; j < N; j += 4) {
        u32 token = column + 2 * j + lane / 4;
        char* line = d + token * stride;
#pragma unroll
        for (u32 i = 0; i < 2 * SLABS; i += 4) {
            u32 y[4];
#pragma unroll
            for (u32 l = 0; l < 4; ++l) {
                const float* z = &x[(i + l) / 2][j + l % 2 * 2];
                y[l] = transposed_matrix(narrow_pair(z[0] + added[i + l], z[1] + added[i + l]));
            }
            // Four lanes transpose what they have of one token: 2 of each 8 of 32 features.
#pragma unroll
            for (u32 apart = 1; apart < 4; apart *= 2) {
                bool odd = lane & apart;
#pragma unroll
                for (u32 l = 0; l < 4; ++l) {
                    if (l & apart) continue;
                    u32 take = __shfl_xor_sync(0xffffffffu, odd ? y[l] : y[l + apart], apart);
                    if (odd) y[l] = take;
                    else y[l + apart] = take;
                }
            }
            u32 feature = row + 8 * i + lane % 4 * 8;
            if (token >= n || feature >= m) continue;
            char* to = line + 2 * feature;
            if (wide && feature + 4 < m) {
                *reinterpret_cast<uint4*>(to) = make_uint4(y[0], y[1], y[2], y[3]);
            } else {
                *reinterpret_cast<uint2*>(to) = make_uint2(y[0], y[1]);
                if (feature + 4 < m)
                    *reinterpret_cast<uint2*>(to + 8) = make_uint2(y[2], y[3]);
            }
        }
    }
}

// Whether rows at these addresses, so many bytes apart, are all 16-byte aligned.
__device__ __forceinline__ bool all_wide(const Operand& a, const Operand& b, const void* d,
                                         u64 d_bytes) {
    return ((u64(a.from) | a.stride | u64(b.from) | b.stride | u64(d) | d_bytes) & 15) == 0;
}

template <typename Product>
__device__ __forceinline__ void product_transposed(Operand a, Operand b, const char* values,
                                                   const char* metadata, const float* bias,
                                                   float4* partial, char* d, u64 d_stride,
                                                   const Work& work) {
    extern __shared__ __align__(128) unsigned char memory[];
    bool wide = all_wide(a, b, d, 2 * d_stride);
    Product product{work, a, b, values, metadata, wide, shared_address(memory), units_of(work)};
    product.run([&](auto& x, u32 index, u32 row, u32 column) {
        if (index < work.whole)
            store_transposed(x, row, column, bias, d, 2 * d_stride, work.m, work.n, wide);
        else
            product.store_part(x, partial, index, row, column);
    });
}
template <typename Product>
__device__ __forceinline__ void product_straight(Operand a, Operand b, const char* values,
                                                 const char* metadata, float4* partial,
                                                 const Rows& to, const Work& work) {
    extern __shared__ __align__(128) unsigned char memory[];
    bool wide = all_wide(a, b, to.d, 4 * to.stride);
    Product product{work, a, b, values, metadata, wide, shared_address(memory), units_of(work)};
    product.run([&](auto& x, u32 index, u32 row, u32 column) {
        if (index < work.whole) {
#pragma unroll
            for (u32 i = 0; i < Product::SLABS_OF_WARP; ++i)
                store_straight(x[i], row + 16 * i, column, to, work.m, work.n, wide);
        } else {
            product.store_part(x, partial, index, row, column);
        }
    });
}
