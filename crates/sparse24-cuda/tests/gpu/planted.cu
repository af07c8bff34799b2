// Defects planted for compute-sanitizer, one for each of its tools, which are the names: 64 floats
// that were never written, one block of 64 threads.

extern "C" __global__ void planted_memcheck(float* x) { x[threadIdx.x + 1] = 1.0f; }

extern "C" __global__ void planted_racecheck(float* x) {
    __shared__ float shared[64];
    shared[threadIdx.x] = 1.0f;
    x[threadIdx.x] = shared[63 - threadIdx.x];
}

extern "C" __global__ void planted_initcheck(float* x) { x[threadIdx.x] += 1.0f; }

extern "C" __global__ void planted_synccheck(float* x) {
    if (threadIdx.x < 48) __syncthreads();
    x[threadIdx.x] = 1.0f;
}
