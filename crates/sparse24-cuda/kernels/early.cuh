// For kernels that start early: their blocks take their places while the previous kernel ends, and
// wait here. Until then they may ask for what
// they will read; where that was not just written, it is on its way when they begin.
#pragma once
#include "scalar.cuh"

// From here on all that was queued before is done. Before, a kernel reads and writes nothing that a
// kernel writes, and none of its loads is one of
// constants (a const and __restrict__ pointer's), for which nothing that is written while it waits
// need be new.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, once `place`, any number below 2^31, is known: without, the compiler waits first, and
// computes addresses then.
__device__ __forceinline__ void wait_for_previous(u32 place) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred known;\nsetp.lt.u32 known, %0, 0x80000000;\n@known griddepcontrol.wait;}" :: "r"(place) : "memory");
#endif
}

// Lets blocks of the next kernel take places that come free, once every block of this one has its
// own; one thread says so for its block.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Brings a line to L2, where later writes meet it: no read.
__device__ __forceinline__ void ask_for(const void* at) {
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
#endif
}

// The same of whole pieces of sixteen bytes.
__device__ __forceinline__ void ask_for(const void* at, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    u64 from = (reinterpret_cast<u64>(at) + 15) & ~u64(15), to = (reinterpret_cast<u64>(at) + bytes) & ~u64(15);
    if (from < to) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(u32(to - from)));
#endif
}
