//! Pre-training transformers with 2:4 sparsity.
#[cfg(feature = "run")]
pub mod checkpoint;
#[cfg(feature = "run")]
pub mod data;
mod error;
#[cfg(feature = "run")]
pub mod interchange;
#[cfg(feature = "run")]
pub mod run;

pub use error::{Error, ErrorKind};
