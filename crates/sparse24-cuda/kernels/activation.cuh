// Nonlinearities with their derivatives, as sparse24_cpu::activation: GELU (tanh form) and SiLU as
// z / (1 + 2^-y) with y(z) a polynomial, GELU (erf form), tanh, and ReLU. Fused multiply-adds are
// explicit, so that results have the same bits with contraction and without.
#pragma once
#include "scalar.cuh"

struct Activated {
    float value, slope;
};

// No activation.
struct None {};
template <class A> constexpr bool is_none = false;
template <> constexpr bool is_none<None> = true;

// Two elements after an activation.
template <class A> __device__ __forceinline__ u32 activated(u32 pair) {
    return narrow_pair(A::at(widen_low(pair)).value, A::at(widen_high(pair)).value);
}

// 1 / x with relative error 2^-22.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / (1 + 2^-x) for x in [-126, 126].
__device__ __forceinline__ float sigmoid2(float x) { return reciprocal(1.0f + power_of_two(-x)); }

// Beyond the limits, the sigmoid is that of the limit; below the lower one, so is z. NaN stays NaN.
struct Limited {
    float low, inner;
};
__device__ __forceinline__ Limited limited(float z, float limit) {
    float low, inner;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(low) : "f"(z), "f"(-limit));
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(inner) : "f"(low), "f"(limit));
    return {low, inner};
}

struct Gelu {
    // 2 sqrt(2/pi) log2(e), and 0.044715 of it.
    static constexpr float SLOPE = 2.3022082f, CUBE = 0.10294324f, LN2 = 0.69314718f;

    // Beyond 9.98 the sigmoid is 2^-125 or 1.
    static __device__ __forceinline__ Activated at(float z) {
        Limited to = limited(z, 9.98f);
        float square = to.inner * to.inner, s = sigmoid2(to.inner * __fmaf_rn(CUBE, square, SLOPE)),
              slope = __fmaf_rn(3.0f * LN2 * CUBE, square, LN2 * SLOPE);
        return {to.low * s, __fmaf_rn(to.inner * slope, s * (1.0f - s), s)};
    }
};

// max(z, 0) - a F(-a) with a = |z| and F the normal distribution: F(-a) is its density at a times
// Mills' ratio, t m(t) with t = 1 / (1 + 0.35 a) and m a minimax fit. The ratio's relative error is
// at most (1 + 6 a + 0.7 a^2) 2^-24: for large a, the density's rounded exponent errs by as much.
// Beyond 12.9, F is 2^-125 or 1.
struct GeluErf {
    static __device__ __forceinline__ Activated at(float z) {
        constexpr float FIT[7] = {0.11279442f, -0.4661993f, 0.5353697f, 0.017386667f,
                                  0.36086482f, 0.34270644f, 0.35039148f};
        float a;
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(fabsf(z)), "f"(12.9f));
        // log2(e) / 2, and log2(sqrt(2 pi)).
        float density = power_of_two(__fmaf_rn(-0.7213475f, a * a, -1.3257480f)),
              t = reciprocal(__fmaf_rn(0.35f, a, 1.0f)), m = FIT[0];
#pragma unroll
        for (int i = 1; i < 7; ++i) m = __fmaf_rn(m, t, FIT[i]);
        float below = density * __fmaf_rn(m, t, -a);
        return {__fmaf_rn(-a, density * (m * t), fmaxf(z, 0.0f)),
                z < 0.0f ? below : __fsub_rn(1.0f, below)};
    }
};

struct Silu {
    // Beyond 87 the sigmoid is 2^-125 or 1.
    static __device__ __forceinline__ Activated at(float z) {
        Limited to = limited(z, 87.0f);
        float s = sigmoid2(1.4426950f * to.inner);
        return {to.low * s, __fmaf_rn(to.inner, s * (1.0f - s), s)};
    }
};

// z + z^3 m(z^2) within +-5/8, m a polynomial; else 1 - 2 / (1 + e^2|z|) with the sign of z.
struct Tanh {
    static __device__ __forceinline__ Activated at(float z) {
        constexpr float FIT[5] = {-0.0057171658f, 0.020650728f, -0.053743556f, 0.13331492f,
                                  -0.33333284f};
        float inner = limited(z, 43.0f).inner, square = inner * inner, m = FIT[0];
#pragma unroll
        for (int i = 1; i < 5; ++i) m = __fmaf_rn(m, square, FIT[i]);
        float far = __fmaf_rn(-2.0f, sigmoid2(-2.8853901f * fabsf(inner)), 1.0f);
        float value = fabsf(inner) <= 0.625f ? __fmaf_rn(inner, square * m, inner)
                                             : copysignf(far, inner);
        return {value, __fmaf_rn(-value, value, 1.0f)};
    }
};

// The slope of NaN is NaN.
struct Relu {
    static __device__ __forceinline__ Activated at(float z) {
        float value = z <= 0.0f ? 0.0f : z;
        return {value, value > 0.0f ? 1.0f : value};
    }
};
