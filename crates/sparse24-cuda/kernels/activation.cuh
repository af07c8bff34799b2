// GELU (tanh form) and SiLU with their derivatives, as sparse24_cpu::activation: z / (1 + 2^-y),
// with y(z) a polynomial.
#pragma once
#include "scalar.cuh"

struct Activated {
    float value, slope;
};

// 1 / (1 + 2^-x) for x in [-126, 126], from two approximations with relative error 2^-22 each.
__device__ __forceinline__ float sigmoid2(float x) {
    float power, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + power));
    return s;
}

// Beyond the limits, the sigmoid is that of the limit; below the lower one, so is z. NaN stays NaN.
struct Limited {
    float low, inner;
};
__device__ __forceinline__ Limited limited(float z, float limit) {
    float low = z < -limit ? -limit : z;
    return {low, low > limit ? limit : low};
}

struct Gelu {
    // 2 sqrt(2/pi) log2(e), and 0.044715 of it.
    static constexpr float SLOPE = 2.3022082f, CUBE = 0.10294324f, LN2 = 0.69314718f;

    // Beyond 9.98 the sigmoid is 2^-125 or 1.
    static __device__ __forceinline__ Activated at(float z) {
        Limited to = limited(z, 9.98f);
        float square = to.inner * to.inner, s = sigmoid2(to.inner * (SLOPE + CUBE * square));
        return {to.low * s,
                s + to.inner * (LN2 * SLOPE + 3.0f * LN2 * CUBE * square) * (s * (1.0f - s))};
    }
};

struct Silu {
    // Beyond 87 the sigmoid is 2^-125 or 1.
    static __device__ __forceinline__ Activated at(float z) {
        Limited to = limited(z, 87.0f);
        float s = sigmoid2(1.4426950f * to.inner);
        return {to.low * s, s + to.inner * (s * (1.0f - s))};
    }
};
