//! Kernels use the threads of the rayon pool they are called on.

use crate::Error;

/// Threads of the current pool.
#[must_use]
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Most threads of a pool; no machine has more, and each takes memory.
pub const MOST_THREADS: usize = 4096;

/// Runs `work` on a new pool of `threads` threads, or of one per core if `threads` is 0. Results
/// never depend on the number.
///
/// # Errors
/// [`Error::TooManyThreads`] for more than [`MOST_THREADS`]; [`Error::Threads`] if the operating
/// system does not start the threads.
pub fn on_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    if threads > MOST_THREADS {
        return Err(Error::TooManyThreads { threads, most: MOST_THREADS });
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|_| Error::Threads { threads })?;
    Ok(pool.install(work))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_no_more_threads_than_any_machine() {
        let refusal = Error::TooManyThreads { threads: 1 << 20, most: MOST_THREADS };
        assert_eq!(on_threads(1 << 20, || ()), Err(refusal));
        assert_eq!(on_threads(3, super::threads), Ok(3));
    }
}
