//! Stretches of queued work that are recorded once and replayed as one launch: CUDA graphs.
//!
//! Invariant: a replay queues the very launches that were recorded, with the same arguments, so its
//! results have the same bits; what changes between replays is what lies in memory, the step state
//! among it. What would not be that (host memory that is read or written, memory that is allocated,
//! a wait) is refused while recording. Deliberately absent: what is worth recording.

use std::{ptr::null_mut, sync::Arc};

use cudarc::driver::{CudaContext, sys};

use crate::{Device, Error};

/// Work that was recorded on a device, until it is dropped; stale once the device is reset.
#[derive(Debug)]
pub struct Recording {
    graph: sys::CUgraphExec,
    mark: u64,
    context: Arc<CudaContext>,
}

// SAFETY: the graph belongs to the context, which any thread may use once it is bound there; every
// use binds it.
unsafe impl Send for Recording {}

impl Device {
    /// From now on work is recorded instead of done. All kernels of it were launched before, since
    /// loading one cannot be recorded.
    ///
    /// # Errors
    /// [`Error::Recording`] if it is being done already; [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn start_recording(&mut self) -> Result<(), Error> {
        self.refuse_while_recording("recording")?;
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and nothing else uses it.
        self.said("recording", unsafe {
            sys::cuStreamBeginCapture_v2(self.stream.cu_stream(), mode)
        })?;
        self.recording = true;
        Ok(())
    }

    /// What was recorded; work is done again. To be called also where recording some of it failed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`] if something of it cannot be recorded.
    pub fn stop_recording(&mut self) -> Result<Recording, Error> {
        self.recording = false;
        self.bind()?;
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: the stream is alive, and the driver writes a pointer.
        self.said("the end of a recording", unsafe {
            sys::cuStreamEndCapture(self.stream.cu_stream(), &mut graph)
        })?;
        // SAFETY: the graph is whole, and the driver writes a pointer.
        let made = self.said("preparing a recording", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)
        });
        // SAFETY: it was made once and is destroyed once; what was made of it does not need it.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        made?;
        Ok(Recording { graph: executable, mark: self.mark, context: Arc::clone(&self.context) })
    }

    /// Queues what was recorded.
    ///
    /// # Errors
    /// [`Error::Stale`] for a recording of another device or of memory that was given back;
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn replay(&mut self, recording: &Recording) -> Result<(), Error> {
        if recording.mark != self.mark {
            return Err(Error::Stale { operation: "replay", operand: "the recording" });
        }
        self.refuse_while_recording("replay")?;
        self.bind()?;
        // SAFETY: the graph is alive, and all memory that it names is held, since the mark is the
        // device's.
        self.said("replay", unsafe { sys::cuGraphLaunch(recording.graph, self.stream.cu_stream()) })
    }

    /// For operations that would be done now or not at all.
    pub(crate) fn refuse_while_recording(&self, operation: &'static str) -> Result<(), Error> {
        if self.recording { Err(Error::Recording { operation }) } else { Ok(()) }
    }

    fn said(&self, what: &str, result: sys::CUresult) -> Result<(), Error> {
        result.result().map_err(|error| self.refused(what.into(), error))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: it was made once and is destroyed once; the driver keeps what a launch under
            // way needs.
            let _ = unsafe { sys::cuGraphExecDestroy(self.graph) };
        }
    }
}
