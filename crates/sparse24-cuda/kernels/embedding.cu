// embed_forward: row i of out = row tokens[i] of the token table + row (i mod context) of the position table
// embed_order: order = the rows sorted by token, and those of one token by their number
// embed_runs, embed_join: row t of the token table's gradient += the sum of the rows of dout whose token is t
// embed_positions: row t of the position table's gradient += the sum of the rows t, t + context, ... of dout
// in   tokens u32 [rows]; tables f32 [vocabulary, 4 quads] and [at least context, 4 quads], a null position table is zero;
//      dout bf16 [rows, 4 quads]
// out  out bf16 [rows, 4 quads], overwritten, NaN where a token is outside of the vocabulary; order u32 [rows], overwritten; gradients f32,
//      accumulated, such tokens ignored; pieces f32 [2 * ceil(rows / 32), 4 quads] is scratch
// pre  out and dout 8-byte, tables and pieces 16-byte aligned; vocabulary < 2^32 - 1
// acc  f32, fixed order: the sorted rows in spans of 32, and the spans in order
// ref  sparse24_cpu::embedding; bounds: tolerance::{embedding, embedding_gradient}
#include "scalar.cuh"

constexpr u32 SPAN = 32, NONE = 0xffffffffu;

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 widen(uint2 x) {
    return make_float4(widen_low(x.x), widen_high(x.x), widen_low(x.y), widen_high(x.y));
}

// A warp has a row.
extern "C" __global__ void __launch_bounds__(256, 6)
    embed_forward(const u32* __restrict__ tokens, const float4* __restrict__ table, const float4* __restrict__ positions, uint2* out, u32 rows,
                  u32 context, u32 quads, u32 vocabulary) {
    u32 row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    u32 token = tokens[row], position = row % context;
    for (u32 quad = threadIdx.x % 32; quad < quads; quad += 32) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (positions) x = positions[u64(position) * quads + quad];
        u64 at = u64(row) * quads + quad;
        if (token >= vocabulary) {
            out[at] = make_uint2(NONE, NONE);
            continue;
        }
        x = plus(table[u64(token) * quads + quad], x);
        out[at] = make_uint2(narrow_pair(x.x, x.y), narrow_pair(x.z, x.w));
    }
}

// A block counts, for 64 rows, the rows that come before each: all smaller tokens, and equal ones with a smaller number.
extern "C" __global__ void __launch_bounds__(256)
    embed_order(const u32* __restrict__ tokens, u32* order, u32 rows, u32 vocabulary) {
    constexpr u32 ROWS = 64, SLICES = 4, KEYS = 2048;
    __shared__ uint4 keys[KEYS / 4];
    __shared__ u32 ranks[SLICES][ROWS];
    u32 first = blockIdx.x * ROWS, row = first + threadIdx.x % ROWS, slice = threadIdx.x / ROWS, rank = 0;
    auto key_of = [&](u32 at) { return at < rows ? min(tokens[at], vocabulary) : NONE; };
    u32 key = key_of(row);
    for (u32 start = 0; start < rows; start += KEYS) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < KEYS; i += 256) reinterpret_cast<u32*>(keys)[i] = key_of(start + i);
        __syncthreads();
#pragma unroll 8
        for (u32 i = slice * (KEYS / 4 / SLICES); i < (slice + 1) * (KEYS / 4 / SLICES); ++i) {
            uint4 of = keys[i];
            // Equal tokens before this block's rows; those among them follow below.
            u32 limit = key + (start + 4 * i < first);
            rank += (of.x < limit) + (of.y < limit) + (of.z < limit) + (of.w < limit);
        }
    }
    for (u32 at = first + slice; at < row; at += SLICES) rank += key_of(at) == key;
    ranks[slice][threadIdx.x % ROWS] = rank;
    __syncthreads();
    if (slice == 0 && row < rows) {
        for (u32 s = 1; s < SLICES; ++s) rank += ranks[s][threadIdx.x];
        order[rank] = row;
    }
}

// The token of a place in the order; NONE beyond both ends.
struct Sorted {
    const u32 *tokens, *order;
    u32 rows, vocabulary;
    __device__ __forceinline__ u32 operator[](u32 place) const { return place < rows ? min(tokens[order[place]], vocabulary) : NONE; }
};

// A warp has a span of places and 128 columns. A run of one token within the span goes to the table; what is cut at its ends is kept:
// pieces [0] began in an earlier span, pieces [1] begins here and goes on.
extern "C" __global__ void __launch_bounds__(256, 4)
    embed_runs(const uint2* __restrict__ dout, const u32* __restrict__ tokens, const u32* __restrict__ order, float4* table, float4* pieces,
               u32 rows, u32 quads, u32 vocabulary) {
    constexpr u32 AHEAD = 8;
    Sorted sorted = {tokens, order, rows, vocabulary};
    u32 spans = (rows + SPAN - 1) / SPAN, span = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, quad = blockIdx.y * 32 + lane;
    if (span >= spans) return;
    u32 start = span * SPAN, count = min(SPAN, rows - start), row = lane < count ? order[start + lane] : 0, key = sorted[start + lane];
    u32 before = start > 0 ? sorted[start - 1] : NONE, after = sorted[start + SPAN];
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (u32 first = 0; first < count; first += AHEAD) {
        uint2 raw[AHEAD];
#pragma unroll
        for (u32 a = 0; a < AHEAD; ++a) {
            u32 of = __shfl_sync(NONE, row, first + a);
            raw[a] = first + a < count && quad < quads ? dout[u64(of) * quads + quad] : make_uint2(0, 0);
        }
#pragma unroll
        for (u32 a = 0; a < AHEAD; ++a) {
            u32 place = first + a, token = __shfl_sync(NONE, key, place), following = __shfl_sync(NONE, key, place + 1);
            if (place >= count) continue;
            sum = plus(sum, widen(raw[a]));
            bool last = place + 1 == count;
            if (!last && following == token) continue;
            u64 piece = u64(span) * quads + quad;
            if (quad < quads && token < vocabulary) {
                if (token == before) pieces[piece] = sum;
                else if (last && token == after) pieces[u64(spans) * quads + piece] = sum;
                else table[u64(token) * quads + quad] = plus(table[u64(token) * quads + quad], sum);
            }
            sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

// The pieces of each run that begins in a span and goes on, in order.
extern "C" __global__ void __launch_bounds__(256, 6)
    embed_join(const u32* __restrict__ tokens, const u32* __restrict__ order, float4* table, const float4* __restrict__ pieces, u32 rows,
               u32 quads, u32 vocabulary) {
    Sorted sorted = {tokens, order, rows, vocabulary};
    u32 spans = (rows + SPAN - 1) / SPAN, span = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, quad = blockIdx.y * 32 + lane;
    if (span + 1 >= spans) return;
    u32 token = sorted[(span + 1) * SPAN], before = span > 0 ? sorted[span * SPAN - 1] : NONE;
    if (token != sorted[span * SPAN + SPAN - 1] || token == before || token >= vocabulary) return;
    u32 at = min(quad, quads - 1);
    float4 sum = pieces[u64(spans + span) * quads + at];
    for (u32 next = span + 1, found = 32; found == 32; next += 32) {
        u32 going = __ballot_sync(NONE, next + lane < spans && sorted[(next + lane) * SPAN] == token);
        found = __popc(going);
#pragma unroll 8
        for (u32 i = 0; i < found; ++i) sum = plus(sum, pieces[u64(next + i) * quads + at]);
    }
    if (quad < quads) table[u64(token) * quads + quad] = plus(table[u64(token) * quads + quad], sum);
}

// A warp has a position and 128 columns.
extern "C" __global__ void __launch_bounds__(256, 6)
    embed_positions(const uint2* __restrict__ dout, float4* positions, u32 rows, u32 context, u32 quads) {
    u32 position = blockIdx.x * 8 + threadIdx.x / 32, quad = blockIdx.y * 32 + threadIdx.x % 32;
    if (position >= min(context, rows) || quad >= quads) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (u64 row = position; row < rows; row += context) sum = plus(sum, widen(dout[row * quads + quad]));
    float4* to = positions + u64(position) * quads + quad;
    *to = plus(*to, sum);
}
