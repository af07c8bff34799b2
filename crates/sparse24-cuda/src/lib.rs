//! CUDA kernels for 2:4 sparse pre-training on NVIDIA's sparse tensor cores.
//!
//! Operations have the names of [`sparse24_core`] and `sparse24_cpu`, and the same bits where core
//! defines them. CUDA is not needed to build this crate: the driver, the kernel compiler and
//! cuBLASLt are loaded when a [`Device`] is opened; if one is missing, the [`Error`] lists the
//! files that were tried.
//!
//! A [`Device`] owns its memory; a [`Matrix`] is a plain handle to part of it. Operations are
//! queued in order and return at once; only downloads and [`Device::synchronize`] wait.

pub mod activation;
pub mod add;
mod architecture;
pub mod attention;
pub mod average;
#[cfg(feature = "bench")]
pub mod bench;
pub mod bias;
mod cache;
mod compile;
pub mod compressed;
mod device;
pub mod distance;
mod driver;
pub mod dropout;
pub mod embedding;
mod error;
pub mod flip;
pub mod gemm;
pub mod health;
pub mod kernels;
mod launch;
pub mod layout;
pub mod library;
pub mod loader;
pub mod loss;
mod matrix;
pub mod mvue;
pub mod nccl;
pub mod norm;
pub mod optimizer;
pub mod permute;
mod plan;
pub mod profile;
pub mod prune;
pub mod rows;
pub mod scale;
pub mod search;
pub mod spmm24;
pub mod survey;
mod tensor_map;

pub use architecture::Architecture;
pub use compile::{Compiled, Release, compile};
pub use device::{Device, Graph, HostCopy, Settings, capturing};
pub use error::Error;
pub use matrix::{Matrix, Scalar};

/// A `Result` that defaults to no value and to this crate's error.
type Result<T = (), E = Error> = core::result::Result<T, E>;
