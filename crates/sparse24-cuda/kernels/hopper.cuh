// Hopper's instructions: barriers in shared memory, TMA, and the sparse warpgroup product.
#pragma once
#include "scalar.cuh"

// CUtensorMap, which the driver encodes.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
// A barrier for some of a block's warps.
__device__ __forceinline__ void named_sync(u32 name, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One arrival, and the bytes that copies will deliver.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Arrives at the same barrier of a block of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Bulk copies into shared memory, which report their bytes to a barrier; the multicast form writes
// to both blocks of a cluster of two.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap& map, u32 x, u32 y,
                                                   u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(u16(3))
        : "memory");
}
// TMA store from shared memory; elements out of bounds are dropped. One thread commits, and waits
// until all but N of its stores have been read.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 x, u32 y, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
        "r"(x), "r"(y), "r"(from)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void tma_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Orders this thread's reads and writes of shared memory, and those it knows to be done, before
// bulk copies that are started after it.
__device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8x8 matrices of bf16 pairs, each stored transposed: lane l gives the address of row l%8 of
// matrix l/8.
__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

template <int N> __device__ __forceinline__ void registers_at_most() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_at_least() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The descriptor of an operand in the 128-byte swizzle: bytes between atoms along its contiguous
// dimension, and along the other.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 strided) {
    return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(strided >> 4) << 32 |
           u64(1) << 62;
}

// d[64, COLUMNS] = a[64, 32] * b[32, COLUMNS] (+ d). a is 2:4, in registers, with its metadata in
// the lanes of half `STEP` of every four; b is in shared memory, with rows contiguous along k, or
// along n if ROWS_OF_N is 1.
#define TEN(t)                                                                                     \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t         \
    "8, %" #t "9"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
#define WGMMA_SP(columns, list, values, b_at, metadata_at, accumulate_at, step_at, transposed_at,  \
                 ...)                                                                              \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " accumulate_at                             \
                 ", 0;\n\t"                                                                        \
                 "wgmma.mma_async.sp.sync.aligned.m64n" columns "k32.f32.bf16.bf16 {" list         \
                 "}, {" values "}, " b_at ", " metadata_at ", " step_at                            \
                 ", p, 1, 1, " transposed_at ";\n\t}"                                              \
                 : __VA_ARGS__                                                                     \
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(metadata), "r"(accumulate), \
                   "n"(STEP), "n"(ROWS_OF_N))
template <int STEP, int ROWS_OF_N>
__device__ __forceinline__ void wgmma_sp(float (&d)[64], uint4 a, u64 b, u32 metadata,
                                         u32 accumulate) {
    WGMMA_SP(
        "128",
        TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", %60, %61, %62, %63",
        "%64, %65, %66, %67", "%68", "%69", "%70", "%71", "%72", D64(0));
}
template <int STEP, int ROWS_OF_N>
__device__ __forceinline__ void wgmma_sp(float (&d)[96], uint4 a, u64 b, u32 metadata,
                                         u32 accumulate) {
    WGMMA_SP("192",
             TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", " TEN(6)
             ", " TEN(7) ", " TEN(8) ", %90, %91, %92, %93, %94, %95",
             "%96, %97, %98, %99", "%100", "%101", "%102", "%103", "%104", D64(0), D16(64),
             D16(80));
}
template <int STEP, int ROWS_OF_N>
__device__ __forceinline__ void wgmma_sp(float (&d)[128], uint4 a, u64 b, u32 metadata,
                                         u32 accumulate) {
    WGMMA_SP("256",
             TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", " TEN(6)
             ", " TEN(7) ", " TEN(8) ", " TEN(9) ", " TEN(10) ", " TEN(11)
             ", %120, %121, %122, %123, %124, %125, %126, %127",
             "%128, %129, %130, %131", "%132", "%133", "%134", "%135", "%136", D64(0), D64(64));
}
#undef WGMMA_SP
#undef D64
#undef D16
#undef D4
#undef TEN

// Prevents the compiler from moving uses of accumulators across this.
template <int N> __device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
