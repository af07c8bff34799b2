// bias_grad: db = the column sums of dz, or db += them
// in   dz bf16 [p,r], rows `stride` apart; partial f32 [ceil(p/rows),r], scratch
// out  db f32 [r]
// pre  column_sums: blocks of `rows` rows and 32*width columns; a thread takes `width` columns, 1
//      or 8, and 8 only if it divides r and rows are 16-byte aligned; row_sums: blocks of 32
//      columns; outputs alias nothing
// acc  f32, fixed order: every eighth row of a block, those eight, every 32nd block, those 32
// ref  sparse24_cpu::bias::bias_grad, within the bounds of the conformance suite
#include "pdl.cuh"
#include "packed.cuh"

constexpr u32 THREADS = 256, TEAMS = 8, LANES = 32, BLOCKS = 32;

template <int WIDTH>
__device__ __forceinline__ void column_sums_of(const bf16* dz, u64 stride, float* partial, u32 p,
                                               u32 r, u32 rows) {
    __shared__ float sums[TEAMS][LANES * WIDTH + 1];
    u32 lane = threadIdx.x % LANES, team = threadIdx.x / LANES,
        column = (blockIdx.x * LANES + lane) * WIDTH;
    pdl_wait();
    u32 first = blockIdx.y * rows + team, last = min(p, (blockIdx.y + 1) * rows);
    Run<WIDTH> sum = {};
    if (column < r) {
#pragma unroll 8
        for (u32 row = first; row < last; row += TEAMS) {
            Run<WIDTH> x = load<WIDTH>(dz + row * stride + column);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum.at[i] += x.at[i];
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sums[team][i * LANES + lane] = sum.at[i];
    __syncthreads();
    for (u32 slot = threadIdx.x; slot < LANES * WIDTH; slot += THREADS) {
        u32 to = (blockIdx.x * LANES + slot / WIDTH) * WIDTH + slot % WIDTH,
            from = slot % WIDTH * LANES + slot / WIDTH;
        float all = sums[0][from];
#pragma unroll
        for (u32 i = 1; i < TEAMS; ++i) all += sums[i][from];
        if (to < r) partial[u64(blockIdx.y) * r + to] = all;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    column_sums(const bf16* dz, u64 stride, float* partial, u32 p, u32 r, u32 rows, u32 width) {
    width == 8 ? column_sums_of<8>(dz, stride, partial, p, r, rows)
               : column_sums_of<1>(dz, stride, partial, p, r, rows);
}

extern "C" __global__ void __launch_bounds__(LANES* BLOCKS)
    row_sums(const float* partial, float* db, u32 blocks, u32 r, u32 accumulate) {
    __shared__ float sums[BLOCKS][LANES];
    u32 lane = threadIdx.x % LANES, first = threadIdx.x / LANES, column = blockIdx.x * LANES + lane;
    float sum = 0.0f;
    pdl_wait();
    if (column < r) {
#pragma unroll 8
        for (u32 block = first; block < blocks; block += BLOCKS)
            sum += partial[u64(block) * r + column];
    }
    sums[first][lane] = sum;
    __syncthreads();
    if (first > 0 || column >= r) return;
#pragma unroll
    for (u32 i = 1; i < BLOCKS; ++i) sum += sums[i][lane];
    db[column] = accumulate ? db[column] + sum : sum;
}
