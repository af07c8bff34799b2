// For kernels that start early: their blocks take their places while the previous kernel ends, and wait here.
#pragma once

// From here on all that was queued before is done. Before, a kernel touches nothing that a kernel writes.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, once `place`, any number below 2^31, is known: without, the compiler waits first, and computes addresses then.
__device__ __forceinline__ void wait_for_previous(unsigned place) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred known;\nsetp.lt.u32 known, %0, 0x80000000;\n@known griddepcontrol.wait;}" :: "r"(place) : "memory");
#endif
}
