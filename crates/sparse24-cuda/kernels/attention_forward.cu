// attention_forward: for every sequence and head, o = dropout(softmax(mask(q k^T / sqrt(width)))) v, lse = ln of the sums of exponentials
// in   q bf16 [batch*queries, heads*width], k, v bf16 [batch*keys, heads*width], rows strides apart
// in   state: seed and counters of dropout's uniforms, null without dropout
// out  o bf16 as q, lse f32 [batch*heads, queries], overwritten; where a query sees no key 0 and -infinity
// pre  rows 16-byte aligned, width a multiple of 8, at most 64 or 128 by the kernel's name; outputs alias nothing
// acc  f32; probabilities are rounded to bf16 where v meets them; keys 64 at a time, in order
// ref  sparse24_cpu::attention::attention_forward
#include "attention.cuh"

template <int WIDTH> struct Forward {
    static constexpr int QUERIES = WIDTH == 64 ? 128 : 64, THREADS = 2 * QUERIES, STAGES = WIDTH == 64 ? 3 : 2, LEFT = STAGES - 2;
    using Queries = Slab<QUERIES, WIDTH>;
    using Keys = Slab<PANEL, WIDTH>;
};

template <int WIDTH, class Drop>
__device__ __forceinline__ void forward(const Attention& of, const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse, u32 q_stride,
                                        u32 k_stride, u32 v_stride, u32 o_stride) {
    using F = Forward<WIDTH>;
    extern __shared__ __align__(1024) u8 memory[];
    int pieces = (of.queries + F::QUERIES - 1) / F::QUERIES;
    Place place(pieces);
    int first_query = (pieces - 1 - place.piece) * F::QUERIES, rows = of.queries - first_query, lane = threadIdx.x % 32;
    // The warp's and the warpgroup's first row here.
    int first = threadIdx.x / 32 * 16, group = threadIdx.x / 128 * 64;
    u64 sequence = place.task / of.heads, column = u64(place.task % of.heads) * of.width;
    q += (sequence * of.queries + first_query) * q_stride + column;
    o += (sequence * of.queries + first_query) * o_stride + column;
    k += sequence * of.keys * k_stride + column;
    v += sequence * of.keys * v_stride + column;

    typename F::Queries queries{u32(__cvta_generic_to_shared(memory))};
    auto stage = [&](int step) { return typename F::Keys{queries.base + F::Queries::BYTES + step % F::STAGES * 2 * F::Keys::BYTES}; };
    auto fetch = [&](int step) {
        typename F::Keys keys = stage(step), values{keys.base + F::Keys::BYTES};
        int key = step * PANEL;
        keys.template fetch<F::THREADS>(k + u64(key) * k_stride, k_stride, of.keys - key, of.width);
        values.template fetch<F::THREADS>(v + u64(key) * v_stride, v_stride, of.keys - key, of.width);
    };
    int seen = of.visible(min(first_query + F::QUERIES, of.queries) - 1), steps = (seen + PANEL - 1) / PANEL;
    queries.template fetch<F::THREADS>(q, q_stride, rows, of.width);
    if (steps > 0) fetch(0);
    fetches_end_group();

    Drop drop(of);
    Left<F::QUERIES, WIDTH> left{queries, first};
    Rounded probabilities;
    float sums[WIDTH / 8][4] = {}, largest[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f}, unit = of.scale * LOG2_E;
    int visible[2] = {of.visible(first_query + first + lane / 4), of.visible(first_query + first + lane / 4 + 8)};
    int all_see = of.visible(first_query + first), any_sees = of.visible(min(first_query + group + 63, of.queries - 1));
    auto advance = [&](int step) {
        fetches_wait<0>();
        if (step + 1 < steps) fetch(step + 1);
        fetches_end_group();
    };
    int step = 0;
    for (; step * PANEL < any_sees; ++step) {
        advance(step);
        typename F::Keys keys = stage(step), values{keys.base + F::Keys::BYTES};
        int key = step * PANEL;
        float scores[8][4] = {};
        product_with_transpose(scores, left, keys);
        u32 kept = drop.rows_are_queries(place.task, first_query + first, key);
        products_wait<0>();
        pin(scores);
        pin(sums);
        if (key + PANEL > all_see) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= visible[i / 2 % 2]) scores[i / 4][i % 4] = -INFINITE;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float before = largest[h];
#pragma unroll
            for (int n = 0; n < 8; ++n) largest[h] = fmaxf(largest[h], fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
            float reference = largest[h] == -INFINITE ? 0.0f : largest[h] * unit, rescale = power_of_two(before * unit - reference), part = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int c = 2 * h; c < 2 * h + 2; ++c) {
                    scores[n][c] = power_of_two(fmaf(scores[n][c], unit, -reference));
                    part += scores[n][c];
                    scores[n][c] = Drop::apply(kept, 4 * n + c, scores[n][c]);
                }
            }
            total[h] = total[h] * rescale + part;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n) {
                sums[n][2 * h] *= rescale;
                sums[n][2 * h + 1] *= rescale;
            }
        }
        probabilities.round(scores);
        product(sums, probabilities, values);
        if (F::LEFT == 0) products_wait<0>();
    }
    // Another warpgroup may see more.
    for (; step < steps; ++step) advance(step);
    products_wait<0>();
    pin(sums);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
        factor[h] = largest[h] == -INFINITE ? 0.0f : drop.scale() / total[h];
        int row = first + lane / 4 + 8 * h;
        float log_sum = largest[h] == -INFINITE ? -INFINITE : (largest[h] * unit + log2f(total[h])) * LN_2;
        if (lane % 4 == 0 && row < rows) lse[u64(place.task) * of.queries + first_query + row] = log_sum;
    }
    fetches_wait<0>();
    store(queries, first, sums, factor, o, o_stride, rows, of.width);
}

#define ATTENTION_FORWARD(NAME, WIDTH, DROP, BLOCKS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(Forward<WIDTH>::THREADS, BLOCKS)                                                              \
        NAME(const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse, u32 q_stride, u32 k_stride, u32 v_stride, u32 o_stride,     \
             u32 heads, u32 queries, u32 keys, u32 width, u32 diagonal, float scale, const StepState* state, u32 site, float dropped) {    \
        Attention of{heads, int(queries), int(keys), int(width), int(diagonal), scale, state, site, dropped};                              \
        forward<WIDTH, DROP>(of, q, k, v, o, lse, q_stride, k_stride, v_stride, o_stride);                                                 \
    }
ATTENTION_FORWARD(attention_forward_64, 64, KeepAll, 2)
ATTENTION_FORWARD(attention_forward_128, 128, KeepAll, 2)
ATTENTION_FORWARD(attention_forward_dropout_64, 64, Dropout, 1)
ATTENTION_FORWARD(attention_forward_dropout_128, 128, Dropout, 1)
