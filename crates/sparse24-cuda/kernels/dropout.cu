// dropout: out = kept ? x / (1 - p) : 0; element e is kept if word e%4 of call e/4 makes a uniform
//      of at least p
// drop_sequences: the same for all of a sequence, whose number takes the place of e; sequences have
//      `length` elements
// in   x bf16 [elements]; state: seed, step, micro-step; site; p in [0, 1), and scale = 1 / (1 - p)
// out  out bf16 [elements], overwritten, or x itself
// pre  x and out 16-byte aligned; at most 2^34 elements, or sequences; `length` is a multiple of 8
// acc  f32, rounded once: the bits of the CPU's product, rounded to bf16
// ref  sparse24_cpu::dropout
#include "pdl.cuh"
#include "packed.cuh"
#include "philox.cuh"

constexpr u32 THREADS = 256;

// The least word whose uniform is at least p.
__device__ __forceinline__ u32 least_kept(float p) { return __float2uint_ru(p * 0x1p24f) << 8; }
__device__ __forceinline__ float dropped(float x, u32 word, u32 least, float scale) {
    return word >= least ? x * scale : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dropout(const bf16* x, bf16* out, u64 elements, const StepState* state, u32 site, float p,
            float scale) {
    u64 first = 8 * (u64(blockIdx.x) * THREADS + threadIdx.x);
    bool whole = first + 8 <= elements;
    uint4 raw = make_uint4(0, 0, 0, 0);
    pdl_wait();
    // Both loads are in flight before either is waited for.
    StepState now = *state;
    if (whole) raw = *reinterpret_cast<const uint4*>(x + first);
    now = uniform_state(now);
    if (first >= elements) return;
    uint4 low = philox(now, site, u32(first / 4)), high = philox(now, site, u32(first / 4 + 1));
    u32 least = least_kept(p);
    u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (whole) {
        Run<8> run = widen(raw);
#pragma unroll
        for (int i = 0; i < 8; ++i) run.at[i] = dropped(run.at[i], words[i], least, scale);
        store(out + first, run);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + i < elements)
                out[first + i] = narrow(dropped(widen(x[first + i]), words[i], least, scale));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    drop_sequences(const bf16* x, bf16* out, u64 elements, u64 length, const StepState* state,
                   u32 site, float p, float scale) {
    u64 first = 8 * (u64(blockIdx.x) * THREADS + threadIdx.x);
    if (first >= elements) return;
    pdl_wait();
    u64 sequence = first / length;
    uint4 drawn = philox(uniform_state(*state), site, u32(sequence / 4));
    uint2 pair = sequence & 2 ? make_uint2(drawn.z, drawn.w) : make_uint2(drawn.x, drawn.y);
    u32 word = sequence & 1 ? pair.y : pair.x, least = least_kept(p);
    Run<8> run = widen(*reinterpret_cast<const uint4*>(x + first));
#pragma unroll
    for (int i = 0; i < 8; ++i) run.at[i] = dropped(run.at[i], word, least, scale);
    store(out + first, run);
}
