//! Kernels use the threads of the rayon pool they are called on.

use crate::Error;

/// Threads of the current pool.
#[must_use]
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Runs `work` on a new pool of `threads` threads, or of one per core if `threads` is 0. Results
/// never depend on the number.
///
/// # Errors
/// [`Error::Threads`] if the operating system does not start the threads.
pub fn on_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|_| Error::Threads { threads })?;
    Ok(pool.install(work))
}
