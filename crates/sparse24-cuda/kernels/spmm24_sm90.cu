// spmm24_sm90: the product D[m,n] = decode(A)[m,k] * B[k,n] on Hopper's sparse tensor cores
//   spmm24_transposed_*  B given as rows of k, D as rows of m: bf16, D^T = (A B)^T + bias; those
//                        named after an activation also store H = act(D^T), of the rounded D^T
//   spmm24_straight_*    B given as rows of n, D as rows of n: f32, overwritten or added to
// in   A: values bf16, FragmentMajor; metadata u32, LaneMajor; m/64 x k/64 blocks. B bf16, and D of
//      transposed, by tensor map. bias f32 [m] or null
// out  D as above, and H; partial f32, one fragment of 64 rows after the other
// pre  k > 0; m of transposed and n of straight multiples of 4; rows 16-byte aligned; D, H and
//      partial alias nothing; a cluster of two blocks
// acc  f32, fixed order: bitwise repeatable for one plan
// ref  sparse24_cpu::spmm24; bound: tests/gpu/spmm24.rs
#include "activation.cuh"
#include "hopper.cuh"
#include "spmm24.cuh"

// One warp of each block copies A and B into a ring of stages, and two warpgroups consume them. A
// block computes 128 rows and COLUMNS columns of D: a warpgroup has 64 rows, whose A each lane
// loads into registers (its 16 bytes are contiguous) while the previous product runs. The tensor
// cores read B from shared memory at its full bandwidth, so every load of A costs them time: a
// block is therefore as wide as registers allow, in two instructions of columns each, which read
// the same registers of A. The two blocks of a cluster, a pair, are vertical neighbours and share
// B.

// Consumer warpgroups, with a block of rows each.
constexpr u32 CONSUMERS = 2, BLOCKS = CONSUMERS, THREADS = 128 * (CONSUMERS + 1);

// Where results go: through a tensor map, or to rows of floats; and activated ones.
struct Result {
    const TensorMap& map;
    Target activated;
    const float* bias;
    Rows rows;
    float4* partial;
};

// Where a fragment of 64 rows and COLUMNS columns of D belongs.
struct Corner {
    u32 row, column;  // of its first element
    u32 slab, lane;   // the warp's 16 rows of it
};

// Stores the activation of a warp's 16 features of a chunk, 32 bytes a token. Eight lanes have both
// halves of every other token, which are in different banks.
template <class A, u32 CHUNK>
__device__ __forceinline__ void store_activated(u32 chunk, u32 row, u32 column, const Corner& at,
                                                const Target& to, u32 m, u32 n) {
    u32 token = at.lane / 16 * 8 + at.lane / 2 % 4 * 2 + at.lane / 8 % 2,
        half = at.slab * 2 + at.lane % 2, from = chunk + token * 128 + ((half ^ token % 8) * 16);
    row += 8 * half, column += token;
    char* h = to.at + (column * to.stride + row) * 2;
#pragma unroll 1
    for (u32 i = 0; i < CHUNK / 16; ++i, from += 16 * 128, column += 16, h += 32 * to.stride) {
        uint4 z = load16(from);
        z = make_uint4(activated<A>(z.x), activated<A>(z.y), activated<A>(z.z), activated<A>(z.w));
        if (column >= n || row >= m) continue;
        if (row + 8 <= m)
            *reinterpret_cast<uint4*>(h) = z;
        else
            *reinterpret_cast<uint2*>(h) = make_uint2(z.x, z.y);
    }
}

// Stores bf16, transposed, CHUNK columns at a time through one of CHUNKS buffers, which TMA
// empties, and their activation.
template <class A, u32 COLUMNS, u32 CHUNK, u32 CHUNKS>
__device__ __forceinline__ void store_transposed(const float (&x)[COLUMNS / 2], const Corner& at,
                                                 const Result& to, u32 m, u32 n, u32 warpgroup,
                                                 u32 buffers, u32& buffer) {
    u32 row = at.row + at.slab * 16 + at.lane / 4;
    float low = to.bias && row < m ? to.bias[row] : 0.0f,
          high = to.bias && row + 8 < m ? to.bias[row + 8] : 0.0f;
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column += CHUNK) {
        u32 chunk = buffers + buffer * CHUNK * 128;
        if (threadIdx.x % 128 == 0) tma_stores_read<CHUNKS - 1>();
        named_sync(1 + warpgroup, 128);
        u32 line = chunk + ((at.lane / 16) * 8 + at.lane % 8) * 128 +
                   (((at.slab * 2 + at.lane / 8 % 2) ^ (at.lane % 8)) * 16);
#pragma unroll
        for (u32 j = 0; j < CHUNK / 16; ++j) {
            const float* y = x + column / 2 + 8 * j;
            store_matrices(line + j * 16 * 128, narrow_pair(y[0] + low, y[1] + low),
                           narrow_pair(y[2] + high, y[3] + high),
                           narrow_pair(y[4] + low, y[5] + low),
                           narrow_pair(y[6] + high, y[7] + high));
        }
        proxy_fence();
        named_sync(1 + warpgroup, 128);
        if (threadIdx.x % 128 == 0) tma_store(to.map, at.row, at.column + column, chunk);
        if constexpr (!is_none<A>)
            store_activated<A, CHUNK>(chunk, at.row, at.column + column, at, to.activated, m, n);
        if (++buffer == CHUNKS) buffer = 0;
    }
}

// Columns that the first instruction computes; a second one computes the rest.
__device__ constexpr u32 first_columns(u32 columns) { return columns <= 256 ? columns : 192; }

template <Form FORM, class A, u32 COLUMNS, u32 STAGES, u32 CHUNK, u32 CHUNKS> struct Kernel {
    static constexpr u32 FIRST = first_columns(COLUMNS), SECOND = COLUMNS - FIRST;
    // A stage: B, the values of A, its metadata, and two barriers, full and empty.
    static constexpr u32 B_BYTES = COLUMNS * 128, BYTES = B_BYTES + BLOCKS * (VALUES + METADATA);
    static constexpr u32 FULL = BYTES, EMPTY = BYTES + 8, STAGE = BYTES + 1024;

    const Work& work;
    u32 ring, ring_end, rank, units;
    u32 at, phase;

    __device__ __forceinline__ void advance() {
        at += STAGE;
        if (at == ring_end) at = ring, phase ^= 1;
    }
    __device__ __forceinline__ u32 previous() const {
        return at == ring ? ring_end - STAGE : at - STAGE;
    }
    __device__ __forceinline__ u32 first_block(const Unit& unit) const {
        return (2 * unit.row + rank) * BLOCKS;
    }
    // Releases the stage to both blocks, because both fill it. Every warp does so once its own
    // reads are done: those of every lane come before what is copied there.
    __device__ __forceinline__ void release(u32 stage, u32 lane) const {
        proxy_fence();
        __syncwarp();
        if (lane < 2) barrier_arrive(stage + EMPTY, lane);
    }

    __device__ __forceinline__ void produce(const TensorMap& b, const char* values,
                                            const char* metadata) {
        // Each lane copies one thing: the values of a block, its metadata, or a TMA box of B: half
        // of its rows, or every other 64 columns.
        constexpr u32 BOXES = FORM == Form::Transposed ? 2 : COLUMNS / 64;
        u32 lane = threadIdx.x % 32, block = lane % BLOCKS, box = lane - 2 * BLOCKS,
            block_rows = (work.m + BLOCK - 1) / BLOCK;
        bool brings_b = lane >= 2 * BLOCKS && box < BOXES && box % 2 == rank;
        u32 bytes = lane < BLOCKS ? VALUES : METADATA,
            offset = B_BYTES + (lane < BLOCKS ? 0 : BLOCKS * VALUES) + block * bytes;
        for (u32 index = blockIdx.x / 2; index < units; index += gridDim.x / 2) {
            Unit unit = unit_of(work, index);
            // In a tile that extends beyond the matrix, the last block replaces those that do not
            // exist; their rows are not stored.
            u64 first =
                u64(min(first_block(unit) + block, block_rows - 1)) * work.k_blocks + unit.begin;
            const char* from = (lane < BLOCKS ? values : metadata) + first * bytes;
            u32 n = unit.column * COLUMNS;
            for (u32 k = unit.begin; k < unit.end; ++k, from += bytes, advance()) {
                u32 full = at + FULL;
                barrier_wait(at + EMPTY, phase ^ 1);
                if (lane == 0) barrier_expect(full, BYTES);
                if (lane < 2 * BLOCKS) bulk_load(at + offset, from, bytes, full);
                if (brings_b) {
                    if constexpr (FORM == Form::Transposed)
                        tma_load_multicast(at + box * (B_BYTES / 2), b, 64 * k,
                                           n + box * (COLUMNS / 2), full);
                    else
                        tma_load_multicast(at + 8192 * box, b, n + 64 * box, 64 * k, full);
                }
                __syncwarp();
            }
        }
    }

    // Stores some columns of a warpgroup's sums: unreduced if they are a part of a split tile.
    template <u32 WIDTH>
    __device__ __forceinline__ void store(const float (&x)[WIDTH / 2], u32 first, u32 index,
                                          Corner at, u32 warpgroup, const Result& to,
                                          u32& buffer) const {
        at.column += first;
        if (index >= work.whole) {
            u32 block = rank * BLOCKS + warpgroup;
            float4* part = part_of(to.partial, work, index, 4 * block + at.slab, 2 * BLOCKS,
                                   COLUMNS) +
                           first / 8 * 128;
#pragma unroll
            for (u32 j = 0; j < WIDTH / 8; ++j)
                part[j * 128] = make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
        } else if constexpr (FORM == Form::Transposed) {
            store_transposed<A, WIDTH, CHUNK, CHUNKS>(
                x, at, to, work.m, work.n, warpgroup,
                ring_end + warpgroup * CHUNKS * CHUNK * 128, buffer);
        } else {
            store_straight(x, at.row + at.slab * 16, at.column, to.rows, work.m, work.n);
        }
    }

    __device__ __forceinline__ void consume(u32 warpgroup, u32 slab, const Result& to) {
        constexpr int ROWS_OF_N = FORM == Form::Straight;
        constexpr u32 LEADING = ROWS_OF_N ? 8192 : 16, STEP = ROWS_OF_N ? 4096 / 16 : 64 / 16;
        u32 lane = threadIdx.x % 32, block_rows = (work.m + BLOCK - 1) / BLOCK, buffer = 0;
        float d0[FIRST / 2], d1[SECOND / 2 + !SECOND];
        for (u32 index = blockIdx.x / 2; index < units; index += gridDim.x / 2) {
            Unit unit = unit_of(work, index);
            u32 block = first_block(unit) + warpgroup, steps = unit.end - unit.begin, k = 0;
            if (block >= block_rows) {
                for (; k < steps; ++k, advance()) {
                    barrier_wait(at + FULL, phase);
                    release(at, lane);
                }
                continue;
            }
            auto step = [&](u32 k) {
                u32 values = at + B_BYTES + warpgroup * VALUES + slab * 1024 + lane * 16;
                u32 metadata =
                    at + B_BYTES + BLOCKS * VALUES + warpgroup * METADATA + slab * 128 + lane * 4;
                u64 b = descriptor(at, LEADING, 1024), c = b + FIRST * 128 / 16;
                barrier_wait(at + FULL, phase);
                uint4 low = load16(values), high = load16(values + 512);
                u32 pattern = load4(metadata);
                wgmma_fence();
                wgmma_sp<0, ROWS_OF_N>(d0, low, b, pattern, k);
                wgmma_sp<1, ROWS_OF_N>(d0, high, b + STEP, pattern, 1);
                wgmma_commit();
                wgmma_wait<1>();
                if (k > 0) release(previous(), lane);
                if constexpr (SECOND > 0) {
                    wgmma_fence();
                    wgmma_sp<0, ROWS_OF_N>(d1, low, c, pattern, k);
                    wgmma_sp<1, ROWS_OF_N>(d1, high, c + STEP, pattern, 1);
                    wgmma_commit();
                }
                advance();
            };
            // The two copies of a step use different registers for A.
#pragma unroll 1
            while (true) {
                step(k);
                if (++k == steps) break;
                step(k);
                if (++k == steps) break;
            }
            wgmma_wait<0>();
            release(previous(), lane);
            settle(d0);
            if constexpr (SECOND > 0) settle(d1);
            Corner corner = {block * BLOCK, unit.column * COLUMNS, slab, lane};
            store<FIRST>(d0, 0, index, corner, warpgroup, to, buffer);
            if constexpr (SECOND > 0)
                store<SECOND>(d1, FIRST, index, corner, warpgroup, to, buffer);
        }
        if (FORM == Form::Transposed && threadIdx.x % 128 == 0) tma_stores_read<0>();
    }
};

template <Form FORM, class A, u32 COLUMNS, u32 STAGES, u32 CHUNK, u32 CHUNKS>
__device__ __forceinline__ void spmm24(const TensorMap& b, const char* values, const char* metadata,
                                       const Result& to, const Work& work) {
    using Instance = Kernel<FORM, A, COLUMNS, STAGES, CHUNK, CHUNKS>;
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 ring = shared_address(memory), ring_end = ring + STAGES * Instance::STAGE;
    Instance kernel = {work, ring, ring_end, cluster_rank(), units_of(work), ring, 0};
    u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        for (u32 at = ring; at < ring_end; at += Instance::STAGE) {
            barrier_init(at + Instance::FULL, 1);
            barrier_init(at + Instance::EMPTY, 2 * 4 * CONSUMERS);
        }
        barrier_init_visible();
    }
    __syncthreads();
    cluster_sync();
    if (warp >= 4 * CONSUMERS) {
        registers_at_most<24>();
        if (warp == 4 * CONSUMERS) kernel.produce(b, values, metadata);
    } else {
        registers_at_least<240>();
        kernel.consume(warp / 4, warp % 4, to);
    }
    // No block exits while its neighbour may still write here or arrive at its barriers.
    cluster_sync();
}

#define ACTIVATED(name, A, columns, stages, chunk, chunks)                                         \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)             \
        name(const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap d,             \
             const char* values, const char* metadata, const float* bias, float4* partial,         \
             char* h, u64 h_stride, u32 m, u32 n, u32 k_blocks, u32 rows, u32 across, u32 sweep,   \
             u32 whole, u32 parts) {                                                               \
        spmm24<Form::Transposed, A, columns, stages, chunk, chunks>(                               \
            b, values, metadata, {d, {h, h_stride}, bias, {}, partial},                            \
            {m, n, k_blocks, rows, across, sweep, whole, parts});                                  \
    }
#define TRANSPOSED(name, columns, stages, chunk, chunks)                                           \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)             \
        name(const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap d,             \
             const char* values, const char* metadata, const float* bias, float4* partial, u32 m,  \
             u32 n, u32 k_blocks, u32 rows, u32 across, u32 sweep, u32 whole, u32 parts) {         \
        spmm24<Form::Transposed, None, columns, stages, chunk, chunks>(                            \
            b, values, metadata, {d, {}, bias, {}, partial},                                       \
            {m, n, k_blocks, rows, across, sweep, whole, parts});                                  \
    }
#define STRAIGHT(name, columns, stages)                                                            \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)             \
        name(const __grid_constant__ TensorMap b, const char* values, const char* metadata,        \
             float4* partial, float* d, u64 d_stride, u32 accumulate, u32 m, u32 n, u32 k_blocks,  \
             u32 rows, u32 across, u32 sweep, u32 whole, u32 parts) {                              \
        spmm24<Form::Straight, None, columns, stages, 16, 0>(                                      \
            b, values, metadata, {b, {}, nullptr, {d, d_stride, accumulate}, partial},             \
            {m, n, k_blocks, rows, across, sweep, whole, parts});                                  \
    }
TRANSPOSED(spmm24_transposed_384, 384, 3, 96, 2)
TRANSPOSED(spmm24_transposed_256, 256, 4, 64, 3)
ACTIVATED(spmm24_transposed_384_gelu, Gelu, 384, 3, 96, 2)
ACTIVATED(spmm24_transposed_256_gelu, Gelu, 256, 4, 64, 3)
ACTIVATED(spmm24_transposed_384_relu, Relu, 384, 3, 96, 2)
ACTIVATED(spmm24_transposed_256_relu, Relu, 256, 4, 64, 3)
STRAIGHT(spmm24_straight_384, 384, 3)
STRAIGHT(spmm24_straight_320, 320, 4)
STRAIGHT(spmm24_straight_256, 256, 5)
