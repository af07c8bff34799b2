//! Saves checkpoints on a thread of their own, one at a time, while training continues.
//!
//! Invariant: at most one save is in flight; its outcome is reported exactly once, and dropping
//! waits for it.

use std::{
    panic::resume_unwind,
    path::{Path, PathBuf},
    thread::{Builder, JoinHandle},
};

use super::{Checkpoint, Retention, retain, save};
use crate::{Error, Result};

/// Writes the checkpoints of one directory.
#[derive(Debug)]
pub struct Saver {
    directory: PathBuf,
    in_flight: Option<JoinHandle<Written>>,
    spare: Option<Checkpoint>,
}

type Written = (Option<Checkpoint>, Result<PathBuf>);

impl Saver {
    /// A saver with nothing in flight.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self { directory, in_flight: None, spare: None }
    }

    /// Starts a thread that builds the checkpoint, runs `before` (which syncs files that must be on
    /// disk first, such as the metrics), saves, runs `after` with the path of the checkpoint, and
    /// then removes what need not be kept.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread starts; [`Saver::wait`] reports later errors.
    ///
    /// # Panics
    /// If a save is in flight.
    pub fn begin(
        &mut self,
        checkpoint: impl FnOnce() -> Result<Checkpoint> + Send + 'static,
        retention: Retention,
        before: impl FnOnce() -> Result + Send + 'static,
        after: impl FnOnce(&Path) -> Result + Send + 'static,
    ) -> Result {
        assert!(self.in_flight.is_none(), "one save is in flight at a time");
        let directory = self.directory.clone();
        let write = move || {
            lower_priority();
            let checkpoint = match checkpoint() {
                Ok(checkpoint) => checkpoint,
                Err(error) => return (None, Err(error)),
            };
            let written = before().and_then(|()| save(&directory, &checkpoint)).and_then(|path| {
                after(&path)?;
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

    /// Whether [`Saver::wait`] returns at once.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the save in flight and returns the checkpoint's path; none if no save was in
    /// flight.
    ///
    /// # Errors
    /// Errors of the thread: from the snapshot, `before`, [`save`] and [`retain`].
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(thread) = self.in_flight.take() else { return Ok(None) };
        let (checkpoint, written) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        self.spare = checkpoint;
        written.map(Some)
    }

    /// The checkpoint written last, whose buffers the next snapshot can reuse.
    pub fn spare(&mut self) -> Option<Checkpoint> {
        self.spare.take()
    }
}

/// Leaves processor time to the training steps.
fn lower_priority() {
    // Only on Linux does this concern the calling thread alone.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 19);
}

impl Drop for Saver {
    fn drop(&mut self) {
        drop(self.in_flight.take().map(JoinHandle::join));
    }
}
