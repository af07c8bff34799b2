// The table of tensors that the optimizer updates. Mirrors sparse24_cuda::optimizer.
#pragma once
#include "health.cuh"
#include "scalar.cuh"

// One tensor. Pointers are 16-byte aligned; v, tiles and shadow may be null.
struct Parameter {
    float* w;
    const float* g;
    float* m;
    float* v;
    const u16* tiles;  // [rows/4, columns/4], the mask of the forward
    bf16* shadow;      // w, rounded
    u64 length;
    u32 columns;
    float weight_decay;
};

// The part of a tensor that one block works on: elements CHUNK*part .. CHUNK*(part+1). Tensors are
// in the order of the table.
struct Chunk {
    u32 tensor;
    u32 part;
};
constexpr u32 CHUNK = 8192, CHUNK_THREADS = 256;
