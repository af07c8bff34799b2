//! The processor of this machine: threads, SIMD level and measured speed.

use std::time::{Duration, Instant};

use ndarray::Array2;
use sparse24_cpu::gemm::matmul;

use crate::{Error, Result};

pub use sparse24_cpu::{Simd, on_threads};

/// Runs on the pool of the caller, or outside of one on as many threads as `backend.threads` says.
pub(crate) fn on_configured<T: Send>(
    threads: usize,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    if threads == 0 || rayon::current_thread_index().is_some() {
        return work();
    }
    on_threads(threads, work)
        .map_err(|error| Error::setting("backend.threads", error.to_string()))?
}

/// FLOP/s of a dense product `[512, d_model] x [d_model, d_ff]` on the threads of the current pool:
/// the best of a quarter second. Larger products run no faster, so `d_model` is capped at 2048 and
/// `d_ff` at 8192.
///
/// # Errors
/// Errors from the kernel.
pub fn flops_per_second(d_model: usize, d_ff: usize) -> Result<f64> {
    const TOKENS: usize = 512;
    let (d_model, d_ff) = (d_model.min(2048), d_ff.min(8192));
    let (x, w) = (Array2::<f32>::ones((TOKENS, d_model)), Array2::<f32>::ones((d_ff, d_model)));
    let mut z = Array2::zeros((TOKENS, d_ff));
    let (started, mut best) = (Instant::now(), Duration::MAX);
    while started.elapsed() < Duration::from_millis(250) {
        let start = Instant::now();
        matmul(x.view(), w.t(), z.view_mut(), sparse24_core::op::Accumulate::Overwrite)?;
        best = best.min(start.elapsed());
    }
    Ok(2.0 * (TOKENS * d_model * d_ff) as f64 / best.as_secs_f64())
}
