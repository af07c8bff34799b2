// spmm24_sm90: the product D[m,n] = decode(A)[m,k] * B[k,n] on Hopper's sparse tensor cores
//   spmm24_turned_*   B given as rows of k (K-major), D as rows of m: bf16, D^T = (A B)^T + bias; TMA stores
//   spmm24_straight_* B given as rows of n, D as rows of n: f32, overwritten or added to; the last tiles may be divided along k
//   spmm24_gather     the sums of the parts of divided tiles
// in   A: values bf16, FragmentMajor; metadata u32, LaneMajor; m/64 x k/64 blocks, padding zero. B bf16 by tensor map. bias f32 [m] or null
// out  D as above
// pre  16-byte aligned; D aliases nothing; a cluster of two blocks, a grid of at most the resident ones
// acc  f32, fixed order: bitwise repeatable for one plan and device
// ref  sparse24_cpu::spmm24; bound: tolerance::spmm24
#include "hopper.cuh"

// A tile of D is 256 rows and COLUMNS columns: four warpgroup products of 64 rows, two a consumer warpgroup. The tiles of a cluster's two
// blocks are neighbours along n and share A, or along m and share B.
enum class Share { A, B };
enum class Form { Turned, Straight };

constexpr u32 BLOCK = 64, BLOCKS = 4, VALUES = 4096, METADATA = 512;
constexpr u32 CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);

struct Work {
    u32 m, n, k_blocks;
    u32 rows, columns;  // tiles of clusters
    u32 sweep;          // rows of tiles that are swept along n together
    u32 whole, parts;   // tiles that one cluster computes; parts into which each other is divided along k
};

struct Unit {
    u32 row, column, begin, end;
};

__device__ __forceinline__ Unit unit_of(const Work& work, u32 index) {
    u32 tile = index, part = 0, parts = 1;
    if (index >= work.whole) {
        parts = work.parts;
        tile = work.whole + (index - work.whole) / parts;
        part = (index - work.whole) % parts;
    }
    u32 sweep = tile / (work.sweep * work.columns), within = tile % (work.sweep * work.columns);
    u32 high = min(work.sweep, work.rows - sweep * work.sweep);
    return {sweep * work.sweep + within % high, within / high, work.k_blocks * part / parts, work.k_blocks * (part + 1) / parts};
}

template <Form FORM, int COLUMNS, Share SHARE, int STAGES, int CHUNK, int CHUNKS, int SKEW>
__device__ __forceinline__ void spmm24(const TensorMap& b_map, const TensorMap& d_map, const char* values, const char* metadata,
                                       const float* bias, float* d, u64 d_stride, float4* partial, u32 accumulate, const Work& work) {
    constexpr u32 BOXES = FORM == Form::Turned ? 1 : (COLUMNS + 63) / 64;  // of B in a stage
    // A stage: B, the values of A, its metadata, and two barriers: it is full, and it is empty.
    constexpr u32 B_BYTES = FORM == Form::Turned ? COLUMNS * 128 : BOXES * 8192, BYTES = B_BYTES + BLOCKS * (VALUES + METADATA);
    constexpr u32 FULL = BYTES, EMPTY = BYTES + 8, STAGE = BYTES + 1024;
    constexpr u32 CHUNK_BYTES = CHUNK * 128;
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 ring = shared_address(memory), ring_end = ring + STAGES * STAGE;
    u32 rank = cluster_rank(), warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warp / 4;
    u32 units = work.whole + (work.rows * work.columns - work.whole) * work.parts;
    u32 block_rows = (work.m + BLOCK - 1) / BLOCK;
    if (threadIdx.x == 0) {
        for (u32 at = ring; at < ring_end; at += STAGE) {
            barrier_init(at + FULL, 1);
            barrier_init(at + EMPTY, 2 * 4 * CONSUMERS);
        }
        barrier_init_visible();
    }
    __syncthreads();
    cluster_sync();
    u32 at = ring, phase = 0;
    auto advance = [&] {
        at += STAGE;
        if (at == ring_end) at = ring, phase ^= 1;
    };
    if (group == CONSUMERS) {
        registers_at_most<24>();
        // Each lane of one warp brings one thing: the values of a block, its metadata, or a box of B.
        u32 lane = threadIdx.x % 32, block = lane % BLOCKS, box = lane - 2 * BLOCKS;
        bool brings_b = lane >= 2 * BLOCKS && box < BOXES, brings_a = lane < 2 * BLOCKS && (SHARE == Share::B || block / (BLOCKS / 2) == rank);
        u32 bytes = lane < BLOCKS ? VALUES : METADATA, offset = B_BYTES + (lane < BLOCKS ? 0 : BLOCKS * VALUES) + block * bytes;
        if (warp == 4 * CONSUMERS) {
            for (u32 index = blockIdx.x / 2; index < units; index += gridDim.x / 2) {
                Unit unit = unit_of(work, index);
                u32 row = SHARE == Share::B ? 2 * unit.row + rank : unit.row, column = SHARE == Share::A ? 2 * unit.column + rank : unit.column;
                // Of a tile that reaches beyond the matrix the last block stands in for those that do not exist: their rows are not stored.
                u64 first = u64(min(row * BLOCKS + block, block_rows - 1)) * work.k_blocks + unit.begin;
                const char* from = (lane < BLOCKS ? values : metadata) + first * bytes;
                for (u32 k = unit.begin; k < unit.end; ++k, from += bytes, advance()) {
                    u32 barrier = at + FULL;
                    barrier_wait(at + EMPTY, phase ^ 1);
                    if (lane == 0) barrier_expect(barrier, BYTES);
                    if (brings_a) {
                        if constexpr (SHARE == Share::A) copy_in_all(at + offset, from, bytes, barrier);
                        else copy_in(at + offset, from, bytes, barrier);
                    }
                    if (brings_b) {
                        if constexpr (FORM == Form::Turned) {
                            if constexpr (SHARE == Share::A) box_in(at, b_map, 64 * k, column * COLUMNS, barrier);
                            else box_in_all(at + rank * (B_BYTES / 2), b_map, 64 * k, column * COLUMNS + rank * (COLUMNS / 2), barrier);
                        } else {
                            u32 x = column * COLUMNS + 64 * box;
                            if constexpr (SHARE == Share::A) box_in(at + 8192 * box, b_map, x, 64 * k, barrier);
                            else box_in_all(at + 8192 * box + 4096 * rank, b_map, x, 64 * k + 32 * rank, barrier);
                        }
                    }
                    __syncwarp();
                }
            }
        }
    } else {
        registers_at_least<240>();
        constexpr int TRANSPOSED = FORM == Form::Straight;
        constexpr u32 LEADING = TRANSPOSED ? 8192 : 16, STEP = TRANSPOSED ? 4096 / 16 : 64 / 16;
        u32 lane = threadIdx.x % 32, slab = warp % 4;
        float d0[COLUMNS / 2], d1[COLUMNS / 2];
        if (SKEW > 0 && group == 1) named_sync(3, 256);
        u32 skew = SKEW > 0 && group == 0 ? SKEW : 0;
        u32 chunk = 0;
        for (u32 index = blockIdx.x / 2; index < units; index += gridDim.x / 2) {
            Unit unit = unit_of(work, index);
            u32 row = SHARE == Share::B ? 2 * unit.row + rank : unit.row, column = SHARE == Share::A ? 2 * unit.column + rank : unit.column;
            u32 first_block = row * BLOCKS + group * 2, n0 = column * COLUMNS;
            auto release = [&](u32 at) {
                if (lane < 2) barrier_arrive(at + EMPTY, lane);
            };
            if (first_block >= block_rows || n0 >= work.n) {
                for (u32 k = unit.begin; k < unit.end; ++k, advance()) {
                    barrier_wait(at + FULL, phase);
                    release(at);
                }
                if (SKEW > 0 && skew > 0) skew = 0, named_arrive(3, 256);
                continue;
            }
#pragma unroll 1
            for (u32 steps = unit.end - unit.begin, step = 0; step < steps; ++step) {
                u32 a = at + B_BYTES + group * 2 * VALUES + slab * 1024 + lane * 16;
                u32 e = at + B_BYTES + BLOCKS * VALUES + group * 2 * METADATA + slab * 128 + lane * 4;
                u64 b = descriptor(at, LEADING, 1024);
                barrier_wait(at + FULL, phase);
                {
                    uint4 low = load16(a), high = load16(a + 512);
                    u32 meta = load4(e);
                    wgmma_fence();
                    wgmma_sp<0, TRANSPOSED>(d0, low, b, meta, step);
                    wgmma_sp<1, TRANSPOSED>(d0, high, b + STEP, meta, 1);
                    wgmma_commit();
                }
                wgmma_wait<1>();
                if (step > 0) release(at == ring ? ring_end - STAGE : at - STAGE);
                {
                    uint4 low = load16(a + VALUES), high = load16(a + VALUES + 512);
                    u32 meta = load4(e + METADATA);
                    wgmma_fence();
                    wgmma_sp<0, TRANSPOSED>(d1, low, b, meta, step);
                    wgmma_sp<1, TRANSPOSED>(d1, high, b + STEP, meta, 1);
                    wgmma_commit();
                }
                wgmma_wait<1>();
                if (SKEW > 0 && skew > 0 && --skew == 0) named_arrive(3, 256);
                advance();
            }
            wgmma_wait<0>();
            release(at == ring ? ring_end - STAGE : at - STAGE);
            settle(d0);
            settle(d1);
            auto store = [&](const float(&d_block)[COLUMNS / 2], u32 block) {
                u32 r = block * BLOCK + slab * 16 + lane / 4;
                if constexpr (FORM == Form::Turned) {
                    float low = bias && r < work.m ? bias[r] : 0.0f, high = bias && r + 8 < work.m ? bias[r + 8] : 0.0f;
#pragma unroll
                    for (u32 column = 0; column < COLUMNS; column += CHUNK) {
                        u32 to = ring_end + (group * CHUNKS + chunk) * CHUNK_BYTES;
                        if (threadIdx.x % 128 == 0) boxes_read<CHUNKS - 1>();
                        named_sync(1 + group, 128);
                        u32 line = to + ((lane / 16) * 8 + lane % 8) * 128 + (((slab * 2 + lane / 8 % 2) ^ (lane % 8)) * 16);
#pragma unroll
                        for (u32 j = 0; j < CHUNK / 16; ++j) {
                            const float* x = d_block + column / 2 + 8 * j;
                            store_transposed(line + j * 16 * 128, narrow_pair(x[0] + low, x[1] + low), narrow_pair(x[2] + high, x[3] + high),
                                             narrow_pair(x[4] + low, x[5] + low), narrow_pair(x[6] + high, x[7] + high));
                        }
                        visible_to_copies();
                        named_sync(1 + group, 128);
                        if (threadIdx.x % 128 == 0) box_out(d_map, block * BLOCK, n0 + column, to);
                        if (++chunk == CHUNKS) chunk = 0;
                    }
                } else if (index >= work.whole) {
                    u64 slot = (u64(index - work.whole) * 2 + rank) * BLOCKS + (block - row * BLOCKS);
                    float4* to = partial + slot * (COLUMNS / 8) * 128 + threadIdx.x % 128;
#pragma unroll
                    for (u32 j = 0; j < COLUMNS / 8; ++j) to[j * 128] = make_float4(d_block[4 * j], d_block[4 * j + 1], d_block[4 * j + 2], d_block[4 * j + 3]);
                } else {
                    // Neighbouring lanes exchange halves, so that each has four columns of one of two products of eight.
                    u32 odd = lane & 1, c = n0 + 8 * odd + 4 * (lane % 4 / 2);
#pragma unroll
                    for (u32 j = 0; j < COLUMNS / 16; ++j) {
                        const float* x = d_block + 8 * j;
#pragma unroll
                        for (u32 h = 0; h < 2; ++h) {
                            float s0 = odd ? x[2 * h] : x[4 + 2 * h], s1 = odd ? x[2 * h + 1] : x[5 + 2 * h];
                            float k0 = odd ? x[4 + 2 * h] : x[2 * h], k1 = odd ? x[5 + 2 * h] : x[2 * h + 1];
                            s0 = __shfl_xor_sync(0xffffffffu, s0, 1), s1 = __shfl_xor_sync(0xffffffffu, s1, 1);
                            float4 out = odd ? make_float4(s0, s1, k0, k1) : make_float4(k0, k1, s0, s1);
                            if (r + 8 * h < work.m && c + 16 * j < work.n) {
                                float4* to = reinterpret_cast<float4*>(d + (r + 8 * h) * d_stride + c + 16 * j);
                                if (accumulate) {
                                    float4 old = *to;
                                    out = make_float4(old.x + out.x, old.y + out.y, old.z + out.z, old.w + out.w);
                                }
                                *to = out;
                            }
                        }
                    }
                }
            };
            store(d0, first_block);
            if (first_block + 1 < block_rows) store(d1, first_block + 1);
        }
        if (SKEW > 0 && skew > 0) named_arrive(3, 256);
        if (FORM == Form::Turned && threadIdx.x % 128 == 0) boxes_read<0>();
    }
    // Nobody leaves while its neighbour may still write here or arrive at its barriers.
    cluster_sync();
}

// Sums the parts of divided tiles, in the order of k.
extern "C" __global__ void __launch_bounds__(256)
    spmm24_gather(const float4* __restrict__ partial, float* d, u64 d_stride, u32 accumulate, u32 m, u32 n, u32 rows, u32 tiles, u32 sweep,
                  u32 whole, u32 parts, u32 columns, u32 along_n) {
    Work work = {m, n, 0, rows, tiles, sweep, whole, 1};
    u32 lines = columns / 8 * 128, i = blockIdx.x * 256 + threadIdx.x;
    if (i >= (rows * tiles - whole) * 2 * BLOCKS * lines) return;
    u32 within = i % lines, block = i / lines % BLOCKS, rank = i / lines / BLOCKS % 2, tile = i / lines / BLOCKS / 2;
    float4 sum = make_float4(0, 0, 0, 0);
    for (u32 part = 0; part < parts; ++part) {
        float4 x = partial[(((u64(tile) * parts + part) * 2 + rank) * BLOCKS + block) * lines + within];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    Unit unit = unit_of(work, whole + tile);
    u32 row = along_n ? unit.row : 2 * unit.row + rank, column = along_n ? 2 * unit.column + rank : unit.column;
    u32 lane = within % 32, r = (row * BLOCKS + block) * BLOCK + within / 32 % 4 * 16 + lane / 4, c = column * columns + within / 128 * 8 + 2 * (lane % 4);
    for (u32 h = 0; h < 2; ++h) {
        if (r + 8 * h >= m || c >= n) continue;
        float2* to = reinterpret_cast<float2*>(d + (r + 8 * h) * d_stride + c);
        float2 x = h ? make_float2(sum.z, sum.w) : make_float2(sum.x, sum.y);
        if (accumulate) x = make_float2(to->x + x.x, to->y + x.y);
        *to = x;
    }
}

#define TURNED(name, columns, share, stages, chunk, chunks, skew)                                                                                 \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)                                                     \
        name(const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap d, const char* values, const char* metadata,           \
             const float* bias, u32 m, u32 n, u32 k_blocks, u32 rows, u32 tiles, u32 sweep) {                                              \
        spmm24<Form::Turned, columns, Share::share, stages, chunk, chunks, skew>(b, d, values, metadata, bias, nullptr, 0, nullptr, 0,            \
                                                                          {m, n, k_blocks, rows, tiles, sweep, rows * tiles, 1});          \
    }
#define STRAIGHT(name, columns, share, stages, skew)                                                                                       \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)                                                     \
        name(const __grid_constant__ TensorMap b, const char* values, const char* metadata, float* d, u64 d_stride, float4* partial,       \
             u32 accumulate, u32 m, u32 n, u32 k_blocks, u32 rows, u32 tiles, u32 sweep, u32 whole, u32 parts) {                           \
        spmm24<Form::Straight, columns, Share::share, stages, 16, 0, skew>(b, b, values, metadata, nullptr, d, d_stride, partial, accumulate,  \
                                                                       {m, n, k_blocks, rows, tiles, sweep, whole, parts});                \
    }
TURNED(spmm24_turned_192a, 192, A, 4, 96, 2, 0)
TURNED(spmm24_turned_192b, 192, B, 4, 96, 2, 0)
TURNED(spmm24_turned_160a, 160, A, 4, 80, 3, 0)
TURNED(spmm24_turned_128a, 128, A, 5, 64, 3, 0)
STRAIGHT(spmm24_straight_192a, 192, A, 5, 0)
STRAIGHT(spmm24_straight_192b, 192, B, 5, 0)
STRAIGHT(spmm24_straight_128a, 128, A, 6, 0)
STRAIGHT(spmm24_straight_128b, 128, B, 6, 0)
