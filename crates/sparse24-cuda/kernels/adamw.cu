// adamw_step: one step of AdamW for every tensor of a table, with clipping and masked decay;
//      nothing while the flag is up
// in   table Parameter [tensors]; chunks Chunk, one block each; health; state: learning rate and
//      bias corrections; on_gradients, on_weights: the decay factor of pruned elements, one of them
//      0
// out  w, m, v in place; shadow bf16, if there is one
// pre  tensors do not overlap; tiles only if rows and columns are multiples of 4
// acc  f32, every operation rounded, in the order of the reference
// ref  sparse24_cpu::adamw::adamw_step, bit for bit except for the payloads of NaNs
#include "pdl.cuh"
#include "parameters.cuh"
#include "philox.cuh"

struct Rule {
    float learning_rate, beta1, beta2, epsilon, weight_decay, inverse1, inverse2, scale;
};

__device__ __forceinline__ void update(const Rule& rule, float& w, float g, float& m, float& v,
                                       float on_gradient, float on_weight) {
    g = g * rule.scale + on_gradient * w;
    m = rule.beta1 * m + (1.0f - rule.beta1) * g;
    v = rule.beta2 * v + (1.0f - rule.beta2) * g * g;
    float step = (m * rule.inverse1) / (sqrtf(v * rule.inverse2) + rule.epsilon);
    w = w - rule.learning_rate * (step + (rule.weight_decay + on_weight) * w);
}

extern "C" __global__ void __launch_bounds__(256)
    adamw_step(const Parameter* table, const Chunk* chunks, const Health* health,
               const StepState* state, float beta1, float beta2, float epsilon, float clip,
               float on_gradients, float on_weights) {
    pdl_wait();
    if (health->flag != 0) return;
    Chunk chunk = chunks[blockIdx.x];
    const Parameter p = table[chunk.tensor];
    float scale = fminf(clip / (health->grad_norm + 1e-6f), 1.0f);
    Rule rule = {state->learning_rate,
                 beta1,
                 beta2,
                 epsilon,
                 p.weight_decay,
                 1.0f / state->bias_correction1,
                 1.0f / state->bias_correction2,
                 scale};
    u32 groups = u32(p.length / 4), row_groups = p.columns / 4,
        first = chunk.part * (CHUNK / 4) + threadIdx.x;
    for (u32 k = 0; k < CHUNK / 4 / CHUNK_THREADS; ++k) {
        u32 at = first + k * CHUNK_THREADS;
        if (at >= groups) break;
        float4 w = reinterpret_cast<const float4*>(p.w)[at],
               g = reinterpret_cast<const float4*>(p.g)[at];
        float4 m = reinterpret_cast<const float4*>(p.m)[at],
               v = reinterpret_cast<const float4*>(p.v)[at];
        u32 kept = 15;
        if (p.tiles != nullptr) {
            u32 row = at / row_groups, column = at - row * row_groups;
            kept = p.tiles[u64(row / 4) * row_groups + column] >> (4 * (row % 4));
        }
        auto element = [&](int i, float& w, float g, float& m, float& v) {
            bool pruned = (kept >> i & 1) == 0;
            update(rule, w, g, m, v, pruned ? on_gradients : 0.0f, pruned ? on_weights : 0.0f);
        };
        element(0, w.x, g.x, m.x, v.x);
        element(1, w.y, g.y, m.y, v.y);
        element(2, w.z, g.z, m.z, v.z);
        element(3, w.w, g.w, m.w, v.w);
        reinterpret_cast<float4*>(p.w)[at] = w;
        reinterpret_cast<float4*>(p.m)[at] = m;
        reinterpret_cast<float4*>(p.v)[at] = v;
        if (p.shadow != nullptr)
            reinterpret_cast<uint2*>(p.shadow)[at] =
                make_uint2(narrow_pair(w.x, w.y), narrow_pair(w.z, w.w));
    }
    // The rest of a length that is not a multiple of 4, which has no mask.
    u64 rest = 4 * u64(groups) + threadIdx.x;
    if (rest < p.length && chunk.part == u32((p.length - 1) / CHUNK)) {
        update(rule, p.w[rest], p.g[rest], p.m[rest], p.v[rest], 0.0f, 0.0f);
        if (p.shadow != nullptr) p.shadow[rest] = narrow(p.w[rest]);
    }
}
