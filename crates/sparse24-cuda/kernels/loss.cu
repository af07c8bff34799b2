// head_loss, loss_forward: with q = softmax(logits) and t = (1 - smoothing) * one-hot(target) +
//      smoothing / vocabulary for each row, losses = -sum(t * ln q); head_loss also overwrites the
//      logits with loss_scale * (q - t). With second targets, share * one-hot(target) +
//      (1 - share) * one-hot(second) takes the place of one-hot(target)
// squared_error: losses = (z - t)^2 for column 0 of the logits, z, where a target has the bits of
//      the f32 t; z becomes 2 * loss_scale * (z - t), other columns 0
// span_loss: one block per sequence of `rows` rows; with q = softmax over the first lengths[i] rows
//      of sequence i, of column 0 and of column 1, losses = -(ln q_0(first) + ln q_1(last)) / 2 and
//      z becomes loss_scale / 2 * (q - one-hot), where the first target that is not ignored is in
//      row `first` and is `last`; a sequence without one has loss 0. Other rows and columns get 0
// loss_sum: *loss = sum(losses), or += it; raises the flag of health if the result is not finite
// in   logits bf16 [rows, columns], where columns beyond `vocabulary` are padding and get zeros;
//      targets u32 [rows]: all ones is ignored (loss 0, zeros), another one outside the vocabulary
//      makes the row's loss and gradient NaN, as do a second target u32 [rows] outside it and a
//      span that ends beyond its length; shares f32 [rows], null with the second targets; lengths
//      u32 [sequences], at most `rows`; state: loss_scale; a null health is not written
// out  logits in place; losses f32 [rows], overwritten; loss f32; health
// pre  columns % 8 == 0, 16-byte aligned; the first `held` vectors of 8 fit in the launch's shared
//      memory; at most 512 threads
// acc  f32 in a row, f64 over rows; fixed order. A NaN or infinite logit makes the loss NaN or
//      infinite
// ref  sparse24_cpu::loss, within the bounds of the conformance suite
#include "pdl.cuh"
#include "health.cuh"
#include "philox.cuh"

constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;
constexpr u32 IGNORE = 0xffffffffu;

// A sum of 2^(x log2(e) - shift), which never overflows; shift belongs to the largest x so far.
struct Exponentials {
    float maximum, shift, sum, total;
};

struct Vector {
    float at[8];
};
__device__ __forceinline__ Vector widen(uint4 x) {
    return {widen_low(x.x), widen_high(x.x), widen_low(x.y), widen_high(x.y),
            widen_low(x.z), widen_high(x.z), widen_low(x.w), widen_high(x.w)};
}

__device__ __forceinline__ void rise(Exponentials& so_far, float maximum) {
    if (maximum > so_far.maximum) {
        float shift = maximum * LOG2E;
        so_far.sum *= power_of_two(so_far.shift - shift);
        so_far.maximum = maximum, so_far.shift = shift;
    }
}

__device__ __forceinline__ void add(Exponentials& so_far, uint4 raw) {
    Vector x = widen(raw);
    rise(so_far, fmaxf(fmaxf(fmaxf(x.at[0], x.at[1]), fmaxf(x.at[2], x.at[3])),
                       fmaxf(fmaxf(x.at[4], x.at[5]), fmaxf(x.at[6], x.at[7]))));
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = power_of_two(x.at[i] * LOG2E - so_far.shift);
    so_far.sum += ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
    so_far.total +=
        ((x.at[0] + x.at[1]) + (x.at[2] + x.at[3])) + ((x.at[4] + x.at[5]) + (x.at[6] + x.at[7]));
}

// Combines all threads; every thread gets the same bits.
__device__ __forceinline__ Exponentials of_block(Exponentials own) {
    __shared__ float slots[3][16];
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32;
    float maximum = warp_max(own.maximum);
    if (threadIdx.x % 32 == 0) slots[0][warp] = maximum;
    __syncthreads();
    for (u32 w = 0; w < warps; ++w) maximum = fmaxf(maximum, slots[0][w]);
    rise(own, maximum);
    float sum = warp_sum(own.sum), total = warp_sum(own.total);
    if (threadIdx.x % 32 == 0) slots[1][warp] = sum, slots[2][warp] = total;
    __syncthreads();
    own.sum = own.total = 0.0f;
    for (u32 w = 0; w < warps; ++w) own.sum += slots[1][w], own.total += slots[2][w];
    return own;
}

enum class Gradient { Wanted, Absent };

template <Gradient GRADIENT>
__device__ __forceinline__ void row_loss(bf16* logits, const u32* targets,
                                         const u32* seconds, const float* shares, float* losses,
                                         u32 columns, u32 vocabulary, u32 held, float smoothing,
                                         const StepState* state) {
    extern __shared__ uint4 kept[];
    constexpr int AHEAD = 4;
    pdl_wait();
    logits += u64(blockIdx.x) * columns;
    uint4* vectors = reinterpret_cast<uint4*>(logits);
    u32 target = targets[blockIdx.x], whole = vocabulary / 8;
    if (target == IGNORE) {
        if (GRADIENT == Gradient::Wanted)
            for (u32 i = threadIdx.x; i < columns / 8; i += blockDim.x)
                vectors[i] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        return;
    }
    u32 second = seconds ? seconds[blockIdx.x] : target;
    float share = seconds ? shares[blockIdx.x] : 1.0f;
    float nan = __int_as_float(0x7fffffff), lowest = __int_as_float(0xff800000);
    float at_target = target < vocabulary ? widen(logits[target]) : nan,
          at_second = second < vocabulary ? widen(logits[second]) : nan;
    Exponentials own = {lowest, lowest, 0.0f, 0.0f};
    for (u32 first = threadIdx.x; first < whole; first += AHEAD * blockDim.x) {
        uint4 raw[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (first + a * blockDim.x < whole) raw[a] = vectors[first + a * blockDim.x];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            u32 i = first + a * blockDim.x;
            if (i >= whole) break;
            if (GRADIENT == Gradient::Wanted && i < held) kept[i] = raw[a];
            add(own, raw[a]);
        }
    }
    // The rest of the vocabulary, which ends within a vector.
    if (8 * whole + threadIdx.x < vocabulary) {
        float x = widen(logits[8 * whole + threadIdx.x]);
        rise(own, x);
        own.sum += power_of_two(x * LOG2E - own.shift), own.total += x;
    }
    Exponentials row = of_block(own);
    float floor = smoothing / float(vocabulary);
    if (threadIdx.x == 0)
        losses[blockIdx.x] = (row.shift * LN2 + logf(row.sum)) -
                             ((1.0f - smoothing) *
                                  (share * at_target + (1.0f - share) * at_second) +
                              floor * row.total);
    if (GRADIENT == Gradient::Absent) return;
    // A target outside the vocabulary is NaN here too.
    float scale = state->loss_scale;
    float inverse = scale / row.sum + (target < vocabulary && second < vocabulary ? 0.0f : nan);
    floor *= scale;
    auto gradient = [&](float x) { return power_of_two(x * LOG2E - row.shift) * inverse - floor; };
    auto of_column = [&](u32 c, float x) {
        float wanted = (c == target ? share : 0.0f) + (c == second ? 1.0f - share : 0.0f);
        return narrow(gradient(x) - scale * (1.0f - smoothing) * wanted);
    };
#pragma unroll 2
    for (u32 i = threadIdx.x; i < whole; i += blockDim.x) {
        Vector x = widen(i < held ? kept[i] : vectors[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x.at[e] = gradient(x.at[e]);
        vectors[i] = make_uint4(narrow_pair(x.at[0], x.at[1]), narrow_pair(x.at[2], x.at[3]),
                                narrow_pair(x.at[4], x.at[5]), narrow_pair(x.at[6], x.at[7]));
        if (i == target / 8) logits[target] = of_column(target, at_target);
        if (i == second / 8) logits[second] = of_column(second, at_second);
    }
    for (u32 c = 8 * whole + threadIdx.x; c < columns; c += blockDim.x)
        logits[c] = c < vocabulary ? of_column(c, widen(logits[c])) : bf16{0};
}

extern "C" __global__ void __launch_bounds__(512, 2)
    head_loss(bf16* logits, const u32* targets, const u32* seconds, const float* shares,
              float* losses, u32 columns, u32 vocabulary, u32 held, float smoothing,
              const StepState* state) {
    row_loss<Gradient::Wanted>(logits, targets, seconds, shares, losses, columns, vocabulary, held,
                               smoothing, state);
}

extern "C" __global__ void __launch_bounds__(512, 2)
    loss_forward(const bf16* logits, const u32* targets, const u32* seconds, const float* shares,
                 float* losses, u32 columns, u32 vocabulary, float smoothing) {
    row_loss<Gradient::Absent>(const_cast<bf16*>(logits), targets, seconds, shares, losses, columns,
                               vocabulary, 0, smoothing, nullptr);
}

// A thread has a row.
extern "C" __global__ void __launch_bounds__(256)
    squared_error(bf16* logits, const u32* targets, float* losses, u64 rows, u32 columns,
                  const StepState* state) {
    u64 row = u64(blockIdx.x) * 256 + threadIdx.x;
    if (row >= rows) return;
    pdl_wait();
    u32 target = targets[row];
    bf16* z = logits + row * columns;
    float difference = target == IGNORE ? 0.0f : widen(z[0]) - __uint_as_float(target);
    losses[row] = difference * difference;
    z[0] = narrow(2.0f * state->loss_scale * difference);
    for (u32 c = 1; c < columns; ++c) z[c] = bf16{0};
}

extern "C" __global__ void __launch_bounds__(512)
    span_loss(bf16* logits, const u32* targets, const u32* lengths, float* losses, u32 rows,
              u32 columns, const StepState* state) {
    __shared__ u32 first;
    pdl_wait();
    logits += u64(blockIdx.x) * rows * columns;
    targets += u64(blockIdx.x) * rows;
    u32 length = lengths[blockIdx.x];
    if (threadIdx.x == 0) first = IGNORE;
    __syncthreads();
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x)
        if (targets[row] != IGNORE) atomicMin(&first, row);
    __syncthreads();
    bool none = first == IGNORE;
    u32 span[2] = {first, none ? IGNORE : targets[first]};
    float scale = none ? 0.0f : 0.5f * state->loss_scale, loss = 0.0f;
    float lowest = __int_as_float(0xff800000), nan = __int_as_float(0x7fffffff);
    for (u32 column = 0; column < 2; ++column) {
        bf16* z = logits + column;
        Exponentials own = {lowest, lowest, 0.0f, 0.0f};
        for (u32 row = threadIdx.x; row < length; row += blockDim.x) {
            float x = widen(z[u64(row) * columns]);
            rise(own, x);
            own.sum += power_of_two(x * LOG2E - own.shift);
        }
        Exponentials all = of_block(own);
        bool inside = span[column] < length;
        float at_target = inside ? widen(z[u64(span[column]) * columns]) : nan;
        loss += (all.shift * LN2 + logf(all.sum)) - at_target;
        float inverse = scale / all.sum + (inside || none ? 0.0f : nan);
        // Every thread has read its target.
        __syncthreads();
        for (u32 row = threadIdx.x; row < rows; row += blockDim.x) {
            float x = widen(z[u64(row) * columns]);
            float gradient = power_of_two(x * LOG2E - all.shift) * inverse;
            if (row == span[column]) gradient -= scale;
            z[u64(row) * columns] = narrow(none || row >= length ? 0.0f : gradient);
        }
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = none ? 0.0f : 0.5f * loss;
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x)
        for (u32 c = 2; c < columns; ++c) logits[u64(row) * columns + c] = bf16{0};
}

// One block: thread t sums rows t, t + 1024, ...; then a binary tree.
extern "C" __global__ void __launch_bounds__(1024)
    loss_sum(const float* losses, float* loss, Health* health, u64 rows, u32 accumulate) {
    __shared__ double sums[1024];
    double sum = 0.0;
    pdl_wait();
    for (u64 row = threadIdx.x; row < rows; row += 1024) sum += losses[row];
    sums[threadIdx.x] = sum;
    for (u32 width = 512; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    }
    if (threadIdx.x != 0) return;
    float total = float(sums[0]) + (accumulate ? *loss : 0.0f);
    *loss = total;
    if (health && health->flag == 0 && !(fabsf(total) <= 3.4028234e38f)) health->flag = LOSS;
}
