//! Rayon and SIMD kernels for 2:4 sparse pre-training on CPUs.
//!
//! The sparse kernels have the names of [`sparse24_core`] and give its results bit for bit, for any
//! number of threads and at every SIMD level. The dense kernels give the same bits for any number
//! of threads at one SIMD level. The caller allocates outputs; every element of an output is
//! overwritten unless its operation says otherwise or an operand is empty.
#![deny(unsafe_code)]

pub mod activation;
pub mod add;
pub mod attention;
pub mod average;
pub mod bias;
mod check;
mod compressed;
pub mod dropout;
mod elementwise;
pub mod embedding;
mod error;
pub mod gemm;
pub mod loss;
pub mod math;
pub mod mvue;
pub mod norm;
pub mod optimizer;
pub mod permute;
mod product;
pub mod prune;
pub mod rounding;
pub mod rows;
pub mod scale;
pub mod search;
#[allow(unsafe_code)]
pub mod simd;
pub mod spmm24;
pub mod strips;
mod tasks;
mod threads;
pub mod threshold;

pub use error::Error;
pub use ndarray;
pub use simd::Simd;
pub use threads::{MOST_THREADS, on_threads, threads};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
