// Programmatic dependent launch: a kernel's blocks become resident while the previous kernel ends,
// and wait here. Until then they may prefetch what they will read.
#pragma once
#include "scalar.cuh"

// Waits until all earlier work is done. Before this, a kernel neither reads nor writes memory that
// a kernel writes. None of its loads may be a constant load (through a const __restrict__ pointer):
// those need not see what is written while it waits.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, once `place`, any number below 2^31, is known. Otherwise the compiler would compute
// addresses after the wait.
__device__ __forceinline__ void pdl_wait(u32 place) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred known;\nsetp.lt.u32 known, %0, 0x80000000;\n"
        "@known griddepcontrol.wait;}" ::"r"(place)
        : "memory");
#endif
}

// Lets blocks of the next kernel become resident where there is space, once every block of this
// kernel is. One thread calls it for its block.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Prefetches a line to the L2, where later writes update it: this is not a read.
__device__ __forceinline__ void prefetch(const void* at) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Prefetches `bytes` bytes, in whole pieces of sixteen.
__device__ __forceinline__ void prefetch(const void* at, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    u64 from = (reinterpret_cast<u64>(at) + 15) & ~u64(15);
    u64 to = (reinterpret_cast<u64>(at) + bytes) & ~u64(15);
    if (from < to)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(u32(to - from)));
#endif
}
