// gather_rows: row i of out = row rows[i] of x, or zeros for a number of at least p
// scatter_rows: row rows[i] of dx = row i of dout, for numbers below p
// in   x, dout bf16 [*, 8 vectors]; rows u32 [count]; for scatter_rows all different
// out  out bf16 [count, 8 vectors], overwritten; dx bf16 [p, 8 vectors], other rows untouched
// pre  16-byte aligned; blocks of 256 vectors
// acc  none: bits are copied
// ref  sparse24_cpu::rows
#include "pdl.cuh"
#include "scalar.cuh"

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const uint4* x, const u32* rows, uint4* out, u64 p, u64 count, u32 vectors) {
    u64 at = u64(blockIdx.x) * THREADS + threadIdx.x, i = at / vectors;
    pdl_wait();
    if (i >= count) return;
    u64 row = rows[i];
    out[at] = row < p ? x[row * vectors + at % vectors] : make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_rows(const uint4* dout, const u32* rows, uint4* dx, u64 p, u64 count, u32 vectors) {
    u64 at = u64(blockIdx.x) * THREADS + threadIdx.x, i = at / vectors;
    pdl_wait();
    if (i >= count) return;
    u64 row = rows[i];
    if (row < p) dx[row * vectors + at % vectors] = dout[at];
}
