//! The kernels where the conformance suite of the workspace does not reach: the sparse ones against
//! core, bit for bit, with all element types, hostile values, any strides, numbers of threads and
//! SIMD levels; the dense ones in other layouts and on extreme inputs; operands that do not fit.

mod activation;
mod compress;
mod edges;
mod errors;
mod gemm;
mod input;
mod math;
mod mvue;
mod permute;
mod search;
mod strips;
