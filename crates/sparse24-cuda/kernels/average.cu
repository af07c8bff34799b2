// moving_average: average = decay * average + (1 - decay) * w; nothing while the flag is up
// in   w f32 [elements]; health; decay
// out  average f32 [elements], in place
// pre  blocks of 256 elements; average does not overlap w
// acc  f32, every operation rounded
// ref  sparse24_cpu::average, bit for bit
#include "health.cuh"
#include "pdl.cuh"

extern "C" __global__ void __launch_bounds__(256)
    moving_average(const float* w, float* average, const Health* health, float decay,
                   u64 elements) {
    u64 at = u64(blockIdx.x) * 256 + threadIdx.x;
    pdl_wait();
    if (health->flag == 0 && at < elements)
        average[at] = decay * average[at] + (1.0f - decay) * w[at];
}
