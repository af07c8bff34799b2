// What the device knows of a step's numbers. Mirrors sparse24_cuda::adamw::Health.
#pragma once
#include "scalar.cuh"

struct Health {
    float grad_norm;
    // 0: all is finite; LOSS: the loss is not; NORM: the norm is not; else 1 + the first tensor
    // whose gradient is not. It stays up until the host
    // lowers it.
    u32 flag;
};
constexpr u32 LOSS = 0xfffffffeu, NORM = 0xffffffffu;
