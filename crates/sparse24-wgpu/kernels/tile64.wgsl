// An output tile of gemm has 64x64 elements, and its workgroup 8x8 invocations.

const LANES: u32 = 8u;
