//! The threads of a command.

use sparse24_run::processor;

use crate::failure::{Exit, Failure, Result};

/// Runs on the configured number of threads, 0 being one per core.
pub(crate) fn on_threads<T: Send>(
    threads: usize,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    // A foreign configuration may ask for thousands; results do not depend on their number.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    processor::on_threads(threads.min(cores.saturating_mul(4).max(64)), work).map_err(|error| {
        Failure::new(Exit::Io, format!("backend.threads: {error}; ask for fewer"))
    })?
}
