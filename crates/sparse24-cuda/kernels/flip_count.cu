// flip_count: *count += number of elements in which two masks differ
// in   a, b: masks of equal shape, u16 [tiles], bit 4*row+column of a 4x4 tile
// out  count u64, accumulated: zero it first
// pre  16-byte aligned; count aliases nothing
// acc  integer: exact in any order
// ref  sparse24_core::flip
#include "pdl.cuh"
#include "scalar.cuh"

extern "C" __global__ void __launch_bounds__(256)
    flip_count(const u16* a, const u16* b, u64* count, u64 tiles) {
    u64 wide = tiles / 8, threads = u64(gridDim.x) * blockDim.x,
        thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    u32 flips = 0;
    pdl_wait();
    for (u64 i = thread; i < wide; i += threads) {
        uint4 x = reinterpret_cast<const uint4*>(a)[i], y = reinterpret_cast<const uint4*>(b)[i];
        flips += __popc(x.x ^ y.x) + __popc(x.y ^ y.y) + __popc(x.z ^ y.z) + __popc(x.w ^ y.w);
    }
    if (thread < tiles % 8) flips += __popc(a[8 * wide + thread] ^ b[8 * wide + thread]);
    flips = warp_sum(flips);
    if (threadIdx.x % 32 == 0 && flips != 0) atomicAdd(count, u64(flips));
}
