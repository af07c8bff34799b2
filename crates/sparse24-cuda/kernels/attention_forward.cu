// attention_forward: for every sequence and head, o = dropout(softmax(mask(q k^T / sqrt(width))))
//      v, lse = log-sum-exp of the scores
// in   q bf16 [batch*queries, heads*width]; k, v bf16 [batch*keys, heads*width], strided rows;
//      state: the stream of dropout, null without; lengths u32 [batch]: visible keys of each
//      sequence, read by the _lengths kernels only
// out  o bf16 as q, lse f32 [batch*heads, queries], overwritten; 0 and -infinity for a query that
//      sees no key; kept u32, see Dropout in attention.cuh, written by the _dropout kernels only
// pre  rows 16-byte aligned; width a multiple of 8, at most 64 or 128 by the kernel's name; outputs
//      alias nothing
// acc  f32; probabilities are rounded to bf16 before they multiply v; 64 keys at a time, in order
// ref  sparse24_cpu::attention::attention_forward, within the bounds of the conformance suite
#include "attention.cuh"

// Exponents of 2 are relative to a reference, which is raised only when the largest score exceeds
// it by this much; until then sums just grow.
constexpr float SLACK = 8.0f;

template <int WIDTH, class Drop, class Lengths>
__device__ __forceinline__ void forward(const Attention& of, const bf16* q, const bf16* k,
                                        const bf16* v, bf16* o, float* lse, u32 q_stride,
                                        u32 k_stride, u32 v_stride, u32 o_stride) {
    extern __shared__ __align__(1024) u8 memory[];
    int pieces = (of.queries + ROWS - 1) / ROWS;
    Place place(pieces);
    int first_query = (pieces - 1 - place.piece) * ROWS, rows = of.queries - first_query;
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    u64 sequence = place.task / of.heads, column = u64(place.task % of.heads) * of.width;
    int length = Lengths::of(of, sequence);
    q += (sequence * of.queries + first_query) * q_stride + column;
    o += (sequence * of.queries + first_query) * o_stride + column;
    k += sequence * of.keys * k_stride + column;
    v += sequence * of.keys * v_stride + column;

    Slab<WIDTH> queries{shared_address(memory)};
    auto stage = [&](int step) { return queries.after(1 + step % STAGES * 2); };
    Fetch<WIDTH> of_keys(k, k_stride, length, of.width), of_values(v, v_stride, length, of.width);
    auto fetch = [&](int step) {
        Slab<WIDTH> keys = stage(step), values = keys.after(1);
        of_keys.next(keys);
        of_values.next(values);
    };
    int seen = visible_keys(of, min(first_query + ROWS, of.queries) - 1, length),
        steps = (seen + ROWS - 1) / ROWS;
    Fetch<WIDTH>(q, q_stride, rows, of.width).next(queries);
    if (steps > 0) fetch(0);
    fetches_end_group();

    Drop drop(of, place.task);
    Left<WIDTH> left{queries, first};
    Rounded probabilities;
    float sums[WIDTH / 8][4] = {}, reference[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f},
                       unit = of.scale * LOG2_E;
    int visible[2] = {visible_keys(of, first_query + first + lane / 4, length),
                      visible_keys(of, first_query + first + lane / 4 + 8, length)};
    int all_see = visible_keys(of, first_query + first, length);
    auto advance = [&](int step) {
        fetches_wait<0>();
        if (step + 1 < steps) fetch(step + 1);
        fetches_end_group();
    };
    for (int step = 0; step < steps; ++step) {
        advance(step);
        Slab<WIDTH> keys = stage(step), values = keys.after(1);
        int key = step * ROWS;
        float scores[8][4] = {};
        product_with_transpose(scores, left, keys);
        u32 kept = drop.draw(first_query / ROWS, step);
        products_wait<0>();
        pin(scores);
        pin(sums);
        if (key + ROWS > all_see) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= visible[i / 2 % 2])
                    scores[i / 4][i % 4] = -INFINITE;
            }
        }
        float peak[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            peak[h] = scores[0][2 * h];
#pragma unroll
            for (int n = 0; n < 8; ++n)
                peak[h] = fmaxf(peak[h], fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
            peak[h] = fmaxf(peak[h], __shfl_xor_sync(0xffffffffu, peak[h], 1));
            peak[h] = fmaxf(peak[h], __shfl_xor_sync(0xffffffffu, peak[h], 2));
        }
        if (__any_sync(0xffffffffu, peak[0] * unit > reference[0] + SLACK ||
                                        peak[1] * unit > reference[1] + SLACK)) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float raised = fmaxf(reference[h], peak[h] * unit),
                      rescale = raised == -INFINITE ? 1.0f : power_of_two(reference[h] - raised);
                reference[h] = raised;
                total[h] *= rescale;
#pragma unroll
                for (int n = 0; n < WIDTH / 8; ++n) {
                    sums[n][2 * h] *= rescale;
                    sums[n][2 * h + 1] *= rescale;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float of_row = reference[h] == -INFINITE ? 0.0f : reference[h];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float& score = scores[i / 2][2 * h + i % 2];
                score = power_of_two(fmaf(score, unit, -of_row));
                total[h] += score;
                score = Drop::apply(kept, 4 * (i / 2) + 2 * h + i % 2, score);
            }
        }
        probabilities.round(scores);
        product(sums, probabilities, values);
        products_wait<0>();
        pin(sums);
    }
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
        factor[h] = total[h] == 0.0f ? 0.0f : drop.scale() / total[h];
        int row = first + lane / 4 + 8 * h;
        float log_sum = total[h] == 0.0f ? -INFINITE : (reference[h] + log2f(total[h])) * LN_2;
        if (lane % 4 == 0 && row < rows)
            lse[u64(place.task) * of.queries + first_query + row] = log_sum;
    }
    fetches_wait<0>();
    store(queries, first, sums, factor, o, o_stride, rows, of.width);
}

#define ATTENTION_FORWARD(NAME, WIDTH, DROP, LENGTHS, BOUNDS)                                      \
    extern "C" __global__ void BOUNDS NAME(                                                        \
        const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse, u32 q_stride,            \
        u32 k_stride, u32 v_stride, u32 o_stride, SHARED_PARAMETERS) {                             \
        forward<WIDTH, DROP, LENGTHS>(SHARED, q, k, v, o, lse, q_stride, k_stride, v_stride,       \
                                      o_stride);                                                   \
    }
ATTENTION_FORWARD(attention_forward_64, 64, KeepAll, AllKeys, TOGETHER(5, 3))
ATTENTION_FORWARD(attention_forward_128, 128, KeepAll, AllKeys, TOGETHER(2, 2))
ATTENTION_FORWARD(attention_forward_dropout_64, 64, Dropout, AllKeys, TOGETHER(4, 2))
ATTENTION_FORWARD(attention_forward_dropout_128, 128, Dropout, AllKeys, TOGETHER(2, 2))
ATTENTION_FORWARD(attention_forward_64_lengths, 64, KeepAll, FirstKeys, TOGETHER(4, 3))
ATTENTION_FORWARD(attention_forward_128_lengths, 128, KeepAll, FirstKeys, TOGETHER(2, 2))
ATTENTION_FORWARD(attention_forward_dropout_64_lengths, 64, Dropout, FirstKeys, TOGETHER(4, 2))
ATTENTION_FORWARD(attention_forward_dropout_128_lengths, 128, Dropout, FirstKeys, TOGETHER(2, 2))
