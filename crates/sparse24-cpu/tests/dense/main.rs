//! The dense kernels against naive loops in f64 within derived bounds, and against themselves on 1,
//! 2 and 7 threads.

mod activation;
mod adamw;
mod attention;
mod check;
mod gemm;
mod loss;
mod math;
mod norm;
mod rows;
