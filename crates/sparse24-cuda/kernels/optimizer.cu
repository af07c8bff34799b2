// adamw_step, adam_step, sgd_step, lion_step: one step of an optimizer for every tensor of a table,
//      with clipping and masked decay; nothing while the flag is up
// in   table Parameter [tensors]; chunks Chunk, one block each; health; state: learning rate and
//      bias corrections; beta1 (the momentum of SGD), beta2, epsilon: those that the rule has;
//      on_gradients, on_weights: the decay factor of pruned elements, one of them 0
// out  w, m and, for Adam, v in place; shadow bf16, if there is one
// pre  tensors do not overlap; v is not null for Adam; tiles only if rows and columns are multiples
//      of 4
// acc  f32, every operation rounded, in the order of the reference
// ref  sparse24_cpu::optimizer::optimizer_step, bit for bit except for the payloads of NaNs
#include "pdl.cuh"
#include "parameters.cuh"
#include "philox.cuh"

enum Kind { ADAMW, ADAM, SGD, LION };

// Whether a rule adds weight decay to the gradient, and whether it has a second moment.
template <Kind KIND>
constexpr bool IS_COUPLED = KIND == ADAM || KIND == SGD;
template <Kind KIND>
constexpr bool HAS_V = KIND == ADAMW || KIND == ADAM;

struct Rule {
    float learning_rate, beta1, beta2, epsilon, weight_decay, inverse1, inverse2, scale;
};

template <Kind KIND>
__device__ __forceinline__ float step(const Rule& rule, float g, float& m, float& v) {
    if constexpr (KIND == SGD) {
        m = rule.beta1 * m + g;
        return m;
    } else if constexpr (KIND == LION) {
        float direction = rule.beta1 * m + (1.0f - rule.beta1) * g;
        m = rule.beta2 * m + (1.0f - rule.beta2) * g;
        return fabsf(direction) > 0.0f ? copysignf(1.0f, direction) : direction;
    } else {
        m = rule.beta1 * m + (1.0f - rule.beta1) * g;
        v = rule.beta2 * v + (1.0f - rule.beta2) * g * g;
        return (m * rule.inverse1) / (sqrtf(v * rule.inverse2) + rule.epsilon);
    }
}

template <Kind KIND>
__device__ __forceinline__ void update(const Rule& rule, float& w, float g, float& m, float& v,
                                       float on_gradient, float on_weight) {
    if constexpr (IS_COUPLED<KIND>) on_gradient = rule.weight_decay + on_gradient;
    else on_weight = rule.weight_decay + on_weight;
    float u = step<KIND>(rule, g * rule.scale + on_gradient * w, m, v);
    w = w - rule.learning_rate * (u + on_weight * w);
}

template <Kind KIND>
__device__ __forceinline__ void steps(const Parameter* table, const Chunk* chunks,
                                      const Health* health, const StepState* state, float beta1,
                                      float beta2, float epsilon, float clip, float on_gradients,
                                      float on_weights) {
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
        float4 m = reinterpret_cast<const float4*>(p.m)[at], v = {};
        if constexpr (HAS_V<KIND>) v = reinterpret_cast<const float4*>(p.v)[at];
        u32 kept = 15;
        if (p.tiles != nullptr) {
            u32 row = at / row_groups, column = at - row * row_groups;
            kept = p.tiles[u64(row / 4) * row_groups + column] >> (4 * (row % 4));
        }
        auto element = [&](int i, float& w, float g, float& m, float& v) {
            bool pruned = (kept >> i & 1) == 0;
            update<KIND>(rule, w, g, m, v, pruned ? on_gradients : 0.0f,
                         pruned ? on_weights : 0.0f);
        };
        element(0, w.x, g.x, m.x, v.x);
        element(1, w.y, g.y, m.y, v.y);
        element(2, w.z, g.z, m.z, v.z);
        element(3, w.w, g.w, m.w, v.w);
        reinterpret_cast<float4*>(p.w)[at] = w;
        reinterpret_cast<float4*>(p.m)[at] = m;
        if constexpr (HAS_V<KIND>) reinterpret_cast<float4*>(p.v)[at] = v;
        if (p.shadow != nullptr)
            reinterpret_cast<uint2*>(p.shadow)[at] =
                make_uint2(narrow_pair(w.x, w.y), narrow_pair(w.z, w.w));
    }
    // The rest of a length that is not a multiple of 4, which has no mask.
    u64 rest = 4 * u64(groups) + threadIdx.x;
    if (rest < p.length && chunk.part == u32((p.length - 1) / CHUNK)) {
        float none = 0.0f;
        float& v = HAS_V<KIND> ? p.v[rest] : none;
        update<KIND>(rule, p.w[rest], p.g[rest], p.m[rest], v, 0.0f, 0.0f);
        if (p.shadow != nullptr) p.shadow[rest] = narrow(p.w[rest]);
    }
}

#define OPTIMIZER(NAME, KIND)                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                        \
        NAME(const Parameter* table, const Chunk* chunks, const Health* health,              \
             const StepState* state, float beta1, float beta2, float epsilon, float clip,    \
             float on_gradients, float on_weights) {                                         \
        steps<KIND>(table, chunks, health, state, beta1, beta2, epsilon, clip, on_gradients, \
                    on_weights);                                                             \
    }
OPTIMIZER(adamw_step, ADAMW)
OPTIMIZER(adam_step, ADAM)
OPTIMIZER(sgd_step, SGD)
OPTIMIZER(lion_step, LION)
