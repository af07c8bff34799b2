//! Saving beside the work that goes on: a thread takes what was snapshotted and writes it, one
//! checkpoint at a time.
//!
//! Invariant: at most one save is in flight, in the order of [`save`] and [`retain`]; its outcome
//! is told exactly once, and dropping waits for it. Deliberately absent: how a snapshot is taken.

use std::{
    panic::resume_unwind,
    path::PathBuf,
    thread::{Builder, JoinHandle},
};

use super::{Checkpoint, Retention, retain, save};
use crate::Error;

/// Writes the checkpoints of one directory.
#[derive(Debug)]
pub struct Saver {
    directory: PathBuf,
    in_flight: Option<JoinHandle<Written>>,
    spare: Option<Checkpoint>,
}

type Written = (Option<Checkpoint>, Result<PathBuf, Error>);

impl Saver {
    /// A saver with nothing in flight.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self { directory, in_flight: None, spare: None }
    }

    /// Takes the checkpoint, runs `before` (what must be on the device first, such as the metrics),
    /// saves, then removes what need not stay.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread starts. What goes wrong later is told by [`Saver::wait`].
    ///
    /// # Panics
    /// If a save is in flight.
    pub fn begin(
        &mut self,
        checkpoint: impl FnOnce() -> Result<Checkpoint, Error> + Send + 'static,
        retention: Retention,
        before: impl FnOnce() -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        assert!(self.in_flight.is_none(), "one save is in flight at a time");
        let directory = self.directory.clone();
        let write = move || {
            give_way();
            let checkpoint = match checkpoint() {
                Ok(checkpoint) => checkpoint,
                Err(error) => return (None, Err(error)),
            };
            let written = before().and_then(|()| save(&directory, &checkpoint)).and_then(|path| {
                retain(&directory, &retention)?;
                Ok(path)
            });
            (Some(checkpoint), written)
        };
        let thread = Builder::new().name("checkpoint".to_owned()).spawn(write);
        self.in_flight =
            Some(thread.map_err(|e| Error::io("start a thread to save to", &self.directory, e))?);
        Ok(())
    }

    /// Whether [`Saver::wait`] would not wait.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the save in flight; gives the checkpoint's path, or none if there was no save to
    /// tell of.
    ///
    /// # Errors
    /// Those of [`save`] and [`retain`], and of what ran before them.
    pub fn wait(&mut self) -> Result<Option<PathBuf>, Error> {
        let Some(thread) = self.in_flight.take() else { return Ok(None) };
        let (checkpoint, written) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        self.spare = checkpoint;
        written.map(Some)
    }

    /// The checkpoint written last, whose room the next snapshot can take.
    pub fn spare(&mut self) -> Option<Checkpoint> {
        self.spare.take()
    }
}

/// Takes the processor time that the steps leave; who waits for a save leaves it all.
fn give_way() {
    // There it is of this thread; elsewhere of the whole process.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 19);
}

impl Drop for Saver {
    fn drop(&mut self) {
        // Nobody is left to be told; a panic of the thread was printed.
        drop(self.in_flight.take().map(JoinHandle::join));
    }
}
