//! A second stream, for work beside the operations that follow.
//!
//! Invariant: work on it starts after all that was queued before it, and [`Device::join`] ends
//! before anything that is queued later. Between the two, no operation writes what that work reads
//! or writes, nor reads what it writes.

use std::{mem, sync::Arc};

use cudarc::driver::DriverError;

use super::Device;
use crate::{Error, Result, error::driver_error};

/// Any priority above that of the stream of operations: blocks of this work are placed first.
const PRIORITY: i32 = -1;

impl Device {
    /// Queues `work` after all earlier work, and beside what is queued from now on until
    /// [`Self::join`].
    ///
    /// # Errors
    /// The error of `work`; [`Error::Capturing`], [`Error::Driver`].
    pub fn beside(&mut self, work: impl FnOnce(&mut Self) -> Result) -> Result {
        self.refuse_in_capture("work beside operations")?;
        let side = match self.side.take() {
            Some(side) => side,
            None => self.context.new_stream_with_priority(PRIORITY).map_err(side_error)?,
        };
        self.side = Some(Arc::clone(&side));
        side.join(&self.stream).map_err(side_error)?;
        let stream = mem::replace(&mut self.stream, side);
        let done = work(self);
        self.stream = stream;
        done
    }

    /// Makes work that is queued from now on wait for that of [`Self::beside`].
    ///
    /// # Errors
    /// [`Error::Capturing`], [`Error::Driver`].
    pub fn join(&mut self) -> Result {
        let Some(side) = &self.side else { return Ok(()) };
        self.refuse_in_capture("waiting for work beside operations")?;
        self.stream.join(side).map_err(side_error)
    }
}

fn side_error(error: DriverError) -> Error {
    driver_error("ordering two streams", error)
}
