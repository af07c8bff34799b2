// attention_backward: the gradients of attention_forward, in two kernels in this order:
//   _queries: a block owns queries and loops over keys: dq, and for every query lse in base 2 and
//             delta = sum of d_o * o
//   _keys:    a block owns keys and loops over queries: dk, dv
// in   q, k, v, o, lse, kept, lengths as in attention_forward; d_o bf16 as o
// out  dq bf16 as q, dk, dv bf16 as k, v, overwritten; rows f32 [batch*heads, 2*queries], scratch
//      that the first kernel leaves to the second
// pre  rows 16-byte aligned (scratch 4); width a multiple of 8, at most 64 or 128 by the kernel's
//      name; outputs alias nothing
// acc  f32, over 64 queries or keys at a time, in order; probabilities and their gradients are
//      rounded to bf16 as operands; no atomics
// ref  sparse24_cpu::attention::attention_backward, within the bounds of the conformance suite
#include "attention.cuh"

template <int WIDTH, class Drop, class Lengths>
__device__ __forceinline__ void queries(const Attention& of, const bf16* q, const bf16* k,
                                        const bf16* v, const bf16* o, const bf16* d_o,
                                        const float* lse, float* rows_out, bf16* dq, u32 q_stride,
                                        u32 k_stride, u32 v_stride, u32 o_stride, u32 d_o_stride,
                                        u32 dq_stride) {
    extern __shared__ __align__(1024) u8 memory[];
    int pieces = (of.queries + ROWS - 1) / ROWS;
    Place place(pieces);
    int first_query = (pieces - 1 - place.piece) * ROWS, rows = of.queries - first_query;
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    u64 sequence = place.task / of.heads, column = u64(place.task % of.heads) * of.width,
        row_of_all = sequence * of.queries + first_query;
    int length = Lengths::of(of, sequence);
    q += row_of_all * q_stride + column;
    o += row_of_all * o_stride + column;
    d_o += row_of_all * d_o_stride + column;
    dq += row_of_all * dq_stride + column;
    k += sequence * of.keys * k_stride + column;
    v += sequence * of.keys * v_stride + column;

    Slab<WIDTH> own{shared_address(memory)}, gradients = own.after(1);
    auto stage = [&](int step) { return own.after(2 + step % STAGES * 2); };
    float2* statistics = reinterpret_cast<float2*>(memory + (2 + 2 * STAGES) * Slab<WIDTH>::BYTES);
    Fetch<WIDTH> of_keys(k, k_stride, length, of.width), of_values(v, v_stride, length, of.width);
    auto fetch = [&](int step) {
        Slab<WIDTH> keys = stage(step), values = keys.after(1);
        of_keys.next(keys);
        of_values.next(values);
    };
    int seen = visible_keys(of, min(first_query + ROWS, of.queries) - 1, length),
        steps = (seen + ROWS - 1) / ROWS;
    Fetch<WIDTH>(q, q_stride, rows, of.width).next(own);
    Fetch<WIDTH>(d_o, d_o_stride, rows, of.width).next(gradients);
    if (steps > 0) fetch(0);
    fetches_end_group();

    // Two threads per query.
    int row = threadIdx.x / 2;
    float delta = 0.0f, log_sum = INFINITE;
    if (row < rows) {
        for (int chunk = threadIdx.x % 2; chunk < of.width / 8; chunk += 2) {
            uint4 x = *reinterpret_cast<const uint4*>(o + u64(row) * o_stride + chunk * 8);
            uint4 y = *reinterpret_cast<const uint4*>(d_o + u64(row) * d_o_stride + chunk * 8);
            const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                delta +=
                    widen_low(xs[i]) * widen_low(ys[i]) + widen_high(xs[i]) * widen_high(ys[i]);
        }
        // If no key is visible, 2^(score - infinity) is 0.
        float natural = lse[u64(place.task) * of.queries + first_query + row];
        if (natural != -INFINITE) log_sum = natural * LOG2_E;
    }
    delta += __shfl_xor_sync(0xffffffffu, delta, 1);
    if (threadIdx.x % 2 == 0) {
        statistics[row] = make_float2(log_sum, delta);
        float* to = rows_out + u64(place.task) * 2 * of.queries + first_query + row;
        if (row < rows) to[0] = log_sum, to[of.queries] = delta;
    }

    Drop drop(of, place.task);
    Left<WIDTH> left{own, first}, left_gradients{gradients, first};
    Rounded operand;
    float sums[WIDTH / 8][4] = {}, log_sums[2], deltas[2], unit = of.scale * LOG2_E;
    int visible[2] = {visible_keys(of, first_query + first + lane / 4, length),
                      visible_keys(of, first_query + first + lane / 4 + 8, length)};
    int all_see = visible_keys(of, first_query + first, length);
    auto advance = [&](int step) {
        fetches_wait<0>();
        if (step + 1 < steps) fetch(step + 1);
        fetches_end_group();
    };
    fetches_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float2 both = statistics[first + lane / 4 + 8 * h];
        log_sums[h] = both.x, deltas[h] = both.y;
    }
    for (int step = 0; step < steps; ++step) {
        u32 kept = drop.rows_are_queries(first_query / ROWS, step);
        advance(step);
        Slab<WIDTH> keys = stage(step), values = keys.after(1);
        int key = step * ROWS;
        float scores[8][4] = {}, slopes[8][4] = {};
        product_with_transpose(scores, left, keys);
        product_with_transpose(slopes, left_gradients, values);
        products_wait<1>();
        pin(scores);
        if (key + ROWS > all_see) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= visible[i / 2 % 2])
                    scores[i / 4][i % 4] = -INFINITE;
            }
        }
#pragma unroll
        for (int i = 0; i < 32; ++i)
            scores[i / 4][i % 4] =
                power_of_two(fmaf(scores[i / 4][i % 4], unit, -log_sums[i / 2 % 2]));
        products_wait<0>();
        pin(slopes);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            float slope = Drop::apply(kept, i, slopes[i / 4][i % 4]);
            slopes[i / 4][i % 4] =
                scores[i / 4][i % 4] * fmaf(slope, drop.scale(), -deltas[i / 2 % 2]);
        }
        operand.round(slopes);
        product(sums, operand, keys);
        products_wait<0>();
        pin(sums);
    }
    const float factor[2] = {of.scale, of.scale};
    fetches_wait<0>();
    store(own, first, sums, factor, dq, dq_stride, rows, of.width);
}

// Which gradients a block of keys computes.
enum Wanted { OF_KEYS = 1, OF_VALUES = 2, OF_BOTH = 3 };

template <int WIDTH, class Drop, class Lengths, Wanted WANTED>
__device__ __forceinline__ void keys(const Attention& of, const bf16* q, const bf16* k,
                                     const bf16* v, const bf16* d_o, const float* rows_in, bf16* dk,
                                     bf16* dv, u32 q_stride, u32 k_stride, u32 v_stride,
                                     u32 d_o_stride, u32 dk_stride, u32 dv_stride) {
    extern __shared__ __align__(1024) u8 memory[];
    int pieces = (of.keys + ROWS - 1) / ROWS;
    Place place(pieces);
    int first_key = place.piece * ROWS, rows = of.keys - first_key;
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    u64 sequence = place.task / of.heads, column = u64(place.task % of.heads) * of.width,
        row_of_all = sequence * of.keys + first_key;
    constexpr bool LIMITED = Lengths::LIMITED;
    int length = Lengths::of(of, sequence), existing = length - first_key;
    k += row_of_all * k_stride + column;
    v += row_of_all * v_stride + column;
    dk += row_of_all * dk_stride + column;
    dv += row_of_all * dv_stride + column;
    q += sequence * of.queries * q_stride + column;
    d_o += sequence * of.queries * d_o_stride + column;
    rows_in += u64(place.task) * 2 * of.queries;

    Slab<WIDTH> own{shared_address(memory)}, own_values = own.after(1);
    auto stage = [&](int step) { return own.after(2 + step % STAGES * 2); };
    u32 statistics_at = (2 + 2 * STAGES) * Slab<WIDTH>::BYTES;
    Fetch<WIDTH> of_queries(q, q_stride, of.queries, of.width),
        of_gradients(d_o, d_o_stride, of.queries, of.width);
    auto fetch = [&](int step) {
        Slab<WIDTH> queries = stage(step), gradients = queries.after(1);
        int query = step * ROWS;
        of_queries.next(queries);
        of_gradients.next(gradients);
        // The logarithms of 64 queries, then their deltas. Past the last query all are 0, and so is
        // what they contribute.
        const float* from = rows_in + threadIdx.x / ROWS * of.queries + query + threadIdx.x % ROWS;
        bool inside = query + int(threadIdx.x) % ROWS < of.queries;
        u32 to = own.base + statistics_at + (step % STAGES * 2 * ROWS + threadIdx.x) * 4;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to),
                     "l"(inside ? from : rows_in), "r"(inside ? 4 : 0)
                     : "memory");
    };
    // Earlier queries see no key of this block.
    int begin = min(max(first_key - of.diagonal, 0), of.queries) / ROWS,
        steps = (of.queries + ROWS - 1) / ROWS;
    // Keys past the length are seen by no query, and copied as zeros.
    if (LIMITED && existing <= 0) begin = steps;
    Fetch<WIDTH>(k, k_stride, existing, of.width).next(own);
    Fetch<WIDTH>(v, v_stride, existing, of.width).next(own_values);
    of_queries.skip(begin);
    of_gradients.skip(begin);
    if (begin < steps) fetch(begin);
    fetches_end_group();

    Drop drop(of, place.task);
    Left<WIDTH> left{own, first}, left_values{own_values, first};
    Rounded probabilities, operand;
    float dk_sums[WIDTH / 8][4] = {}, dv_sums[WIDTH / 8][4] = {}, unit = of.scale * LOG2_E;
    auto advance = [&](int step) {
        fetches_wait<0>();
        if (step + 1 < steps) fetch(step + 1);
        fetches_end_group();
    };
    for (int step = begin; step < steps; ++step) {
        typename Drop::Words words = drop.load(step, place.piece);
        advance(step);
        Slab<WIDTH> queries = stage(step), gradients = queries.after(1);
        const float2* statistics = reinterpret_cast<const float2*>(memory + statistics_at) +
                                   step % STAGES * ROWS + lane % 4;
        int query = step * ROWS;
        float scores[8][4] = {}, slopes[8][4] = {};
        product_with_transpose(scores, left, queries);
        if constexpr (WANTED & OF_KEYS) product_with_transpose(slopes, left_values, gradients);
        u32 kept = Drop::rows_are_keys(words);
        products_wait<WANTED & OF_KEYS ? 1 : 0>();
        pin(scores);
        // The first of these queries sees the fewest keys.
        if (first_key + first + 15 > query + of.diagonal || (LIMITED && first + 15 >= existing)) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                int key = first_key + first + lane / 4 + i / 2 % 2 * 8;
                bool hidden = key > query + i / 4 * 8 + lane % 4 * 2 + i % 2 + of.diagonal;
                if (hidden || (LIMITED && key >= length)) scores[i / 4][i % 4] = -INFINITE;
            }
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float2 log_sums = statistics[4 * n];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                scores[n][c] =
                    power_of_two(fmaf(scores[n][c], unit, -(c % 2 ? log_sums.y : log_sums.x)));
            }
        }
        if constexpr (WANTED & OF_VALUES) {
            float dropped[8][4];
#pragma unroll
            for (int i = 0; i < 32; ++i)
                dropped[i / 4][i % 4] = Drop::apply(kept, i, scores[i / 4][i % 4]);
            probabilities.round(dropped);
            product(dv_sums, probabilities, gradients);
        }
        if constexpr (WANTED & OF_KEYS) {
            products_wait<WANTED & OF_VALUES ? 1 : 0>();
            pin(slopes);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                float2 deltas = statistics[4 * n + ROWS / 2];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    slopes[n][c] =
                        scores[n][c] * fmaf(Drop::apply(kept, 4 * n + c, slopes[n][c]),
                                            drop.scale(), -(c % 2 ? deltas.y : deltas.x));
                }
            }
            operand.round(slopes);
            product(dk_sums, operand, queries);
        }
        products_wait<0>();
        pin(dk_sums);
        pin(dv_sums);
    }
    fetches_wait<0>();
    const float factor[2] = {of.scale, of.scale}, value_factor[2] = {drop.scale(), drop.scale()};
    if constexpr (WANTED & OF_KEYS)
        store(own, first, dk_sums, factor, dk, dk_stride, rows, of.width);
    if constexpr (WANTED & OF_VALUES)
        store(own_values, first, dv_sums, value_factor, dv, dv_stride, rows, of.width);
}

#define KEYS(WIDTH, DROP, LENGTHS, WANTED)                                                         \
    keys<WIDTH, DROP, LENGTHS, WANTED>(of, q, k, v, d_o, rows, dk, dv, q_stride, k_stride,         \
                                       v_stride, d_o_stride, dk_stride, dv_stride)
#define ATTENTION_BACKWARD(NAME, WIDTH, DROP, LENGTHS, BOUNDS_Q, BOUNDS_K)                         \
    extern "C" __global__ void BOUNDS_Q NAME##_queries(                                            \
        const bf16* q, const bf16* k, const bf16* v, const bf16* o, const bf16* d_o,               \
        const float* lse, float* rows, bf16* dq, u32 q_stride, u32 k_stride, u32 v_stride,         \
        u32 o_stride, u32 d_o_stride, u32 dq_stride, SHARED_PARAMETERS) {                          \
        queries<WIDTH, DROP, LENGTHS>(SHARED, q, k, v, o, d_o, lse, rows, dq, q_stride, k_stride,  \
                                      v_stride, o_stride, d_o_stride, dq_stride);                  \
    }                                                                                              \
    extern "C" __global__ void BOUNDS_K NAME##_keys(                                               \
        const bf16* q, const bf16* k, const bf16* v, const bf16* d_o, const float* rows, bf16* dk, \
        bf16* dv, u32 q_stride, u32 k_stride, u32 v_stride, u32 d_o_stride, u32 dk_stride,         \
        u32 dv_stride, SHARED_PARAMETERS) {                                                        \
        Attention of SHARED;                                                                       \
        if constexpr (WIDTH == 64)                                                                 \
            KEYS(WIDTH, DROP, LENGTHS, OF_BOTH);                                                   \
        else if (blockIdx.y == 0)                                                                  \
            KEYS(WIDTH, DROP, LENGTHS, OF_KEYS);                                                   \
        else                                                                                       \
            KEYS(WIDTH, DROP, LENGTHS, OF_VALUES);                                                 \
    }
ATTENTION_BACKWARD(attention_backward_64, 64, KeepAll, AllKeys, TOGETHER(4, 2), TOGETHER(3, 2))
ATTENTION_BACKWARD(attention_backward_128, 128, KeepAll, AllKeys, TOGETHER(2, 2), TOGETHER(2, 2))
ATTENTION_BACKWARD(attention_backward_dropout_64, 64, Dropout, AllKeys, TOGETHER(4, 2),
                   TOGETHER(3, 2))
ATTENTION_BACKWARD(attention_backward_dropout_128, 128, Dropout, AllKeys, TOGETHER(2, 2),
                   TOGETHER(2, 2))
ATTENTION_BACKWARD(attention_backward_64_lengths, 64, KeepAll, FirstKeys, TOGETHER(4, 2),
                   TOGETHER(2, 2))
ATTENTION_BACKWARD(attention_backward_128_lengths, 128, KeepAll, FirstKeys, TOGETHER(2, 2),
                   TOGETHER(2, 2))
ATTENTION_BACKWARD(attention_backward_dropout_64_lengths, 64, Dropout, FirstKeys, TOGETHER(4, 2),
                   TOGETHER(2, 2))
ATTENTION_BACKWARD(attention_backward_dropout_128_lengths, 128, Dropout, FirstKeys, TOGETHER(2, 2),
                   TOGETHER(2, 2))
