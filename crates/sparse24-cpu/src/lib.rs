//! Rayon kernels for 2:4 sparse pre-training on CPUs.

mod error;
pub use error::Error;

mod run;
mod shape;
mod tile;

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod bias;
pub mod dropout;
pub mod embedding;
pub mod gemm;
pub mod loss;
pub mod math;
pub mod norm;
pub mod rounding;
mod threads;

pub use threads::{on_threads, threads};
