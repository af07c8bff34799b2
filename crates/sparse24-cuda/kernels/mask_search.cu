// mask_search_{f32,bf16}: the transposable mask of largest kept L1 norm
// row_mask_search_*, column_mask_search_*: the two largest magnitudes of every group
// in   w f32 or bf16 [r,q], rows `stride` apart
// out  tiles u16 [r/4,q/4], overwritten, never read
// pre  r, q and stride multiples of 4; w aligned to four elements; a warp has 32 tiles of a row;
//      grid rows continue in grid planes; about `resident` blocks run at once; tiles alias nothing
// acc  f32, every operation rounded, in core's order
// ref  sparse24_core::search::mask_search, bit for bit
#include "pdl.cuh"
#include "scalar.cuh"

// sparse24_core::search::CODES: the bits of every 7-bit code.
alignas(4) __device__ const u16 CODES[128] = {
    0xa5a5, 0x96a5, 0x69a5, 0x5aa5, 0xc3a5, 0x3ca5, 0x0000, 0x0000, 0xa596, 0x9696, 0x6996, 0x5a96,
    0xc396, 0x3c96, 0x0000, 0x0000, 0xa569, 0x9669, 0x6969, 0x5a69, 0xc369, 0x3c69, 0x0000, 0x0000,
    0xa55a, 0x965a, 0x695a, 0x5a5a, 0xc35a, 0x3c5a, 0x0000, 0x0000, 0xa5c3, 0x96c3, 0x69c3, 0x5ac3,
    0xc3c3, 0x3cc3, 0x0000, 0x0000, 0xa53c, 0x963c, 0x693c, 0x5a3c, 0xc33c, 0x3c3c, 0x0000, 0x0000,
    0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000,
    0x0000, 0x0000, 0x0000, 0x0000, 0xa965, 0x65a9, 0xa956, 0x659a, 0x9a65, 0x56a9, 0x9a56, 0x569a,
    0xc963, 0x63c9, 0xc936, 0x639c, 0x9c63, 0x36c9, 0x9c36, 0x369c, 0xc5a3, 0xa3c5, 0xc53a, 0xa35c,
    0x5ca3, 0x3ac5, 0x5c3a, 0x3a5c, 0xca53, 0x53ca, 0xca35, 0x53ac, 0xac53, 0x35ca, 0xac35, 0x35ac,
    0xc693, 0x93c6, 0xc639, 0x936c, 0x6c93, 0x39c6, 0x6c39, 0x396c, 0xa695, 0x95a6, 0xa659, 0x956a,
    0x6a95, 0x59a6, 0x6a59, 0x596a, 0xaa55, 0x9966, 0x6699, 0x55aa, 0xcc33, 0x33cc, 0x0000, 0x0000,
    0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000, 0x0000,
};
constexpr u32 THREADS = 128, WARPS = THREADS / 32, PAIR_CODES = 64, SHARED_CODES = 112;

struct Candidate {
    float norm;
    u32 code;
};

// Four elements as they lie in memory.
template <class T> struct Row;
template <> struct Row<float> {
    using type = float4;
};
template <> struct Row<bf16> {
    using type = uint2;
};

// Magnitudes, clamped to a limit whose upper half is given; a NaN counts as the limit.
template <u32 LIMIT> __device__ __forceinline__ float4 magnitude(float4 w) {
    float limit = widen_low(LIMIT);
    return make_float4(fminf(fabsf(w.x), limit), fminf(fabsf(w.y), limit), fminf(fabsf(w.z), limit),
                       fminf(fabsf(w.w), limit));
}
template <u32 LIMIT> __device__ __forceinline__ u32 magnitude_pair(u32 w) {
    u32 magnitude;
    asm("{.reg .b32 m;\nabs.bf16x2 m, %1;\nmin.bf16x2 %0, m, %2;}"
        : "=r"(magnitude)
        : "r"(w), "r"(LIMIT * 0x10001u));
    return magnitude;
}
template <u32 LIMIT> __device__ __forceinline__ float4 magnitude(uint2 w) {
    u32 low = magnitude_pair<LIMIT>(w.x), high = magnitude_pair<LIMIT>(w.y);
    return make_float4(widen_low(low), widen_high(low), widen_low(high), widen_high(high));
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator-(float4 a, float4 b) {
    return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}

// 2*code + the sign bit.
__device__ __forceinline__ u32 push_sign(u32 code, float x) {
    return __funnelshift_l(__float_as_uint(x), code, 1);
}

// The later candidate where its norm is strictly greater.
__device__ __forceinline__ Candidate later(Candidate best, Candidate next) {
    bool replaces = next.norm > best.norm;
    return {replaces ? next.norm : best.norm, replaces ? next.code : best.code};
}

// x_01, x_02, x_03, x_12, x_13, x_23.
__device__ __forceinline__ void differences(float4 x, float (&pairs)[6]) {
    pairs[0] = x.x - x.y, pairs[1] = x.x - x.z, pairs[2] = x.x - x.w;
    pairs[3] = x.y - x.z, pairs[4] = x.y - x.w, pairs[5] = x.z - x.w;
}

// tb(x), and `codes` plus the three bits of its set.
__device__ __forceinline__ Candidate top_minus_bottom(const float (&x)[6], u32 codes) {
    float split = fabsf(x[0]) + fabsf(x[5]), across = x[1] + x[4];
    bool together = fabsf(across) > split;
    u32 set = push_sign(push_sign(codes >> 2, x[5]), x[0]);
    return {together ? fabsf(across) : split, together ? push_sign((codes | 4) >> 1, across) : set};
}

// sparse24_core::search::code of magnitudes.
__device__ __forceinline__ u32 transposable_code(const float4 (&m)[4]) {
    float upper[6], lower[6], across[6];
    differences(m[0] - m[1], upper);
    differences(m[2] - m[3], lower);
    differences((m[0] + m[1]) - (m[2] + m[3]), across);
    Candidate best;
#pragma unroll
    for (int pair = 0; pair < 6; ++pair) {
        float d = upper[pair], d_lower = lower[pair], shared = across[5 - pair];
        u32 code = push_sign(push_sign(push_sign(PAIR_CODES / 8 + pair, d_lower), d), shared);
        Candidate next = {(fabsf(d) + fabsf(d_lower)) + fabsf(shared), code};
        best = pair == 0 ? next : later(best, next);
    }
    best = later(best, top_minus_bottom(across, SHARED_CODES));
    Candidate above = top_minus_bottom(upper, 0), below = top_minus_bottom(lower, 0);
    return later(best, {above.norm + below.norm, 8 * above.code + below.code}).code;
}

__device__ __forceinline__ bool two_of(bool x, bool y, bool z) {
    return (x && y) || (z && (x || y));
}

// The kept bits of the two largest; a later element beats an earlier one only if it is larger.
__device__ __forceinline__ u32 largest_two(float a, float b, float c, float e) {
    bool b_a = b > a, c_a = c > a, e_a = e > a, c_b = c > b, e_b = e > b, e_c = e > c;
    return u32(!two_of(b_a, c_a, e_a)) | u32(!two_of(!b_a, c_b, e_b)) << 1 |
           u32(!two_of(!c_a, !c_b, e_c)) << 2 | u32(!two_of(!e_a, !e_b, !e_c)) << 3;
}

__device__ __forceinline__ u32 row_wise(const float4 (&m)[4]) {
    u32 bits = 0;
#pragma unroll
    for (int row = 0; row < 4; ++row)
        bits |= largest_two(m[row].x, m[row].y, m[row].z, m[row].w) << (4 * row);
    return bits;
}

__device__ __forceinline__ u32 column_wise(const float4 (&m)[4]) {
    float4 columns[4] = {
        make_float4(m[0].x, m[1].x, m[2].x, m[3].x), make_float4(m[0].y, m[1].y, m[2].y, m[3].y),
        make_float4(m[0].z, m[1].z, m[2].z, m[3].z), make_float4(m[0].w, m[1].w, m[2].w, m[3].w)};
    return transposed(row_wise(columns));
}

struct Transposable {
    static constexpr u32 LIMIT = 0x7d80;  // 2^124
    static __device__ __forceinline__ u32 bits(const float4 (&m)[4], const u16* codes) {
        return codes[transposable_code(m)];
    }
};
struct RowWise {
    static constexpr u32 LIMIT = 0x7f80;  // infinity
    static __device__ __forceinline__ u32 bits(const float4 (&m)[4], const u16*) {
        return row_wise(m);
    }
};
struct ColumnWise {
    static constexpr u32 LIMIT = 0x7f80;
    static __device__ __forceinline__ u32 bits(const float4 (&m)[4], const u16*) {
        return column_wise(m);
    }
};

template <class Rule, class T>
__device__ __forceinline__ void search(const T* w, u16* tiles, u64 stride, u32 rows, u32 columns,
                                       u32 resident) {
    u32 lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane,
        high = blockIdx.z * gridDim.y + blockIdx.y, row = high * WARPS + threadIdx.x / 32;
    bool exists = row < rows && column < columns;
    const T* at = w + 4 * (u64(row) * stride + column);
    // Only the first resident blocks have time to prefetch; rows of f32, twice as long, would
    // compete with the previous kernel.
    if (sizeof(T) == 2 && high * gridDim.x + blockIdx.x < resident && lane < 4 && row < rows)
        prefetch(w + (4 * u64(row) + lane) * stride + 4 * (column - lane),
                 4 * sizeof(T) * min(32u, columns - (column - lane)));
    pdl_wait();
    if (threadIdx.x == 0) pdl_launch_dependents();
    typename Row<T>::type raw[4];
    if (exists) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            raw[i] = *reinterpret_cast<const typename Row<T>::type*>(at + i * stride);
    }
    // In shared memory, because lanes look up different codes; filled while the rows are in flight.
    __shared__ u32 codes[64];
    if (threadIdx.x < 64)
        asm("ld.global.u32 %0, [%1];"
            : "=r"(codes[threadIdx.x])
            : "l"(reinterpret_cast<const u32*>(CODES) + threadIdx.x));
    __syncthreads();
    if (!exists) return;
    float4 m[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) m[i] = magnitude<Rule::LIMIT>(raw[i]);
    tiles[u64(row) * columns + column] = u16(Rule::bits(m, reinterpret_cast<const u16*>(codes)));
}

#define ENTRY(name, T, Rule)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        name(const T* w, u16* tiles, u64 stride, u32 rows, u32 columns, u32 resident) {            \
        search<Rule>(w, tiles, stride, rows, columns, resident);                                   \
    }
ENTRY(mask_search_f32, float, Transposable)
ENTRY(mask_search_bf16, bf16, Transposable)
ENTRY(row_mask_search_f32, float, RowWise)
ENTRY(row_mask_search_bf16, bf16, RowWise)
ENTRY(column_mask_search_f32, float, ColumnWise)
ENTRY(column_mask_search_bf16, bf16, ColumnWise)
