// The gradient norm and the flag for numbers that are not finite. Mirrors sparse24_cuda::health.
#pragma once
#include "scalar.cuh"

struct Health {
    float grad_norm;
    // 0: all is finite; LOSS: the loss is not; NORM: the norm is not; otherwise 1 + the first
    // tensor with a bad gradient. Only the host lowers it.
    u32 flag;
};
constexpr u32 LOSS = 0xfffffffeu, NORM = 0xffffffffu;
