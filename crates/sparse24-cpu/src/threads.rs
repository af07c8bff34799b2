//! How many threads kernels use: those of the rayon pool they are called on.

use crate::Error;

/// Threads of the current pool.
#[must_use]
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Runs `work` on a pool of its own; 0 threads is one a core. Results never depend on the number.
///
/// # Errors
/// [`Error::Threads`] if the operating system does not start as many.
pub fn on_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|_| Error::Threads { threads })?;
    Ok(pool.install(work))
}
