// A workgroup of gemm computes 128x128 elements: it has 16x16 invocations.

const LANES: u32 = 16u;
