// embed_forward: row i of out = scale * row tokens[i] of the token table + row (i mod context) of
//      the position table
// embed_sort, embed_order: order = the rows sorted by token, stably; sorted = their tokens
// embed_runs, embed_join: row t of the token table's gradient += scale * the sum of the rows of
//      dout with token t
// embed_positions: row t of the position table's gradient += the sum of the rows t, t + context,
//      ... of dout
// in   tokens u32 [rows]; tables f32 [vocabulary, 4 vectors] and [at least context, 4 vectors], a
//      null position table is zero; dout bf16 [rows, 4 vectors]
// out  out bf16 [rows, 4 vectors], overwritten, NaN for a token outside the vocabulary; order and
//      sorted u32 [rows], overwritten; gradients f32, accumulated, such tokens ignored; scratch:
//      pieces f32 [2 * ceil(rows / 32), 4 vectors], keys and numbers u32 [rows]
// pre  out and dout 8-byte, tables and pieces 16-byte aligned; vocabulary < 2^32 - 1; context > 0
// acc  f32, fixed order: the sorted rows in spans of 32, and the spans in order
// ref  sparse24_cpu::embedding, within the bounds of the conformance suite
#include "pdl.cuh"
#include "scalar.cuh"

constexpr u32 SPAN = 32, STRETCH = 256, NONE = 0xffffffffu;

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 widen(uint2 x) {
    return make_float4(widen_low(x.x), widen_high(x.x), widen_low(x.y), widen_high(x.y));
}

__device__ __forceinline__ float4 times(float scale, float4 x) {
    return make_float4(scale * x.x, scale * x.y, scale * x.z, scale * x.w);
}

// One row per warp.
extern "C" __global__ void __launch_bounds__(256, 6)
    embed_forward(const u32* tokens, const float4* table, const float4* positions, uint2* out,
                  u32 rows, u32 context, u32 vectors, u32 vocabulary, float scale) {
    u32 row = blockIdx.x * 8 + threadIdx.x / 32;
    pdl_wait();
    if (row >= rows) return;
    u32 token = tokens[row], position = row % context;
    for (u32 vector = threadIdx.x % 32; vector < vectors; vector += 32) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (positions) x = positions[u64(position) * vectors + vector];
        u64 at = u64(row) * vectors + vector;
        if (token >= vocabulary) {
            out[at] = make_uint2(NONE, NONE);
            continue;
        }
        x = plus(times(scale, table[u64(token) * vectors + vector]), x);
        out[at] = make_uint2(narrow_pair(x.x, x.y), narrow_pair(x.z, x.w));
    }
}

// A block sorts a stretch of rows by token: `keys` and `numbers` in the order of the stretch.
extern "C" __global__ void __launch_bounds__(STRETCH)
    embed_sort(const u32* tokens, u32* keys, u32* numbers, u32 rows, u32 vocabulary) {
    __shared__ uint4 all[STRETCH / 4];
    pdl_wait();
    u32 row = blockIdx.x * STRETCH + threadIdx.x,
        key = row < rows ? min(tokens[row], vocabulary) : NONE, warp = threadIdx.x & ~31u;
    reinterpret_cast<u32*>(all)[threadIdx.x] = key;
    __syncthreads();
    // Counts smaller tokens, and equal ones with a smaller number: in earlier warps by comparison,
    // in this one by the match.
    u32 rank = __popc(__match_any_sync(NONE, key) & ((1u << (threadIdx.x % 32)) - 1));
#pragma unroll 8
    for (u32 i = 0; i < STRETCH / 4; ++i) {
        uint4 of = all[i];
        u32 limit = key + (4 * i < warp);
        rank += (of.x < limit) + (of.y < limit) + (of.z < limit) + (of.w < limit);
    }
    if (row >= rows) return;
    keys[blockIdx.x * STRETCH + rank] = key;
    numbers[blockIdx.x * STRETCH + rank] = row;
}

// The place of each row among all: its place in its own stretch, plus the tokens that precede it in
// each other stretch. A block has 32 rows, and warp w the stretches w, w + 16, ...
extern "C" __global__ void __launch_bounds__(512)
    embed_order(const u32* keys, const u32* numbers, u32* order, u32* sorted, u32 rows) {
    constexpr u32 WARPS = 16;
    __shared__ u32 places[WARPS][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = blockIdx.x * 32 + lane,
        own = at / STRETCH, place = 0;
    pdl_wait();
    u32 key = at < rows ? keys[at] : 0;
#pragma unroll 4
    for (u32 other = warp; other < (rows + STRETCH - 1) / STRETCH; other += WARPS) {
        const u32* of = keys + other * STRETCH;
        u32 count = min(STRETCH, rows - other * STRETCH), limit = key + (other < own), before = 0;
#pragma unroll
        for (u32 step = STRETCH; step > 0; step /= 2) {
            // Reads unconditionally: with a branch, each stretch would be waited for in turn.
            u32 next = before + step, of_next = of[min(next, count) - 1];
            before = next <= count && of_next < limit ? next : before;
        }
        place += other == own ? at % STRETCH : before;
    }
    places[warp][lane] = place;
    __syncthreads();
    if (warp != 0 || at >= rows) return;
    for (u32 w = 1; w < WARPS; ++w) place += places[w][lane];
    order[place] = numbers[at];
    sorted[place] = key;
}

// NONE beyond both ends.
__device__ __forceinline__ u32 token_at(const u32* sorted, u32 place, u32 rows) {
    return place < rows ? sorted[place] : NONE;
}

// A warp has a span of places and 128 columns. The sum of a run of one token within the span goes
// to the table; sums of runs that are cut at its ends are kept: pieces [0] started in an earlier
// span, pieces [1] start here and continue.
extern "C" __global__ void __launch_bounds__(256, 2)
    embed_runs(const uint2* dout, const u32* sorted, const u32* order, float4* table,
               float4* pieces, u32 rows, u32 vectors, u32 vocabulary, float scale) {
    constexpr u32 AHEAD = 8;
    u32 spans = (rows + SPAN - 1) / SPAN, span = blockIdx.x * 8 + threadIdx.x / 32,
        lane = threadIdx.x % 32, vector = blockIdx.y * 32 + lane;
    pdl_wait();
    if (span >= spans) return;
    u32 start = span * SPAN, count = min(SPAN, rows - start),
        row = lane < count ? order[start + lane] : 0;
    u32 key = token_at(sorted, start + lane, rows), after = token_at(sorted, start + SPAN, rows);
    u32 before = start > 0 ? sorted[start - 1] : NONE;
    u32 following = __shfl_down_sync(NONE, key, 1);
    // What happens to the sum after a place: nothing yet, or it is the rest of a run, the beginning
    // of one, or all of it.
    enum { GOES_ON, REST, BEGINNING, WHOLE };
    bool last = lane + 1 == count;
    u32 end = !last && following == key ? GOES_ON
              : key == before           ? REST
              : last && key == after    ? BEGINNING
                                        : WHOLE;
    float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f), sum = zero;
    for (u32 first = 0; first < count; first += AHEAD) {
        uint2 raw[AHEAD];
        float4 held[AHEAD];
#pragma unroll
        for (u32 a = 0; a < AHEAD; ++a) {
            u32 of = __shfl_sync(NONE, row, first + a), token = __shfl_sync(NONE, key, first + a),
                at = __shfl_sync(NONE, end, first + a);
            bool here = first + a < count && vector < vectors;
            raw[a] = here ? dout[u64(of) * vectors + vector] : make_uint2(0, 0);
            held[a] = here && at == WHOLE && token < vocabulary
                          ? table[u64(token) * vectors + vector]
                          : zero;
        }
#pragma unroll
        for (u32 a = 0; a < AHEAD; ++a) {
            u32 token = __shfl_sync(NONE, key, first + a), at = __shfl_sync(NONE, end, first + a);
            sum = plus(sum, widen(raw[a]));
            if (at == GOES_ON || first + a >= count) continue;
            u64 piece = u64(span) * vectors + vector;
            if (vector < vectors && token < vocabulary) {
                if (at == REST)
                    pieces[piece] = sum;
                else if (at == BEGINNING)
                    pieces[u64(spans) * vectors + piece] = sum;
                else
                    table[u64(token) * vectors + vector] = plus(held[a], times(scale, sum));
            }
            sum = zero;
        }
    }
}

// Adds up the pieces of each run that starts in a span and continues, in order.
extern "C" __global__ void __launch_bounds__(256, 6)
    embed_join(const u32* sorted, float4* table, const float4* pieces, u32 rows, u32 vectors,
               u32 vocabulary, float scale) {
    u32 spans = (rows + SPAN - 1) / SPAN, span = blockIdx.x * 8 + threadIdx.x / 32,
        lane = threadIdx.x % 32, vector = blockIdx.y * 32 + lane;
    pdl_wait();
    if (span + 1 >= spans) return;
    u32 token = sorted[(span + 1) * SPAN], before = span > 0 ? sorted[span * SPAN - 1] : NONE;
    if (token != sorted[span * SPAN + SPAN - 1] || token == before || token >= vocabulary) return;
    u32 at = min(vector, vectors - 1);
    float4 sum = pieces[u64(spans + span) * vectors + at];
    for (u32 next = span + 1, found = 32; found == 32; next += 32) {
        u32 going =
            __ballot_sync(NONE, next + lane < spans && sorted[(next + lane) * SPAN] == token);
        found = __popc(going);
#pragma unroll 8
        for (u32 i = 0; i < found; ++i) sum = plus(sum, pieces[u64(next + i) * vectors + at]);
    }
    if (vector < vectors)
        table[u64(token) * vectors + vector] =
            plus(table[u64(token) * vectors + vector], times(scale, sum));
}

// A warp has a position and 128 columns.
extern "C" __global__ void __launch_bounds__(256, 6)
    embed_positions(const uint2* dout, float4* positions, u32 rows, u32 context, u32 vectors) {
    u32 position = blockIdx.x * 8 + threadIdx.x / 32, vector = blockIdx.y * 32 + threadIdx.x % 32;
    pdl_wait();
    if (position >= min(context, rows) || vector >= vectors) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (u64 row = position; row < rows; row += context)
        sum = plus(sum, widen(dout[row * vectors + vector]));
    float4* to = positions + u64(position) * vectors + vector;
    *to = plus(*to, sum);
}
