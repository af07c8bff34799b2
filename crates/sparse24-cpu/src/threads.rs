//! How many threads kernels use: those of the rayon pool they are called on.

/// Threads of the current pool.
#[must_use]
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Runs `work` on a pool of its own; 0 threads is one a core. Results never depend on the number.
///
/// # Panics
/// If the operating system starts no thread.
pub fn on_threads<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("the operating system starts threads");
    pool.install(work)
}
