//! Pre-training transformers with 2:4 sparsity.
pub mod backend;
#[cfg(feature = "run")]
pub mod checkpoint;
#[cfg(all(feature = "run", feature = "cpu"))]
pub mod config;
#[cfg(feature = "run")]
pub mod data;
mod error;
pub mod estimate;
pub mod method;
pub mod model;
pub mod nn;
pub mod optim;
pub mod schedule;
#[cfg(all(feature = "run", feature = "cpu"))]
pub mod session;
pub mod trainer;

pub use error::{Error, ErrorKind};
