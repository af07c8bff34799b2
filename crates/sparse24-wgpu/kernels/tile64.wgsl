// A workgroup of gemm computes 64x64 elements: it has 8x8 invocations.

const LANES: u32 = 8u;
