//! Every kernel against `sparse24-core` and `sparse24-cpu`, in one process.
//!
//! Without a GPU each test says that it was skipped and why; where `SPARSE24_REQUIRE_GPU` is set,
//! that fails it. Outputs start poisoned and stand between guard bands. Bit for bit where core
//! defines the bits; other results within the bounds of `tolerance`.

mod activation;
mod adamw;
mod attention;
#[cfg(feature = "bench")]
mod bench;
mod bias;
mod dropout;
mod embedding;
mod flip;
mod gemm;
mod loss;
mod memory;
mod mvue;
mod norm;
mod planted;
mod prune;
mod recording;
mod search;
mod spmm24;
mod support;
mod tolerance;
