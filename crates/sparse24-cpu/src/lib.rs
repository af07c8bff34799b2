//! Rayon and SIMD kernels for 2:4 sparse pre-training on CPUs.
//!
//! The sparse kernels carry the names of [`sparse24_core`] and give its results bit for bit, whatever the number of threads and the
//! SIMD level. Outputs are allocated by the caller; every element of an output is overwritten unless its operation says otherwise.
#![deny(unsafe_code)]

pub mod compressed;
pub mod decay;
mod error;
pub mod flip;
pub mod mvue;
mod nibbles;
pub mod prune;
pub mod search;
#[allow(unsafe_code)]
pub mod simd;
pub mod spmm24;
mod strips;

pub use error::Error;
pub use simd::Simd;
