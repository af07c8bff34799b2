//! The dense kernels where the conformance suite of the workspace does not reach: many rows on any
//! number of threads, other memory layouts, extreme inputs, and operands that do not fit.

mod activation;
mod check;
mod edges;
mod gemm;
mod math;
mod threads;
