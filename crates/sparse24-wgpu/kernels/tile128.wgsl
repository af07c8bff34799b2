// An output tile of gemm has 128x128 elements, and its workgroup 16x16 invocations.

const LANES: u32 = 16u;
