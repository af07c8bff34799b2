//! Tests of the kernels with the bits of `sparse24-core` and `sparse24-cpu`, in one process.
//!
//! Without a GPU, tests report that they were skipped, or fail if `SPARSE24_REQUIRE_GPU` is set.
//! Outputs are poisoned and lie between guard bands. Results are compared bit for bit where core
//! defines the bits; elsewhere the conformance suite (`tests/src/conformance.rs`) checks values.

mod activation;
mod attention;
mod dropout;
mod embedding;
mod flip;
mod gemm;
mod graph;
mod loss;
mod memory;
mod mvue;
mod nccl;
mod norm;
mod optimizer;
mod planted;
mod prune;
mod search;
mod spmm24;
mod support;
