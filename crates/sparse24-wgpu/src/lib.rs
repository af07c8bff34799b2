//! WGSL kernels for 2:4 sparse pre-training on any GPU, through Vulkan, Metal or Direct3D 12.
//!
//! Operations have the names of [`sparse24_core`]. Masks, dropout decisions and the exact estimator
//! have its bits: WGSL leaves rounding, subnormal numbers and NaN to the implementation, so their
//! kernels do IEEE arithmetic with integers (`kernels/soft.wgsl`). The others compute in f32,
//! within an error bound; a repeated run on the same adapter and driver has the same bits.
//!
//! A [`Device`] owns its memory; a [`Matrix`] is a plain handle to part of it. Operations are
//! queued in order and return at once; only downloads, large uploads and [`Device::wait`] wait. A
//! kernel is compiled when it is first used, and no GPU is needed to build the crate.
#![forbid(unsafe_code)]

pub mod activation;
pub mod attention;
pub mod average;
mod device;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
mod error;
pub mod flip;
pub mod gemm;
pub mod health;
pub mod kernels;
pub mod loss;
mod matrix;
pub mod mvue;
pub mod norm;
pub mod optimizer;
pub mod permute;
pub mod prune;
pub mod rows;
pub mod scale;
pub mod search;
mod self_test;
pub mod sums;

pub use device::{Arrivals, Copied, Device, Recorded};
pub use error::Error;
pub use matrix::{Matrix, Tiles};

/// A `Result` that defaults to no value and to this crate's error.
type Result<T = (), E = Error> = core::result::Result<T, E>;

/// Invocations of a workgroup in kernels that have one element or word per invocation.
const WORKGROUP: usize = 64;
