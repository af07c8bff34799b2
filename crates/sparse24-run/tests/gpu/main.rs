//! Training on a GPU: against training on the CPU, in one process, by replayed plans, and where
//! memory does not suffice.
//!
//! Without a GPU each test says that it was skipped and why; where `SPARSE24_REQUIRE_GPU` is set,
//! that fails it.

mod launches;
mod memory;
mod plans;
mod ranks;
mod step;
mod support;
