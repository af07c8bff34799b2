//! CUDA kernels for 2:4 sparse pre-training, on NVIDIA's sparse tensor cores.
//!
//! The operations carry the names of [`sparse24_core`] and `sparse24_cpu`; what core defines to the
//! bit is the same bits here. Nothing of CUDA is needed to build this crate: the driver, the
//! compiler of kernels and the library of dense products are loaded when a [`Device`] is opened,
//! and a missing one is an [`Error`] that says which file names were tried.
//!
//! A [`Device`] owns its memory; a [`Matrix`] is a plain handle to some of it. Operations are
//! queued in order and return at once; only downloads and [`Device::synchronize`] wait.

pub mod activation;
pub mod adamw;
mod architecture;
pub mod attention;
#[cfg(feature = "bench")]
pub mod bench;
mod beta;
pub mod bias;
mod cache;
mod compile;
pub mod compressed;
mod copy;
mod device;
mod driver;
pub mod dropout;
pub mod embedding;
mod error;
pub mod flip;
pub mod gemm;
mod host_copy;
pub mod kernels;
mod launch;
pub mod layout;
pub mod library;
pub mod loss;
mod matrix;
mod memory;
pub mod mvue;
pub mod norm;
mod operand;
pub mod profile;
pub mod prune;
mod recording;
pub mod search;
pub mod spmm24;
mod step;
pub mod survey;
mod tensor_map;
mod timing;

pub use architecture::Architecture;
pub use beta::Beta;
pub use compile::{Compiled, Release, compile};
pub use device::{Device, Settings};
pub use error::Error;
pub use host_copy::HostCopy;
pub use matrix::{Matrix, Scalar};
pub use recording::Recording;
pub use step::StepState;
