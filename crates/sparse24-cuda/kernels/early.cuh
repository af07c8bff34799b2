// For kernels that start early: their blocks take their places while the previous kernel still runs, and wait here.
#pragma once

// From here on all that was queued before is done. Before, a kernel touches nothing that a kernel writes.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
